"""Figures 4c and 4d: the distributions of |g_t|, of its estimate and of sigma_i, from their histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adadp_lab.paper.distributions import BINS, HIGH, LOW
from adadp_lab.paper.item import Finding, Record, Report, Word
from adadp_lab.paper.summary import trained, word
from adadp_lab.report.figures import COLOURS, GREY, canvas, legend_outside, styled
from adadp_lab.report.tables import Mean, mean, paragraph, table

READINGS = {"lot": "adadp/lot", "example": "adadp/example", "sound": "adadp/sound"}
TITLES = {"lot": "AdaDP, lot reading", "example": "AdaDP, example reading", "sound": "AdaDP, sound"}
#: The gradient that a reading's estimate is an estimate of.
TARGET = {"lot": "gradient", "example": "example_gradient", "sound": "example_gradient"}
#: "Accurate": half of the coordinates are estimated within this factor, and logarithms correlate by at least this much.
FACTOR, CORRELATED = 2.0, 0.5
#: "Many" sigma_i between 10 and 20: at least this part.
MANY = 0.2
_CENTRES = LOW + (np.arange(BINS) + 0.5) * (HIGH - LOW) / BINS


def _steps(records: Sequence[Record]) -> tuple[str, str]:
    first, last = trained(records, "adadp/lot")[0]["snapshots"]
    return first, last


def _looks(records: Sequence[Record], reading: str, step: str) -> list[dict[str, Any]]:
    return [record["snapshots"][step] for record in trained(records, READINGS[reading])]


def _summed(looks: Sequence[dict[str, Any]], key: str) -> np.ndarray[Any, Any]:
    return np.asarray(np.sum([look[key] for look in looks], axis=0))


def _less(first: Mean, last: Mean) -> bool:
    """Whether it fell by more than two standard errors."""
    fall = first.less(last)
    return fall.value > fall.slack


def _small(value: Mean) -> str:
    return f"{value.value:.3g}" + ("" if np.isnan(value.error) else f" ± {value.error:.1g}")


def _median(counted: Sequence[int]) -> float:
    """Of the values themselves, from their histogram: straight lines inside a bin."""
    histogram = np.asarray(counted)
    counts, half = np.cumsum(histogram), histogram.sum() / 2
    place = int(np.searchsorted(counts, half))
    inside = (half - counts[place] + histogram[place]) / histogram[place]
    return float(10 ** (_CENTRES[place] + (inside - 0.5) * (HIGH - LOW) / BINS))


def estimate_report(records: Sequence[Record]) -> Report:
    """Medians, the ratio of estimate to gradient, and how well they go together."""
    first, last = _steps(records)
    rows, accurate, declines = [], {}, {}
    for reading in READINGS:
        medians: dict[str, list[Mean]] = {"gradient": [], "estimate": []}
        good, said = True, []
        for step in (first, last):
            looks = _looks(records, reading, step)
            ratio, together = (mean(look[key] for look in looks) for key in ("median_ratio", "correlation"))
            medians["gradient"].append(mean(_median(look[TARGET[reading]]) for look in looks))
            medians["estimate"].append(mean(_median(look["estimate"]) for look in looks))
            fits = 1 / FACTOR <= ratio.value <= FACTOR
            good = good and fits and together.value >= CORRELATED
            said.append(f"step {step}: median ratio {ratio.value:.2f}, correlation {together.value:.2f}")
            rows.append([reading, step, _small(medians["gradient"][-1]), _small(medians["estimate"][-1]),
                         f"{ratio.value:.2f}", str(together)])  # fmt: skip
        accurate[reading] = word(good), "; ".join(said)
        falls = all(_less(*values) for values in medians.values())
        declines[reading] = (
            word(falls),
            ", ".join(f"median {name} {_small(values[0])} to {_small(values[1])}" for name, values in medians.items()),
        )
    text = paragraph(
        "Over all coordinates: the median of |g_t| and of its estimate sqrt(E'), the median of their ratio, and the",
        "correlation of their logarithms. In the lot reading g_t is the lot's average; in the others an example's",
        "gradient, of which the root mean square is shown. The sound form's shape has no scale of its own: it is",
        "fitted to the gradient's median, so its ratio says nothing and its correlation does.",
    )  # fmt: skip
    head = ["reading", "step", "median of abs(g_t)", "of the estimate", "median ratio", "correlation of logarithms"]
    findings = [Finding("estimate-accurate", accurate), Finding("estimate-declines", declines)]
    return Report(f"{text}\n\n{table(head, rows)}", {"fig-estimate": _estimate_figure(records)}, findings)


def sigma_report(records: Sequence[Record]) -> Report:
    """How large the noise of a coordinate is, and whether it falls."""
    first, last = _steps(records)
    rows = []
    below: dict[str, tuple[Word, str]] = {}
    many: dict[str, tuple[Word, str]] = {}
    falls: dict[str, tuple[Word, str]] = {}
    for reading in READINGS:
        parts, median = {}, []
        for step in (first, last):
            looks = _looks(records, reading, step)
            small, middle = (mean(100 * look[key] for look in looks) for key in ("sigma_below_10", "sigma_10_to_20"))
            quantiles = np.mean([look["sigma_quantiles"] for look in looks], axis=0)
            parts[step] = small.value, middle.value
            median.append(mean(look["sigma_quantiles"][2] for look in looks))
            rows.append([reading, step, *(f"{q:.3g}" for q in quantiles), str(small), str(middle)])
        below[reading] = word(parts[last][0] > 50), f"{parts[last][0]:.0f}% below 10 at step {last}"
        many[reading] = word(parts[first][1] >= 100 * MANY), f"{parts[first][1]:.0f}% from 10 to 20 at step {first}"
        said = f"median over coordinates {_small(median[0])} at step {first}, {_small(median[1])} at {last}"
        falls[reading] = word(_less(*median)), said
    text = paragraph(
        "The deviation sigma_i of a coordinate's noise, as it is added to the lot's sum. The sound form bounds",
        "an example at C = 0.1 and adds noise of one deviation in the shape's coordinates; shown is what it comes to",
        "in the gradient's own.",
    )
    head = ["reading", "step", "5%", "25%", "median", "75%", "95%", "below 10 (%)", "10 to 20 (%)"]
    findings = [Finding("sigma-below-10", below), Finding("sigma-10-to-20", many), Finding("sigma-falls", falls)]
    return Report(f"{text}\n\n{table(head, rows)}", {"fig-sigma": _sigma_figure(records)}, findings)


@styled
def _estimate_figure(records: Sequence[Record]) -> Figure:
    """The paper's layout: |g_t| above, its estimate below; one column for each reading."""
    figure, axes = canvas(2, 3, width=8.6, height=4.6, sharex="col")
    steps = _steps(records)
    for column, reading in enumerate(READINGS):
        for row, key in enumerate((TARGET[reading], "estimate")):
            axis = axes[3 * row + column]
            _draw_histograms(axis, steps, [_summed(_looks(records, reading, step), key) for step in steps])
            axis.set_yticks([])
            axis.set_ylim(bottom=0)
            axis.grid(visible=False)
        kind = "the lot's average" if reading == "lot" else "examples, root mean square"
        axes[column].set_title(f"{TITLES[reading]}:\n{kind}")
        axes[3 + column].set_xlabel("value")
        keys = (TARGET[reading], "estimate")
        axes[column].set_xlim(_span([_summed(_looks(records, reading, step), key) for step in steps for key in keys]))
    axes[0].set_ylabel("share of coordinates\n" + r"with this $|g_t|$")
    axes[3].set_ylabel("share of coordinates\n" + r"with this $\sqrt{E'[g^2]_{t-1}}$")
    legend_outside(figure, axes[0])
    return figure


