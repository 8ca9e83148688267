"""Figures of how cost grows: log over log, the fitted slope in the legend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from adadp_lab.bench.scaling import series_in, series_of
from adadp_lab.report.figures import canvas, save, styled

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
    sweeps = values["sweeps"]
    beyond = [found for found in values["local_memory"] if found["lots"]] if what == "memory" else []
    names = _names(values, what)
    count = len(sweeps) + bool(beyond)
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = canvas(rows, columns, width=4.3 * columns, height=3.5 * rows)
    for axis, sweep in zip(axes, sweeps, strict=False):
        _panel(axis, sweep, cost, names)
        axis.set_ylabel(label)
    if beyond:
        _beyond(axes[len(sweeps)], beyond)
    for axis in axes[count:]:
        axis.set_axis_off()
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
        slope = sweep["slopes"][series][cost]
        grown = "" if slope is None else f", slope {slope:.2f}"
        axis.plot(sizes, costs, marker=MARKS[series], markersize=4, color=COLOURS[series], label=name + grown)
    others = ", ".join(f"{name} {value:,}" for name, value in sweep["others"].items())
    axis.set(xscale="log", yscale="log", xlabel=sweep["size"], title=f"{sweep['model']}: {others}")
    _ticks(axis, sorted({point["value"] for point in sweep["points"]}))
    axis.yaxis.set_major_formatter(FuncFormatter(_plain))
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.4)
    axis.legend(loc="upper left")


def _beyond(axis: Axes, found: list[Mapping[str, Any]]) -> None:
    """Not log over log: what matters is how little there is to see, and it may be below 0."""
    for model, style in zip(found, ("-", "--"), strict=False):
        for series, cost, name in (("local", "local_less_sgd_mib", "local less SGD"), ("sgd", "sgd_mib", "SGD itself")):
            axis.plot(
                model["lots"], model[cost], style, marker=MARKS[series], markersize=4, color=COLOURS[series],
                label=f"{model['model']}: {name}",
            )  # fmt: skip
    axis.set(xscale="log", xlabel="lot", ylabel="MiB", title="Memory of local beyond SGD's")
    _ticks(axis, sorted({lot for model in found for lot in model["lots"]}))
    axis.set_ylim(top=1.4 * axis.get_ylim()[1])
    axis.legend(loc="upper left")


def _ticks(axis: Axes, sizes: list[int]) -> None:
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if len(sizes) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())


def _plain(value: float, _: object) -> str:
    return f"{value:,g}"
