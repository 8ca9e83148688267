"""Charts: places, ticks and legends."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adadp.report.charts import Curves, Line, Ratios, Rule
from adadp.report.scales import Axis, Scale, thinned
from adadp.report.signal import Ratio, distribution, ratios, thirds

NUMBER = st.floats(-1e12, 1e12)
POSITIVE = st.floats(1e-9, 1e12)


@given(st.lists(NUMBER, min_size=1, max_size=20))
def test_a_linear_axis_holds_its_values_and_has_few_round_ticks(values: list[float]) -> None:
    scale = Scale.of(Axis("x"), values)
    slack = 1e-6 * (scale.high - scale.low)  # a thousandth of a pixel
    assert scale.low - slack <= min(values) <= max(values) <= scale.high + slack
    assert 1 <= len(scale.ticks()) <= 8
    assert len({text for _, text in scale.ticks()}) == len(scale.ticks()) or max(map(abs, values)) > 1e4


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_a_logarithmic_axis_too(values: list[float]) -> None:
    scale = Scale.of(Axis("x", log=True), values)
    assert scale.low <= min(values) <= max(values) <= scale.high
    assert all(scale.low <= value * (1 + 1e-6) and value <= scale.high * (1 + 1e-6) for value, _ in scale.ticks())
    assert len(scale.ticks()) <= 8
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)


def test_a_drawing_is_well_formed_and_says_what_it_is() -> None:
    lines = [Line("<one>", [(0, 0.5), (10, 0.7)]), Line("two", [(0, math.nan), (10, 0.6)], 1, broken=True)]
    chart = Curves(Axis("step"), Axis("part", percent=True), lines, [Rule("a & b", 0.65)], 'of "parts"')
    drawn = ElementTree.fromstring(chart.svg())
    assert drawn.get("aria-label") == 'of "parts"'
    assert "nan" not in chart.svg()
    assert [name for _, name in chart.legend] == ["<one>", "two"]
    assert "a & b" in [text.text for text in drawn.iter("text")]
    columns, rows = chart.table()
    assert columns == ["step", "<one>", "two"]
    assert rows[-1] == ["10", "70%", "60%"]


def test_equal_curves_are_both_seen() -> None:
    same = [(0.0, 0.0), (1.0, 1.0)]
    chart = Curves(Axis("x"), Axis("y"), [Line("one", same, 0), Line("two", same, 1)])
    assert re.search(r'class="s0 line"[^>]*stroke-width:4.5', chart.svg())
    assert not re.search(r'class="s1 line"[^>]*stroke-width', chart.svg())


def _line(signal: float, error: float, noise: float = 4.0) -> dict[str, object]:
    return {"step": 1, "samples": 10, "layers": {"a": {"signal": signal, "noise": noise, "error": error}}}


def test_a_ratio_is_of_lengths_and_knows_its_error() -> None:
    found = ratios([_line(1.0, 0.1), _line(1.0, 0.1)])["a"]
    error = 0.1 / math.sqrt(2)
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(math.sqrt(4 / (1 + 2 * error)))
    assert found.high == pytest.approx(math.sqrt(4 / (1 - 2 * error)))
    lost = ratios([_line(-0.3, 0.2)])["a"]
    assert (lost.value, lost.high) == (None, None)
    assert lost.low == pytest.approx(math.sqrt(4 / 0.4)), "only a lower bound"


def test_layers_that_a_run_has_not_take_no_room() -> None:
    ratio = Ratio(2.0, 1.0, 3.0)
    many = Ratios("x", [(f"run {i}", i, {f"layer of {i}": ratio}) for i in range(5)])
    few = Ratios("x", [("run", 0, {f"layer {i}": ratio for i in range(5)})])
    height = [ElementTree.fromstring(chart.svg()).get("viewBox") for chart in (many, few)]
    assert height[0] == height[1]


def test_the_first_and_the_last_third_are_of_equal_length() -> None:
    lines = [_line(1.0, 0.1) for _ in range(10)]
    assert [len(part) for _, part in thirds(lines)] == [3, 3]
    assert [len(part) for _, part in thirds(lines[:2])] == [2]
    assert thirds([]) == []


def test_a_distribution_adds_up() -> None:
    line = {"noise_by_coordinate": {"low": -1.0, "per_decade": 20, "counts": [1, 3]}}
    found = distribution(line)
    assert found is not None
    assert [share for _, share in found] == [0.25, 0.75]
    assert found[0][0] == pytest.approx(10 ** (-1 + 0.025))
    assert distribution({"noise_by_coordinate": {"low": 0, "per_decade": 20, "counts": []}}) is None
    assert distribution({}) is None


def test_thinning_keeps_both_ends() -> None:
    points = [(float(i), 0.0) for i in range(1000)]
    found = thinned(points, 50)
    assert len(found) == 50
    assert (found[0], found[-1]) == (points[0], points[-1])
