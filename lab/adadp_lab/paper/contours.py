"""A surface's contours with walks on it, as in the paper's figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from adadp_lab.paper.surfaces import Surface
from adadp_lab.report.figures import COLOURS, NAMES

RULE_NAMES = {**NAMES, "adadp": "AdaDP, as printed", "adadp-released": "AdaDP, released shape"}
RULE_COLOURS = {**COLOURS, "adadp-released": COLOURS["adadp"]}


def draw_contours(axis: Axes, ground: Surface, window: tuple[float, float, float, float]) -> None:
    """Shades and lines of equal value, close together near the lowest, inside `window` (left, right, bottom, top)."""
    left, right, bottom, top = window
    x, y = np.meshgrid(np.linspace(left, right, 100), np.linspace(bottom, top, 100))
    values = ground.value(torch.from_numpy(np.stack([x, y], axis=-1))).numpy()
    height = np.log10(values - values.min() + 1e-2 * (np.median(values) - values.min()))
    axis.imshow(height, extent=window, origin="lower", aspect="auto", cmap="Greys", alpha=0.35,
                interpolation="bilinear", zorder=0)  # fmt: skip
    axis.contour(x, y, height, levels=10, colors="white", linewidths=0.6, linestyles="solid", zorder=0)
    axis.set(xlim=(left, right), ylim=(bottom, top))
    axis.grid(False)


def draw_walks(axis: Axes, name: str, entry: Mapping[str, Any], ground: Surface) -> None:
    """One algorithm's walks, and in a heavy pale line the same without noise."""
    colour, style = RULE_COLOURS[name], "--" if name == "adadp" else "-"
    points = np.array([ground.start, *entry["twin"][0]])
    axis.plot(*points.T, color=colour, linewidth=4, alpha=0.3, solid_capstyle="round",
              label=f"{RULE_NAMES[name]}, without noise")  # fmt: skip
    for number, path in enumerate(entry["paths"]):
        points = np.array([ground.start, *path])
        axis.plot(*points.T, color=colour, linewidth=0.9, linestyle=style, label="_" * number + RULE_NAMES[name])
    axis.plot(*ground.start, "o", color="black", markersize=5, zorder=4, label="start")
    for minimum in ground.minima:
        axis.plot(*minimum, "*", color="#F0E442", markeredgecolor="black", markersize=11, markeredgewidth=0.7, zorder=4,
                  label="lowest point")  # fmt: skip
