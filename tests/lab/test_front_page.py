"""README's picture shows what README's table says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from adadp_lab.report.front_page import draw

ROOT = Path(__file__).parents[2]


def test_the_picture_has_the_figures_of_the_table() -> None:
    axes = draw(json.loads((ROOT / "results/shapes/main.json").read_text())["rows"]).axes
    for axis, task in zip(axes, ("MNIST, tanh CNN", "Fashion-MNIST, tanh CNN"), strict=True):
        row = re.search(rf"^\| {task} \|(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
        assert row
        figures = [float(number) for number in re.findall(r"(\d\d\.\d\d) ±", row[1])]
        drawn = {c.get_label(): c.lines[0].get_ydata() for c in axis.containers}
        assert list(drawn["DPSGD"]) == pytest.approx(figures[:3], abs=0.005)
        assert list(drawn["AdaDP, sound"]) == pytest.approx(figures[3:], abs=0.005)
        assert axis.get_title() == task
