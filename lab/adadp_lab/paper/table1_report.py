"""Table 1 from its records: for each accuracy the least epsilon, in every reading and by every way of counting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure

from adadp_lab.paper.contenders import NAME
from adadp_lab.paper.item import Finding, Record, Report, Word
from adadp_lab.paper.summary import accuracy, curve, only, trained, word
from adadp_lab.report.figures import COLOURS, MARKS, NAMES, canvas, legend_below, styled
from adadp_lab.report.tables import Mean, paragraph, table

#: Accuracy in percent -> epsilon of DPSGD and of AdaDP, as printed; and AdaDP's average reduction in percent.
PRINTED = {
    "mnist": {92: (1.10, 0.75), 94: (1.61, 0.78), 95: (1.96, 0.80), 96: (5.48, 1.40)},
    "cifar10": {68: (0.89, 0.62), 69: (1.85, 1.07), 70: (4.75, 2.13), 71: (8.36, 3.55)},
}
PRINTED_REDUCTION = {"mnist": 54, "cifar10": 46}
#: A printed epsilon of AdaDP is met by at most this many times as much; one of DPSGD agrees within this part of it.
MET, AGREES = 1.1, 0.2
#: The average reduction may be this many points less than printed.
NEAR = 5.0


class Point(NamedTuple):
    """A number of steps, the accuracy there, and what they cost: claimed, and by PLD with all that was released."""

    steps: int
    accuracy: Mean
    claimed: float | None
    pld: float


@dataclass(frozen=True)
class Curve:
    """What a contender reaches for what; `sound` where there is a guarantee."""

    label: str
    points: list[Point]
    sound: bool

    def least(self, target: float, *, claimed: bool) -> float | None:
        """The least epsilon at which the mean accuracy is `target` percent."""
        costs = [p.claimed if claimed else p.pld for p in self.points if p.accuracy.value >= target]
        return min((cost for cost in costs if cost is not None), default=None)

    def most(self, *, claimed: bool) -> float:
        """What its dearest point cost."""
        return max((p.claimed or 0.0) if claimed else p.pld for p in self.points)

    def cell(self, target: float, *, claimed: bool) -> str:
        found = self.least(target, claimed=claimed)
        if found is not None:
            return f"{math.ceil(100 * found - 1e-9) / 100:.2f}"  # a cost is never rounded down
        best = max(p.accuracy.value for p in self.points)
        return f"> {self.most(claimed=claimed):.2f} (best {best:.1f}%)"


def curves_of(records: Sequence[Record]) -> dict[str, Curve]:
    """Every contender's."""
    cost = only(records, "account")
    claimed = dict(zip(cost["claimed"]["steps"], cost["claimed"]["epsilon"], strict=True))
    pld = dict(zip(cost["settings"]["pld"], cost["pld_with_pca"], strict=True))
    found = {}
    followed = {"dpsgd/paper": "DPSGD, paper's settings", "adadp/lot": "AdaDP, lot reading",
                "adadp/example": "AdaDP, example reading"}  # fmt: skip
    for who, label in followed.items():
        points = [Point(step, m, claimed[step], pld[step]) for step, m in curve(trained(records, who))]
        found[who] = Curve(label, points, who.startswith("dpsgd"))
    for who, label in (("dpsgd/sound", "DPSGD, our settings"), ("adadp/sound", "AdaDP, sound")):
        groups: dict[int, list[Record]] = {}
        for record in trained(records, who):
            groups.setdefault(record["steps_done"], []).append(record)
        points = [Point(step, accuracy(group), claimed[step], pld[step]) for step, group in sorted(groups.items())]
        found[who] = Curve(label, points, True)
    for who, label in (("adadp/best", "AdaDP, our best recipe"), ("dpsgd/best", "DPSGD, the same net and lots")):
        targets: dict[float, list[Record]] = {}
        for record in trained(records, who):
            targets.setdefault(record["settings"]["target_epsilon"], []).append(record)
        points = [Point(g[0]["steps_done"], accuracy(g), None, target) for target, g in sorted(targets.items())]
        if points:
            found[who] = Curve(label, points, True)
    return found


