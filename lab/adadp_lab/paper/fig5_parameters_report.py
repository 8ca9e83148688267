"""Figure 5: the four parameter studies, from their records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from adadp_lab.paper.item import Finding, Record, Report, Word
from adadp_lab.paper.summary import accuracy, trained, word
from adadp_lab.report.figures import COLOURS, GREY, MARKS, canvas, legend_outside, styled
from adadp_lab.report.tables import Mean, paragraph, table

READINGS = {"adadp/lot": "lot", "adadp/example": "example", "adadp/sound": "sound"}
AXIS = {"lr": "learning rate", "beta": "local clipping factor", "noise": "noise level", "lot": "lot size"}
SYMBOL = {"lr": r"$\eta$", "beta": r"$\beta$", "noise": r"$\sigma_*$", "lot": "$L$"}
#: "Above 93%", and what "relatively resistant" is taken to mean: all within this many points.
CONSISTENT, RESISTANT = 93.0, 2.0
#: From which learning rate to which the paper's accuracy is consistently above it.
INSIDE = (0.0008, 0.005)
STYLE = {"adadp/lot": "--", "adadp/example": ":", "adadp/sound": "-", "dpsgd/paper": "--"}
LABEL = {
    "adadp/lot": "AdaDP, lot reading", "adadp/example": "AdaDP, example reading", "adadp/sound": "AdaDP, sound",
    "dpsgd/paper": "DPSGD, paper's settings",
}  # fmt: skip
Points = dict[float, Mean]


def value_of(study: str, record: Record) -> float:
    """The parameter's value, as the published readings have it; the sound form's is the multiple of its default."""
    settings = record["settings"]
    if study == "noise":
        return float(settings["noise_multiplier"])
    if study == "lot":
        return float(settings["lot"])
    own, default = record["used"], {"lr": 0.002, "beta": 1.2}[study]
    if settings["who"] != "adadp/sound":
        return float(own[study])
    if not settings["set"]:
        return default
    ratio = own["max_grad_norm"] / 0.1 if study == "beta" else own["lr"] / _default_rate(record)
    return float(f"{default * ratio:.3g}")


def _default_rate(record: Record) -> float:
    from adadp.algorithms.defaults import learning_rate

    settings = record["settings"]
    return learning_rate(
        record["used"]["max_grad_norm"], settings["lot"], settings["steps"], settings["noise_multiplier"], 71_010
    )


def points_of(study: str, records: Sequence[Record], who: str) -> Points:
    """Accuracy in percent by the parameter's value."""
    groups: dict[float, list[Record]] = {}
    for record in trained(records, who):
        groups.setdefault(value_of(study, record), []).append(record)
    return {value: accuracy(group) for value, group in sorted(groups.items())}


def study_report(study: str, records: Sequence[Record]) -> Report:
    """Accuracy by value in every reading."""
    found = {who: points_of(study, records, who) for who in LABEL if trained(records, who)}
    values = sorted({value for points in found.values() for value in points})
    steps = {value_of(study, r): r["settings"]["steps"] for r in trained(records, "adadp/lot")}
    cost = {(r["settings"]["noise_multiplier"], r["settings"]["rate"]): r for r in records if r["work"] == "account"}
    rows = []
    for value in values:
        lot = value if study == "lot" else 600
        spent = cost[value if study == "noise" else 8.0, lot / 60_000]
        rows.append([f"{value:g}", f"{steps[value]:,}", *(str(points.get(value, "")) for points in found.values()),
                     f"{spent['pld'][-1]:.3f} ({spent['pld_with_pca'][-1]:.3f})"])  # fmt: skip
    head = [AXIS[study], "steps", *(LABEL[who] for who in found), "sound: epsilon by PLD (with DP-PCA)"]
    seeds = len({record["seed"] for record in trained(records, "adadp/lot")})
    text = paragraph(
        f"Test accuracy in percent on MNIST, mean ± standard error over {seeds} seeds, after as many steps as Theorem",
        "1 allows at (0.5, 1e-5); the published readings have no guarantee.", _SOUND[study],
    )  # fmt: skip
    drawn = {f"fig-{study}": _figure(study, found)}
    return Report(f"{text}\n\n{table(head, rows)}", drawn, _FINDINGS[study](found))


_SOUND = {
    "lr": "The sound form's learning rate is its default times the same factor.",
    "beta": "The sound form has no beta: its bound C is its default times the same factor, its rate goes as 1/C.",
    "noise": "All have the same noise and steps.",
    "lot": "All have the same noise and steps.",
}


