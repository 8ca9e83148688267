"""README's picture: test accuracy over epsilon, DPSGD beside AdaDP, from the records in results/shapes.

python -m adadp_lab.report.front_page [--records results/shapes/main.json] [--out results/shapes]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adadp_lab.report.figures import COLOURS, canvas, save, styled

#: What is drawn: the records' name of the method, its label and its colour.
METHODS = (
    ("Kronecker (1/4, 0), probes", "AdaDP, sound", COLOURS["adadp"], "o-"),
    ("flat (DPSGD)", "DPSGD", COLOURS["dpsgd"], "s--"),
)
TASKS = (("mnist", "MNIST, tanh CNN"), ("fashion-mnist", "Fashion-MNIST, tanh CNN"))


@styled
def draw(rows: Iterable[dict[str, Any]]) -> Figure:
    """One panel for each data set: mean and standard error over seeds, on the test set."""
    kept = [row for row in rows if row["model"] == "tanh-cnn" and not row["tuning"]]
    figure, axes = canvas(1, len(TASKS), width=7.2, height=2.9)
    figure.set_facecolor("white")  # README is read on dark pages too
    for axis, (dataset, title) in zip(axes, TASKS, strict=True):
        axis.set_title(title)
        for method, label, colour, style in METHODS:
            _line(axis, [r for r in kept if (r["dataset"], r["method"]) == (dataset, method)], label, colour, style)
        axis.set_xscale("log")
        epsilons = sorted({row["epsilon"] for row in kept})
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("epsilon (delta = 1e-5): less is more private")
    axes[0].set_ylabel("test accuracy in percent")
    axes[0].legend(loc="lower right")
    return figure


def _line(axis: Axes, rows: list[dict[str, Any]], label: str, colour: str, style: str) -> None:
    points = []
    for epsilon in sorted({row["epsilon"] for row in rows}):
        values = [100 * row["accuracy"] for row in rows if row["epsilon"] == epsilon]
        points.append((epsilon, statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))))
    across, up, error = zip(*points, strict=True)
    axis.errorbar(across, up, yerr=error, fmt=style, color=colour, label=label, capsize=3)


def main() -> None:
    """Write accuracy.svg and accuracy.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("results/shapes/main.json"))
    parser.add_argument("--out", type=Path, default=Path("results/shapes"))
    given = parser.parse_args()
    save(draw(json.loads(given.records.read_text())["rows"]), given.out, "accuracy")


if __name__ == "__main__":
    main()
