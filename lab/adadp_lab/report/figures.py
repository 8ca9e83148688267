"""How figures look: one colour and mark for an algorithm wherever it stands, one line style for a reading.

Figures are drawn on objects of their own (no pyplot, no global state), so that drawing one twice gives the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Okabe and Ito's palette: told apart by the colour-blind, and in grey.
COLOURS = {
    "adadp": "#0072B2",
    "dpsgd": "#D55E00",
    "agd": "#009E73",
    "dpopt": "#CC79A7",
    "adan": "#E69F00",
    "adal": "#56B4E9",
    "sgd": "#555555",
}
#: For those who see no colours: SGD without privacy is a plain line.
MARKS = {"adadp": "o", "dpsgd": "s", "agd": "^", "dpopt": "D", "adan": "v", "adal": "P", "sgd": ""}
#: Published readings are broken lines; what has a guarantee is drawn through.
STYLES = {"sound": "-", "": "-", "lot": "--", "example": ":", "published": "--", "as printed": "--"}
NAMES = {
    "adadp": "AdaDP", "dpsgd": "DPSGD", "agd": "AGD", "dpopt": "DPOPT", "adan": "AdaN", "adal": "AdaL", "sgd": "SGD",
}  # fmt: skip
GREY = "#666666"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.6,
    "svg.hashsalt": "adadp",
    "svg.fonttype": "path",
    "path.simplify": True,
}

#: `@styled` stands on a function that draws: what is made in it (titles, legends) looks alike everywhere.
styled = matplotlib.rc_context(_STYLE)


def canvas(
    rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 4.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches and its axes, row by row."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [axis for row in axes for axis in row]


def legend_below(axis: Axes, *, columns: int = 2, beside: Sequence[Axes] = (), offset: float = 0.14) -> None:
    """The legend of an axis, and of those `beside` it, under it, where it covers nothing.

    `offset` is what the axis's own labels need, over its height.
    """
    axis.legend(*_labelled([*beside, axis]), loc="upper center", bbox_to_anchor=(0.5, -offset), ncols=columns)


def legend_outside(figure: Figure, *axes: Axes, columns: int = 3) -> None:
    """One legend for all of `axes`, under the figure; what several of them show stands in it once."""
    figure.legend(*_labelled(axes), loc="outside lower center", ncols=columns)


def _labelled(axes: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png. The SVG has no date and no random names: it is the same each time it is drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with matplotlib.rc_context(_STYLE):
        figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
        figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    return paths