def cost_report(dataset: str, records: Sequence[Record]) -> Report:
    """The table in three blocks: the paper's, the published readings, and what is sound."""
    found = curves_of(records)
    first = trained(records, "adadp/lot")[0]["settings"]
    pca = first.get("pca_noise_multiplier")
    seeds, beside = len(trained(records, "dpsgd/paper")), found.get("dpsgd/best")
    rows = [
        [
            f"{target}%", f"{printed[0]:.2f}", f"{printed[1]:.2f}",
            found["dpsgd/paper"].cell(target, claimed=True), found["adadp/lot"].cell(target, claimed=True),
            found["adadp/example"].cell(target, claimed=True), found["dpsgd/paper"].cell(target, claimed=False),
            found["dpsgd/sound"].cell(target, claimed=False), found["adadp/sound"].cell(target, claimed=False),
            found["adadp/best"].cell(target, claimed=False),
            *([beside.cell(target, claimed=False)] if beside else []),
        ]
        for target, printed in PRINTED[dataset].items()
    ]  # fmt: skip
    head = ["accuracy", "paper: DPSGD", "paper: AdaDP", "Theorem 1: DPSGD", "Theorem 1: AdaDP, lot (no guarantee)",
            "Theorem 1: AdaDP, example (no guarantee)", "PLD: DPSGD, paper's settings", "PLD: DPSGD, our settings",
            "PLD: AdaDP, sound", "PLD: our best recipe",
            *(["PLD: DPSGD on our best recipe's net"] if beside else [])]  # fmt: skip
    included = f"; PLD includes DP-PCA (sigma_p = {pca:g}), Theorem 1 does not, as in the paper" if pca else ""
    text = paragraph(
        f"The least epsilon at delta = {first['delta']:g} for which the mean test accuracy of {seeds} seeds is",
        "reached, at",
        f"sigma = {first['noise_multiplier']:g} and lots of {first['lot']}{included}. {_recipe(dataset, records)}",
        *(["DP-PCA is charged in full before the first step: no run that begins with it costs less."] if pca else []),
        "The paper's own figures are Theorem 1's: they are drawn beside what Theorem 1 claims, and nowhere else.",
    )
    goals = table(
        ["accuracy", "half of the paper's epsilon", "our best recipe", "accuracy there", "goal"],
        [_goal(target, printed[1] / 2, found["adadp/best"]) for target, printed in PRINTED[dataset].items()],
    )
    best = _beside_dpsgd(found["adadp/best"], beside)
    name = f"table1-{dataset}"
    return Report(
        f"{text}\n\n{table(head, rows)}\n\n{goals}\n\n{best}",
        {name: _figure(dataset, found, first["delta"])},
        _findings(dataset, found),
    )


def _recipe(dataset: str, records: Sequence[Record]) -> str:
    best = trained(records, "adadp/best")[0]
    linear = "one linear layer on features of a wide residual net pre-trained on CIFAR-100"
    net = "tanh CNN" if dataset == "mnist" else linear
    shape = "probes" if dataset == "mnist" else "public features"
    apart = (
        " DPSGD and the shape were compared on one block of such features, with examples set aside: "
        "[features](../features/features.md)."
    )
    beside = "" if dataset == "mnist" else apart
    return (
        f"Our best recipe: {net}, a Kronecker shape from {shape}, lots of {best['settings']['lot']:,}, "
        f"{best['settings']['steps']:,} steps, noise calibrated to each epsilon.{beside}"
    )


def _beside_dpsgd(best: Curve, dpsgd: Curve | None) -> str:
    """The recipe at every epsilon, and DPSGD on the same net where it was run."""
    head, rows = ["epsilon (PLD, everything released)", "our best recipe: accuracy"], []
    others = {p.pld: p.accuracy for p in dpsgd.points} if dpsgd else {}
    for p in best.points:
        gain = p.accuracy.less(others[p.pld]) if others else None
        more = [str(others[p.pld]), f"{'+' if gain.value >= 0 else ''}{gain}"] if gain else []
        rows.append([f"{p.pld:g}", str(p.accuracy), *more])
    return table([*head, *(["DPSGD, same net, lots and steps", "ahead by"] if others else [])], rows)


def _goal(target: float, half: float, best: Curve) -> list[str]:
    met = [p for p in best.points if p.accuracy.value >= target]
    if not met:
        return [f"{target}%", f"{half:g}", best.cell(target, claimed=False), "", "missed"]
    word = "met" if met[0].pld <= half else "missed"
    return [f"{target}%", f"{half:g}", f"{met[0].pld:g}", str(met[0].accuracy), word]


# ---- findings -----------------------------------------------------------------------------------------------------


def _findings(dataset: str, found: dict[str, Curve]) -> list[Finding]:
    made = []
    for target, (dpsgd, adadp) in PRINTED[dataset].items():
        made.append(
            Finding(f"table1-{dataset}-{target}-dpsgd", {
                "as printed": _agrees(found["dpsgd/paper"], target, dpsgd, claimed=True),
                "sound": _agrees(found["dpsgd/sound"], target, dpsgd, claimed=False),
            })
        )  # fmt: skip
        made.append(
            Finding(f"table1-{dataset}-{target}-adadp", {
                "lot": _met(found["adadp/lot"], target, adadp, claimed=True),
                "example": _met(found["adadp/example"], target, adadp, claimed=True),
                "sound": _met(found["adadp/sound"], target, adadp, claimed=False),
                "sound, best recipe": _met(found["adadp/best"], target, adadp, claimed=False),
            })
        )  # fmt: skip
    reduction = {
        "lot": _reduction(dataset, found["adadp/lot"], found["dpsgd/paper"], claimed=True),
        "example": _reduction(dataset, found["adadp/example"], found["dpsgd/paper"], claimed=True),
        "sound": _reduction(dataset, found["adadp/sound"], found["dpsgd/sound"], claimed=False),
    }
    made.append(Finding(f"table1-{dataset}-average", reduction))
    return made


