"""Charts as SVG that stands in a page: no script, no font, colours from the page's style.

A curve has the class `s0`, `s1`, ... of its number; the page says what colour that is, in light and in dark. Legends
are the page's, above the drawing, where they cover nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from adadp.report.scales import Axis, Scale
from adadp.report.signal import Ratio

COLOURS = 8
"""How many colours there are; later curves begin again, broken."""

_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 12, 46


@dataclass(frozen=True)
class Line:
    """A curve: its name, its points, and the number of its colour (None: grey). `broken` ones stand back."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int | None = 0
    broken: bool = False
    dots: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Rule:
    """A value of the vertical axis that is marked across the chart."""

    name: str
    value: float


@dataclass(frozen=True)
class Curves:
    """Curves on common axes."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    rules: Sequence[Rule] = ()
    description: str = ""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Class and name of each curve that has a name. Rules have theirs beside them."""
        return [(_class(line.colour, line.broken), line.name) for line in self.lines if line.name]

    def svg(self) -> str:
        """The drawing."""
        across = Scale.of(self.x, (x for line in self.lines for x, _ in line.points))
        values = [y for line in self.lines for _, y in line.points]
        up = Scale.of(self.y, [*values, *(rule.value for rule in self.rules)])
        left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM

        def at(x: float, y: float) -> tuple[float, float]:
            return left + across.place(x) * (right - left), bottom - up.place(y) * (bottom - top)

        parts = _frame(across, up, (left, right, top, bottom))
        for rule in self.rules:
            _, y = at(across.low, rule.value)
            parts.append(_stroke(f"M{left} {y:.1f}H{right}", _class(None, True)))
            parts.append(_text(left + 6, y + (13 if y < top + 14 else -5), rule.name, "start"))
        for number, line in enumerate(self.lines):
            below = sum(list(line.points) == list(other.points) for other in self.lines[number + 1 :])
            places = [at(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
            parts += _drawn(line, places, bottom, width=2 + 2.5 * below)
        return _svg(parts, _HEIGHT, self.description)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The same as columns and rows of text: for readers without pictures."""
        columns = [self.x.label, *(line.name or self.y.label for line in self.lines)]
        across, up = Scale(self.x, 0, 1), Scale(self.y, 0, 1)
        places = sorted({x for line in self.lines for x, _ in line.points})
        places = [places[i] for i in sorted({round(j * (len(places) - 1) / 20) for j in range(21)})] if places else []
        known = [dict(line.points) for line in self.lines]
        rows = [
            [across.text(x), *(up.text(points[x]) if x in points else "" for points in known)] for x in places
        ]  # fmt: skip
        return columns, rows


@dataclass(frozen=True)
class Ratios:
    """One row a layer, and in it a dot with its error bar for each of several parts."""

    label: str
    parts: Sequence[tuple[str, int, dict[str, Ratio]]]
    description: str = ""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Class and name of each part."""
        return [(_class(colour, False), name) for name, colour, _ in self.parts]

    @property
    def _rows(self) -> list[str]:
        return list(dict.fromkeys(layer for _, _, ratios in self.parts for layer in ratios))

    def svg(self) -> str:
        """The drawing. An arrow points to where a value is larger than can be told."""
        rows = self._rows
        padding, apart = (16, 9) if len(rows) <= 24 else (9, 6)
        parts_of = {row: [part for part in self.parts if row in part[2]] for row in rows}
        heights = {row: padding + apart * len(parts_of[row]) for row in rows}
        top, bottom = _TOP, _TOP + sum(heights.values())
        left = min(200, 24 + 7.4 * max((len(_short(_layer(row))) for row in rows), default=0))
        right = _WIDTH - _RIGHT - 6
        ends = [x for _, _, each in self.parts for r in each.values() for x in (r.low, r.high, r.value) if x]
        across = Scale.of(Axis(self.label, log=True), ends)

        def at(value: float) -> float:
            return left + across.place(value) * (right - left)

        parts = _frame(across, None, (left, right, top, bottom))
        above = float(top)
        for row in rows:
            middle = above + heights[row] / 2
            parts.append(_text(left - 8, middle + 4, _short(_layer(row)), "end", row))
            if above > top:
                parts.append(_stroke(f"M{left} {above:.1f}H{right}", "grid"))
            for place, (name, colour, ratios) in enumerate(parts_of[row]):
                y = middle + (place - (len(parts_of[row]) - 1) / 2) * apart
                parts += _bar(ratios[row], at, y, right, _class(colour, False), f"{row}, {name}")
            above += heights[row]
        return _svg(parts, bottom + _BOTTOM, self.description)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The same as columns and rows of text."""
        rows = [[_layer(row), *(_said(each.get(row)) for _, _, each in self.parts)] for row in self._rows]
        return ["layer", *(name for name, _, _ in self.parts)], rows


Chart = Curves | Ratios


def _said(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.value is None or ratio.high is None:
        return f"at least {ratio.low:.3g}"
    return f"{ratio.value:.3g} ({ratio.low:.3g} to {ratio.high:.3g})"


def _bar(ratio: Ratio, at: object, y: float, right: float, style: str, name: str) -> list[str]:
    assert callable(at)
    low = at(ratio.low)
    title = f"<title>{html.escape(name)}: {_said(ratio)}</title>"
    if ratio.value is None or ratio.high is None:
        arrow = f"M{low:.1f} {y:.1f}H{right}m-5 -3.5l5 3.5l-5 3.5"
        return [f'<g>{title}<path class="{style} bar open" d="{arrow}"/></g>']
    line = f'<path class="{style} bar" d="M{low:.1f} {y:.1f}H{at(ratio.high):.1f}"/>'
    return [f'<g>{title}{line}<circle class="{style} dot" cx="{at(ratio.value):.1f}" cy="{y:.1f}" r="3.6"/></g>']


def _drawn(line: Line, places: list[tuple[float, float]], bottom: float, width: float) -> list[str]:
    """A curve; one that lies under equal ones is drawn wider, so that it is seen."""
    if not places:
        return []
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    style = _class(line.colour, line.broken)
    parts = []
    if line.filled:
        area = f"{path}L{places[-1][0]:.1f} {bottom}L{places[0][0]:.1f} {bottom}Z"
        parts.append(f'<path class="{style} area" d="{area}"/>')
    parts.append(_stroke(path, style, width))
    if line.dots or len(places) == 1:
        parts += [f'<circle class="{style} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places]
    return parts


def _class(colour: int | None, broken: bool) -> str:
    if colour is None:
        return "plain broken" if broken else "plain"
    return f"s{colour % COLOURS}{' broken' if broken or colour >= COLOURS else ''}"


def _layer(name: str) -> str:
    return f"layer {name}" if name.isdigit() else name


def _short(text: str) -> str:
    return text if len(text) <= 25 else f"…{text[-24:]}"


def _frame(across: Scale, up: Scale | None, box: tuple[float, float, float, float]) -> list[str]:
    """Grid, ticks and labels."""
    left, right, top, bottom = box
    parts = [_stroke(f"M{left} {bottom}H{right}", "axis")]
    for value, text in across.ticks():
        x = left + across.place(value) * (right - left)
        parts += [_stroke(f"M{x:.1f} {top}V{bottom}", "grid"), _text(x, bottom + 18, text, "middle")]
    for value, text in up.ticks() if up is not None else ():
        y = bottom - up.place(value) * (bottom - top) if up is not None else 0.0
        parts += [_stroke(f"M{left} {y:.1f}H{right}", "grid"), _text(left - 7, y + 4, text, "end")]
    parts.append(_text((left + right) / 2, bottom + 39, across.axis.label, "middle", style="label"))
    return parts


def _stroke(path: str, style: str, width: float = 2) -> str:
    kind = style if style in ("grid", "axis") else f"{style} line"
    wide = "" if width == 2 else f' style="stroke-width:{width:g}"'
    return f'<path class="{kind}" d="{path}"{wide}/>'


def _text(x: float, y: float, text: str, anchor: str, title: str = "", style: str = "tick") -> str:
    inside = html.escape(text) + (f"<title>{html.escape(title)}</title>" if title and title != text else "")
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{inside}</text>'


def _svg(parts: Sequence[str], height: float, description: str) -> str:
    label = html.escape(description, quote=True)
    body = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">{body}</svg>'
