"""Figures of how cost grows: log over log. The fitted slopes stand in tables.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from adadp_lab.bench.scaling import series_in, series_of
from adadp_lab.report.figures import canvas, legend_outside, save, styled

#: Okabe and Ito's, as in the other figures: SGD is grey there too, DPSGD's flat clipping vermilion, our own blue.
COLOURS = {
    "sgd": "#555555", "sgd-graph": "#999999", "flat": "#D55E00", "ellipsoid-kronecker": "#0072B2", "local": "#009E73",
}  # fmt: skip
MARKS = {"sgd": "o", "sgd-graph": "v", "flat": "s", "ellipsoid-kronecker": "^", "local": "D"}
NAMES = {
    "sgd": "SGD", "sgd-graph": "SGD", "flat": "flat", "ellipsoid-kronecker": "Kronecker", "local": "local",
}  # fmt: skip
COSTS = {"time": ("ms", "milliseconds a step"), "memory": ("peak_mib", "peak memory, MiB")}


def draw_scaling(values: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write NAME-time and NAME-memory, each as SVG and PNG."""
    return [path for what in COSTS for path in save(_figure(values, what), folder, f"{name}-{what}")]


@styled
def _figure(values: Mapping[str, Any], what: str) -> Figure:
    cost, label = COSTS[what]
    if what == "time" and values.get("clock") == "processor":
        label = f"processor's {label}"
    sweeps = values["sweeps"]
    beyond = [found for found in values["local_memory"] if found["lots"]] if what == "memory" else []
    names = _names(values, what)
    count = len(sweeps) + bool(beyond)
    columns = min(2, count)
    rows = -(-count // columns)
    figure, axes = canvas(rows, columns, width=4.3 * columns, height=3.1 * rows + 0.4)
    for axis, sweep in zip(axes, sweeps, strict=False):
        _panel(axis, sweep, cost, names)
        axis.set_ylabel(label)
    if beyond:
        _beyond(axes[len(sweeps)], beyond)
    for axis in axes[count:]:
        axis.set_axis_off()
    if count < len(axes):  # the legend has an empty panel's place
        axes[count].legend(*axes[0].get_legend_handles_labels(), loc="center", fontsize=9)
    else:
        legend_outside(figure, axes[0], columns=len(names))
    return figure


def _names(values: Mapping[str, Any], what: str) -> dict[str, str]:
    """What each series is called. Memory is of steps done ordinarily: replayed SGD's is SGD's, and not drawn twice."""
    replayed = values.get("replayed", [])
    if what == "memory":
        return {series: NAMES[series] for series in series_in(values) if series != "sgd-graph"}
    return {series: NAMES[series] + (", replayed" if series in replayed else "") for series in series_in(values)}


def _panel(axis: Axes, sweep: Mapping[str, Any], cost: str, names: Mapping[str, str]) -> None:
    for series, name in names.items():
        sizes, costs = series_of(sweep, series, cost)
        axis.plot(sizes, costs, marker=MARKS[series], markersize=5, color=COLOURS[series], label=name)
    others = ", ".join(f"{name} {value:,}" for name, value in sweep["others"].items())
    axis.set(xscale="log", yscale="log", xlabel=sweep["size"], title=f"{sweep['model']}: {others}")
    _ticks(axis, sorted({point["value"] for point in sweep["points"]}))
    low, high = axis.get_ylim()
    if high < 100 * low:  # else there would be a number or two
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(_plain))


def _beyond(axis: Axes, found: list[Mapping[str, Any]]) -> None:
    """Local's peak over SGD's. Were examples' gradients kept, it would grow with them: far beyond what is shown."""
    for model, style in zip(found, ("-", "--"), strict=False):
        pairs = zip(model["local_less_sgd_mib"], model["sgd_mib"], strict=True)
        axis.plot(
            model["lots"], [1 + more / sgd for more, sgd in pairs], style, marker=MARKS["local"], markersize=5,
            color=COLOURS["local"], label=model["model"],
        )  # fmt: skip
    axis.axhline(1, color=COLOURS["sgd"], linewidth=1.2, linestyle=":", label="as much as SGD")
    axis.set(xscale="log", xlabel="lot", ylabel="peak memory over SGD's", title="local over SGD, as lots grow")
    axis.set_ylim(0, max(2.0, 1.1 * axis.get_ylim()[1]))
    _ticks(axis, sorted({lot for model in found for lot in model["lots"]}))
    axis.legend(loc="lower right")


def _ticks(axis: Axes, sizes: list[int]) -> None:
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if len(sizes) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())


def _plain(value: float, _: object) -> str:
    return f"{value:,g}"
