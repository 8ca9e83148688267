"""toy-functions: "all widely used test functions", where the paper says that it found the same as on Beale's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from adadp_lab.paper import comparison
from adadp_lab.paper.contours import RULE_NAMES, draw_contours, draw_walks
from adadp_lab.paper.item import Finding, Item, Job, Options, Record, Report, Word, register
from adadp_lab.paper.summary import word
from adadp_lab.paper.surfaces import SURFACES, Surface
from adadp_lab.paper.trajectories import STEPS
from adadp_lab.report.figures import canvas, legend_outside, styled
from adadp_lab.report.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("dpsgd", "adadp", "adadp-released")
SIGMAS = (0.3, 1.0)
SHOWN = 0.3
WALKS = 200
PRINTED_RATIO = 0.21 / 0.90
"""AdaDP's distance over DPSGD's on Beale's function."""

QUICK = ("beale", "rosenbrock", "booth", "mccormick")


def jobs(options: Options) -> list[Job]:
    """One for each function and seed."""
    chosen = QUICK if options.quick else tuple(SURFACES)
    return [
        comparison.job(name, NAMES, SIGMAS, walks=WALKS, seed=seed, shown=None if seed else SHOWN, kept=1)
        for name in chosen
        for seed in range(options.seeds)
    ]


def report(records: Sequence[Record]) -> Report:
    """A line for each function, at each noise."""
    by_name = {
        name: found
        for name in SURFACES
        if (found := [record for record in records if record["settings"]["surface"] == name])
    }
    parts = [
        f"D(P, Q) to the same algorithm without noise, {STEPS} steps, C = {comparison.BOUND:g}, each algorithm at the "
        "learning rate at which it does best; in brackets the value above the lowest after the last step (median).",
    ]
    for index, sigma in enumerate(SIGMAS):
        rows = [
            [SURFACES[place].title, *(_cell(found, name, index) for name in NAMES),
             *(f"{_ratio(found, name, index):.2f}" for name in NAMES[1:])]
            for place, found in by_name.items()
        ]  # fmt: skip
        head = ["function", *(RULE_NAMES[name] for name in NAMES), "as printed / DPSGD", "released / DPSGD"]
        parts.append(f"sigma_* = {sigma:g}:\n\n{table(head, rows)}")
    parts.append(f"On Beale's function the paper's own ratio is {PRINTED_RATIO:.2f}.")
    return Report("\n\n".join(parts), {"toy-functions": _figure(by_name)}, [_finding(by_name)])


def _cell(records: Sequence[Record], name: str, index: int) -> str:
    gap = np.mean([record["comparison"][name][index]["gap"] for record in records])
    return f"{comparison.written(comparison.pooled(records, name, index))} ({gap:.2g})"


def _ratio(records: Sequence[Record], name: str, index: int) -> float:
    """The distance over DPSGD's."""
    mine, rival = comparison.pooled(records, name, index), comparison.pooled(records, "dpsgd", index)
    return float("inf") if mine is None or rival is None else mine[0] / rival[0]


def _finding(by_name: dict[str, list[Record]]) -> Finding:
    """It holds where AdaDP's distance is the smaller one on every function, at every noise."""
    readings: dict[str, tuple[Word, str]] = {}
    for reading, name in (("as printed", "adadp"), ("sound", "adadp-released")):
        said, holds = [], True
        for index, sigma in enumerate(SIGMAS):
            ratios = [_ratio(found, name, index) for found in by_name.values()]
            closer = sum(ratio < 1 for ratio in ratios)
            holds = holds and closer == len(ratios)
            middle = float(np.median(ratios))
            said.append(f"closer on {closer} of {len(ratios)} at sigma {sigma:g} (median ratio {middle:.1f})")
        readings[reading] = word(holds), "; ".join(said)
    return Finding("toy-functions", readings)


def window(ground: Surface, paths: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float, float, float]:
    """What to show of a surface: its start, its nearest minimum and the walks, inside its box."""
    points = np.array([ground.start, *(point for path in paths for point in path)])
    nearest = min(ground.minima, key=lambda minimum: float(np.hypot(*(np.array(minimum) - ground.start))))
    points = np.vstack([points, nearest])
    low, high = points.min(axis=0), points.max(axis=0)
    margin = 0.15 * (high - low).max()
    left, right, bottom, top = ground.box
    low, high = np.maximum(low - margin, (left, bottom)), np.minimum(high + margin, (right, top))
    return float(low[0]), float(high[0]), float(low[1]), float(high[1])


@styled
def _figure(by_name: dict[str, list[Record]]) -> Figure:
    """A small picture for each function: DPSGD, AdaDP and what each does without noise."""
    columns = 4
    rows = -(-len(by_name) // columns)
    figure, axes = canvas(rows, columns, width=9.2, height=2.4 * rows + 0.6)
    shown = SIGMAS.index(SHOWN)
    for axis, (place, found) in zip(axes, by_name.items(), strict=False):
        ground = SURFACES[place]
        drawn = next(record for record in found if record["settings"]["shown"] is not None)["comparison"]
        entries = {name: drawn[name][shown] for name in NAMES}
        draw_contours(axis, ground, window(ground, [path for entry in entries.values() for path in entry["paths"]]))
        for name, entry in entries.items():
            draw_walks(axis, name, entry, ground)
        axis.set_title(f"{ground.title}: " + ", ".join(f"{_ratio(found, name, shown):.1f}" for name in NAMES[1:]))
    for axis in axes[len(by_name) :]:
        axis.set_visible(False)
    legend_outside(figure, axes[0], columns=4)
    figure.suptitle(
        "In titles: AdaDP's D(P, Q) over DPSGD's, first as printed, then with the released shape; "
        rf"$\sigma_*$ = {SHOWN:g}", fontsize=10,
    )  # fmt: skip
    return figure


ITEM = register(Item("toy-functions", "Trajectories on the standard test functions", "§ III-B", jobs, report))