@styled
def _sigma_figure(records: Sequence[Record]) -> Figure:
    figure, axes = canvas(1, 3, width=8.6, height=3.2, sharex=True)
    steps = _steps(records)
    every = [_summed(_looks(records, reading, step), "sigma") for reading in READINGS for step in steps]
    for axis, reading in zip(axes, READINGS, strict=True):
        histograms = [_summed(_looks(records, reading, step), "sigma") for step in steps]
        _draw_histograms(axis, steps, histograms)
        axis.axvspan(10, 20, facecolor="none", edgecolor=COLOURS["adan"], hatch="////", linewidth=0, zorder=0,
                     label=f"from 10 to 20: the paper sees many of them there at step {steps[0]}")  # fmt: skip
        axis.set(title=TITLES[reading], xlabel=r"$\sigma_i$", xlim=_span(every))
        axis.set_yticks([])
        axis.set_ylim(bottom=0)
        axis.grid(visible=False)
    axes[0].set_ylabel("share of coordinates")
    legend_outside(figure, axes[0])
    return figure


def _draw_histograms(axis: Axes, steps: Sequence[str], histograms: Sequence[np.ndarray[Any, Any]]) -> None:
    """Both steps' shares; each with its own outline too, which is told apart without colours."""
    for step, counts, colour, style in zip(steps, histograms, (GREY, COLOURS["adadp"]), ("--", "-"), strict=True):
        shares = counts / counts.sum()
        axis.fill_between(10**_CENTRES, shares, step="mid", color=colour, alpha=0.22, linewidth=0)
        axis.step(10**_CENTRES, shares, style, where="mid", color=colour, linewidth=1.2, label=f"step {step}")
    axis.set_xscale("log")


def _span(histograms: Sequence[np.ndarray[Any, Any]]) -> tuple[float, float]:
    """From where to where there is anything to see."""
    total = np.sum(histograms, axis=0) / np.sum(histograms)
    seen = np.flatnonzero(total[1:] > 5e-4) + 1  # the first bin holds all that is smaller: dead units
    return float(10 ** (_CENTRES[seen[0]] - 0.2)), float(10 ** (_CENTRES[seen[-1]] + 0.2))
