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
from adadp_lab.report.figures import COLOURS, canvas, styled
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
    targets: dict[float, list[Record]] = {}
    for record in trained(records, "adadp/best"):
        targets.setdefault(record["settings"]["target_epsilon"], []).append(record)
    points = [Point(g[0]["steps_done"], accuracy(g), None, target) for target, g in sorted(targets.items())]
    found["adadp/best"] = Curve("AdaDP, our best recipe", points, True)
    return found


def cost_report(dataset: str, records: Sequence[Record]) -> Report:
    """The table in three blocks: the paper's, the published readings, and what is sound."""
    found = curves_of(records)
    first = trained(records, "adadp/lot")[0]["settings"]
    pca = first.get("pca_noise_multiplier")
    seeds = len(trained(records, "dpsgd/paper"))
    rows = [
        [
            f"{target}%", f"{printed[0]:.2f}", f"{printed[1]:.2f}",
            found["dpsgd/paper"].cell(target, claimed=True), found["adadp/lot"].cell(target, claimed=True),
            found["adadp/example"].cell(target, claimed=True), found["dpsgd/paper"].cell(target, claimed=False),
            found["dpsgd/sound"].cell(target, claimed=False), found["adadp/sound"].cell(target, claimed=False),
            found["adadp/best"].cell(target, claimed=False),
        ]
        for target, printed in PRINTED[dataset].items()
    ]  # fmt: skip
    head = ["accuracy", "paper: DPSGD", "paper: AdaDP", "Theorem 1: DPSGD", "Theorem 1: AdaDP, lot (no guarantee)",
            "Theorem 1: AdaDP, example (no guarantee)", "PLD: DPSGD, paper's settings", "PLD: DPSGD, our settings",
            "PLD: AdaDP, sound", "PLD: our best recipe"]  # fmt: skip
    included = f"; PLD includes DP-PCA (sigma_p = {pca:g}), Theorem 1 does not, as in the paper" if pca else ""
    text = paragraph(
        f"The least epsilon at delta = {first['delta']:g} for which the mean test accuracy of {seeds} seeds is",
        "reached, at",
        f"sigma = {first['noise_multiplier']:g} and lots of {first['lot']}{included}. {_recipe(dataset, records)}",
    )
    goals = table(
        ["accuracy", "half of the paper's epsilon", "our best recipe", "accuracy there", "goal"],
        [_goal(target, printed[1] / 2, found["adadp/best"]) for target, printed in PRINTED[dataset].items()],
    )
    best = table(
        ["epsilon (PLD, everything released)", "our best recipe: accuracy"],
        [[f"{p.pld:g}", str(p.accuracy)] for p in found["adadp/best"].points],
    )
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
    return (
        f"Our best recipe: {net}, a Kronecker shape from {shape}, lots of {best['settings']['lot']:,}, "
        f"{best['settings']['steps']:,} steps, noise calibrated to each epsilon."
    )


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
    """Accuracy against epsilon: claimed for the published readings, true for the sound ones, and the paper's rows."""
    figure, (left, right) = canvas(1, 2, width=10.4, height=4.0, sharey=True)
    styles = {"dpsgd/paper": "--", "adadp/lot": "--", "adadp/example": ":", "dpsgd/sound": "-", "adadp/sound": "-",
              "adadp/best": "-"}  # fmt: skip
    for who in ("adadp/lot", "adadp/example", "dpsgd/paper"):
        points = found[who].points
        left.plot([p.claimed or 0.0 for p in points], [p.accuracy.value for p in points], styles[who],
                  color=COLOURS[who.partition("/")[0]], label=found[who].label)  # fmt: skip
    for who in ("adadp/best", "adadp/sound", "dpsgd/sound", "dpsgd/paper"):
        points = found[who].points
        right.plot([p.pld for p in points], [p.accuracy.value for p in points], styles[who],
                   color="black" if who == "adadp/best" else COLOURS[who.partition("/")[0]],
                   marker=None if who == "dpsgd/paper" else "o", markersize=3.5, label=found[who].label)  # fmt: skip
    for axis in (left, right):
        for index, name in enumerate(("dpsgd", "adadp")):
            pairs = [(pair[index], target) for target, pair in PRINTED[dataset].items()]
            axis.plot(*zip(*pairs, strict=True), "*", color=COLOURS[name], markersize=10, markeredgecolor="white",
                      label=f"paper's Table 1, {'DPSGD' if name == 'dpsgd' else 'AdaDP'}")  # fmt: skip
        axis.set_xscale("log")
        axis.legend(loc="lower right", fontsize=7)
    low = min(PRINTED[dataset])
    left.set_ylim(low - 27, min(100.0, low + 14))
    left.set(xlabel=rf"$\epsilon$ claimed by Theorem 1 ($\delta$ = {delta:g})", ylabel="test accuracy (%)",
             title=f"{NAME[dataset]}: as published, no guarantee for AdaDP")  # fmt: skip
    right.set(xlabel=rf"$\epsilon$ by PLD, everything charged ($\delta$ = {delta:g})",
              title=f"{NAME[dataset]}: with a guarantee")  # fmt: skip
    for axis in (left, right):
        axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.minorticks_off()
    left.set_xlim(0.1, 10)
    right.set_xlim(0.04, 10)
    return figure


_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
