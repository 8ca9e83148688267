"""Figures as a critical reader sees them: legends cover nothing, reference lines are explained, words can be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adadp_lab import paper as reproduce
from adadp_lab.bench import plots
from adadp_lab.bench.report import write_report
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.render import same_drawing
from adadp_lab.report import front_page
from adadp_lab.report.figures import save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROOT = Path(__file__).parents[3]
RESULTS = Records(ROOT / "results" / "reproduce")
#: Inches of a page's width, and the smallest words on it, in points.
WIDEST, SMALLEST = 9.5, 7.0


def _drawn() -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for item in reproduce.load().values():
        if records := RESULTS.of(item):
            found |= item.report(records).figures
    for path in sorted((ROOT / "results" / "bench").glob("scaling-*.json")):
        values = json.loads(path.read_text())
        found |= {f"{path.stem}-{what}": plots._figure(values, what) for what in plots.COSTS}
    rows = json.loads((ROOT / "results" / "shapes" / "main.json").read_text())["rows"]
    return {**found, "accuracy": front_page.draw(rows)}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    figures = _drawn()
    for figure in figures.values():
        figure.draw_without_rendering()
    return figures


def covered(figure: Figure) -> list[str]:
    """Labels of the lines that pass under a legend."""
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    boxes = [legend.get_window_extent() for legend in legends]
    return [str(line.get_label()) for axis in figure.axes for line in axis.lines if _passes(line, axis, boxes)]


def _passes(line: Line2D, axis: Axes, boxes: list) -> bool:
    points = line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float))
    points = points[np.isfinite(points).all(axis=1)]
    if not len(points):
        return False
    if line.get_linestyle() not in ("None", "", " "):
        ways = np.linspace(0, 1, 50)[:, None, None]
        points = ((1 - ways) * points[:-1] + ways * points[1:]).reshape(-1, 2) if len(points) > 1 else points
    inside = axis.get_window_extent()
    seen = points[[inside.contains(*point) for point in points]]
    return any(box.contains(*point) for box in boxes for point in seen)


def unexplained(figure: Figure) -> list[str]:
    """Lines across a whole axis, and bands, that no legend names."""
    named = set()
    for legend in [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]:
        named |= {text.get_text() for text in legend.get_texts()}
    across = [
        artist
        for axis in figure.axes
        for artist in (*axis.lines, *axis.patches)
        if artist.get_transform() != axis.transData and not artist.get_transform().contains_branch(axis.transAxes)
    ]
    lines = [artist for axis in figure.axes for artist in axis.lines if artist.get_transform() != axis.transData]
    return [str(artist.get_label()) for artist in {*across, *lines} if artist.get_label() not in named]


def test_legends_cover_nothing(drawn: dict[str, Figure]) -> None:
    assert {name: found for name, figure in drawn.items() if (found := covered(figure))} == {}


def test_reference_lines_are_in_a_legend(drawn: dict[str, Figure]) -> None:
    assert {name: found for name, figure in drawn.items() if (found := unexplained(figure))} == {}


def test_every_axis_says_what_it_shows_in_words_that_can_be_read(drawn: dict[str, Figure]) -> None:
    for name, figure in drawn.items():
        assert figure.get_figwidth() <= WIDEST, name
        for axis in figure.axes:
            texts = [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts, *axis.get_xticklabels()]
            assert all(text.get_fontsize() >= SMALLEST for text in texts if text.get_text()), name
            assert not axis.axison or axis.has_data(), f"{name} has an empty panel"
        assert {line.get_label() for axis in figure.axes for line in axis.lines} - {""}, name


def test_delta_and_the_default_shape_are_in_legends(drawn: dict[str, Figure]) -> None:
    levels = [figure for name, figure in drawn.items() if name.endswith(("-high", "-medium", "-low"))]
    assert len(levels) == 6
    for figure in levels:
        for axis in figure.axes[2:]:
            texts = " ".join(text.get_text() for text in axis.get_legend().get_texts())
            assert texts.count("Theorem 1") == 2
            assert "DPOPT" in texts
    for name in ("scaling-cpu-time", "scaling-cuda-time", "scaling-cpu-memory", "scaling-cuda-memory"):
        labels = {str(line.get_label()).partition(",")[0] for line in drawn[name].axes[0].lines}
        assert {"SGD", "flat", "Kronecker", "local"} <= labels


def test_what_the_paper_prints_stands_beside_the_same_epsilon_only(drawn: dict[str, Figure]) -> None:
    for name in ("table1-mnist", "table1-cifar10"):
        claimed, true = drawn[name].axes
        assert "Theorem 1" in claimed.get_xlabel()
        assert any("paper's Table 1" in str(line.get_label()) for line in claimed.lines)
        assert "PLD" in true.get_xlabel()
        assert not any("paper's Table 1" in str(line.get_label()) for line in true.lines)
    assert "DPSGD, the same net and lots" in {line.get_label() for line in drawn["table1-mnist"].axes[1].lines}


def test_pictures_that_are_committed_are_those_of_their_records(drawn: dict[str, Figure], tmp_path: Path) -> None:
    """Those of the benchmark and README's; `make results-check` compares the paper's."""
    bench, kept = ROOT / "results" / "bench", {"accuracy": ROOT / "results" / "shapes" / "accuracy.svg"}
    save(drawn["accuracy"], tmp_path, "accuracy")
    for path in bench.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    written = write_report(tmp_path)
    assert (tmp_path / "tables.md").read_text() == (bench / "tables.md").read_text()
    kept |= {path.stem: bench / path.name for path in written if path.suffix == ".svg"}
    assert len(kept) == 5
    for name, committed in kept.items():
        assert same_drawing((tmp_path / f"{name}.svg").read_text(), committed.read_text()), name


def test_a_legend_in_the_way_and_a_line_without_a_name_are_found() -> None:
    figure = Figure(figsize=(4, 3))
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], label="across")
    axis.axhline(0.2)
    axis.axvspan(0.1, 0.2, label="band")
    axis.legend(["across"], loc="center")
    figure.draw_without_rendering()
    assert covered(figure) == ["across"]
    assert len(unexplained(figure)) == 2