# ---- findings -----------------------------------------------------------------------------------------------------


def _each(found: dict[str, Points]) -> list[tuple[str, Points]]:
    return [(name, found[who]) for who, name in READINGS.items()]


def _listed(points: Points, values: Sequence[float] | None = None) -> str:
    return ", ".join(f"{value:g}: {m.value:.1f}" for value, m in points.items() if values is None or value in values)


def _best(points: Points, printed: float) -> tuple[Word, str]:
    """Whether the printed value does as well as the best one, within two standard errors."""
    top = max(points, key=lambda value: points[value].value)
    behind = points[top].less(points[printed])
    said = f"best at {top:g} ({points[top]}); {printed:g} gives {points[printed]}"
    return word(behind.value <= behind.slack), said


def _rises_and_falls(points: Points, peak: float) -> tuple[Word, str]:
    """Whether the curve rises to the peak and falls after it, but for two standard errors."""
    values = list(points)
    steps = [(a < peak, points[b].less(points[a])) for a, b in itertools.pairwise(values)]
    good = all(m.value > -m.slack if rising else m.value < m.slack for rising, m in steps)
    rises = [points[peak].less(points[end]) for end in (values[0], values[-1]) if end != peak]
    return word(good and all(m.value > m.slack for m in rises)), _listed(points)


def _lr(found: dict[str, Points]) -> list[Finding]:
    inside = [value for value in found["adadp/lot"] if INSIDE[0] <= value <= INSIDE[1]]
    return [
        Finding("lr-93", {
            name: (word(all(points[v].value >= CONSISTENT for v in inside)), _listed(points, inside))
            for name, points in _each(found)
        }),
        Finding("lr-peak", {name: _rises_and_falls(points, 0.002) for name, points in _each(found)}),
        Finding("lr-peak-printed", {name: _rises_and_falls(points, 0.02) for name, points in _each(found)}),
    ]  # fmt: skip


def _beta(found: dict[str, Points]) -> list[Finding]:
    flat, above = {}, {}
    for name, points in _each(found)[:2]:  # the sound form has no beta
        values = [m.value for m in points.values()]
        flat[name] = word(max(values) - min(values) <= RESISTANT), f"within {max(values) - min(values):.1f} points"
        above[name] = _best(points, 1.2)
    return [Finding("beta-flat", flat), Finding("beta-above-one", above)]


def _noise(found: dict[str, Points]) -> list[Finding]:
    return [
        Finding("noise-best-7", {name: _best(points, 7.0) for name, points in _each(found)}),
        Finding("noise-dpsgd-4", {"as printed": _best(found["dpsgd/paper"], 4.0)}),
    ]


def _lot(found: dict[str, Points]) -> list[Finding]:
    return [
        Finding("lot-best-800", {name: _best(points, 800.0) for name, points in _each(found)}),
        Finding("lot-peak", {name: _rises_and_falls(points, 800.0) for name, points in _each(found)}),
    ]


_FINDINGS = {"lr": _lr, "beta": _beta, "noise": _noise, "lot": _lot}


@styled
def _figure(study: str, found: dict[str, Points]) -> Figure:
    figure, (axis,) = canvas(width=5.6, height=4.0)
    for who, points in found.items():
        values = [m.value for m in points.values()]
        errors = [0.0 if math.isnan(m.error) else m.error for m in points.values()]
        axis.errorbar(list(points), values, yerr=errors, color=COLOURS[who.partition("/")[0]], linestyle=STYLE[who],
                      marker=MARKS[who.partition("/")[0]], markersize=4.5, capsize=2, label=LABEL[who])  # fmt: skip
    if study == "lr":
        axis.set_xscale("log")
        ticks = list(next(iter(found.values())))
        axis.set_xticks(ticks, [f"{1e3 * tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(r"learning rate $\eta\times 10^3$ (sound: default rate times $\eta$ / 0.002)")
        said = f"{CONSISTENT:g}%: the paper is above it from {1e3 * INSIDE[0]:g} to {1e3 * INSIDE[1]:g}"
        axis.axhline(CONSISTENT, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)), label=said)
    else:
        extra = r" (sound: bound $C$ = 0.1 times $\beta$ / 1.2)" if study == "beta" else ""
        axis.set_xlabel(f"{AXIS[study]} {SYMBOL[study]}{extra}")
    values = [m.value for points in found.values() for m in points.values()]
    axis.set_ylim(max(0.0, min(values) - 3), 100)
    axis.set_ylabel("test accuracy (%), mean ± standard error")
    legend_outside(figure, axis, columns=2)
    return figure