def _unexplored(curve: Curve, target: float, printed: float, *, claimed: bool) -> bool:
    """Not reached, but not tried for as much as the paper spends either."""
    return curve.least(target, claimed=claimed) is None and curve.most(claimed=claimed) < printed


def _met(curve: Curve, target: float, printed: float, *, claimed: bool) -> tuple[Word, str]:
    least = curve.least(target, claimed=claimed)
    if _unexplored(curve, target, printed, claimed=claimed):
        return "cannot be known", f"{curve.cell(target, claimed=claimed)}, not run for longer"
    return word(least is not None and least <= MET * printed), curve.cell(target, claimed=claimed)


def _agrees(curve: Curve, target: float, printed: float, *, claimed: bool) -> tuple[Word, str]:
    least = curve.least(target, claimed=claimed)
    if _unexplored(curve, target, printed, claimed=claimed):
        return "cannot be known", f"{curve.cell(target, claimed=claimed)}, not run for longer"
    return word(least is not None and abs(least - printed) <= AGREES * printed), curve.cell(target, claimed=claimed)


def _reduction(dataset: str, mine: Curve, rival: Curve, *, claimed: bool) -> tuple[Word, str]:
    """How much less AdaDP costs on average over the rows; a rival that never gets there costs at least its dearest."""
    parts, bound = [], False
    for target, (_, printed) in PRINTED[dataset].items():
        own = mine.least(target, claimed=claimed)
        if own is None:
            bare = f"{target}% is not reached ({mine.cell(target, claimed=claimed)})"
            unknown = _unexplored(mine, target, printed, claimed=claimed)
            return "cannot be known" if unknown else "does not hold", bare
        other = rival.least(target, claimed=claimed)
        bound = bound or other is None
        parts.append(100 * (1 - own / (other if other is not None else rival.most(claimed=claimed))))
    average = sum(parts) / len(parts)
    said = f"{'at least ' if bound else ''}{average:.0f}% ({', '.join(f'{part:.0f}' for part in parts)})"
    return word(average >= PRINTED_REDUCTION[dataset] - NEAR), said


@styled
def _figure(dataset: str, found: dict[str, Curve], delta: float) -> Figure:
    """Accuracy against epsilon: claimed by Theorem 1, as the paper's rows are, and true by PLD."""
    figure, (left, right) = canvas(1, 2, width=8.6, height=4.9, sharey=True)
    for who, style in (("adadp/lot", "--"), ("adadp/example", ":"), ("dpsgd/paper", "--")):
        points, name = found[who].points, who.partition("/")[0]
        left.plot([p.claimed or 0.0 for p in points], [p.accuracy.value for p in points], style, color=COLOURS[name],
                  marker=MARKS[name], markevery=max(1, len(points) // 6), markersize=4.5,
                  label=found[who].label)  # fmt: skip
    for index, (name, mark) in enumerate((("dpsgd", "P"), ("adadp", "*"))):
        pairs = [(pair[index], target) for target, pair in PRINTED[dataset].items()]
        left.plot(*zip(*pairs, strict=True), mark, color=COLOURS[name], markersize=11, markeredgecolor="white",
                  label=f"the paper's Table 1, {NAMES[name]}")  # fmt: skip
    for who, style, colour in (
        ("adadp/best", "-", "black"), ("dpsgd/best", "-.", "black"), ("adadp/sound", "-", COLOURS["adadp"]),
        ("dpsgd/sound", "-", COLOURS["dpsgd"]), ("dpsgd/paper", "--", COLOURS["dpsgd"]),
    ):  # fmt: skip
        if who not in found:
            continue
        points = found[who].points
        every = max(1, len(points) // 6) if who == "dpsgd/paper" else 1
        right.plot([p.pld for p in points], [p.accuracy.value for p in points], style, color=colour,
                   marker=MARKS[who.partition("/")[0]], markevery=every, markersize=4.5,
                   label=found[who].label)  # fmt: skip
    ends = [max(p.accuracy.value for p in each.points) for each in found.values()]
    left.set_ylim(min(ends) - 10, max(ends) + 1)
    left.set(xlabel=rf"$\epsilon$ claimed by Theorem 1 ($\delta$ = {delta:g})", ylabel="mean test accuracy (%)",
             title=f"{NAME[dataset]}: as published, no guarantee for AdaDP")  # fmt: skip
    right.set(xlabel=rf"$\epsilon$ by PLD, everything charged ($\delta$ = {delta:g})",
              title=f"{NAME[dataset]}: with a guarantee")  # fmt: skip
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.minorticks_off()
        axis.set_xlim(0.04, 10)
        legend_below(axis, columns=1)
    return figure


_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
