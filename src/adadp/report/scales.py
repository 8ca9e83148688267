"""From numbers to places on an axis, and the ticks that a reader can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: what is drawn along it, with its unit.
        log: whether equal factors are equally far apart.
        percent: whether values are parts of 1 that are printed in percent.
        low, high: ends that are fixed; None follows from the values.

    """

    label: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scale:
    """An axis with its ends: where a value lies, from 0 to 1, and which ticks it has."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> Scale:
        """An axis wide enough for these values."""
        fit = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
        low, high = min(fit, default=axis.low or 0.0), max(fit, default=axis.high or 1.0)
        if axis.log:  # at least half a decade, so that one value alone does not fill it
            wider = max(1.15, math.sqrt(10**0.5 * low / high))
            low, high = low / wider, high * wider
        else:
            step = _step((axis.high or high) - (low if axis.low is None else axis.low), 5)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        low, high = (low if axis.low is None else axis.low), (high if axis.high is None else axis.high)
        return cls(axis, low, high if high > low else low + (abs(low) or 1.0))

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one; ends are not left."""
        low, high = self.low, self.high
        if self.axis.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-300))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Values and what is printed at them."""
        values = self._log_ticks(most) if self.axis.log else self._linear_ticks(most)
        return [(value, self.text(value)) for value in values]

    def text(self, value: float) -> str:
        """A value as it is printed."""
        if self.axis.percent:
            return f"{100 * value:.4g}%"
        if abs(value) >= 1000:
            return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.3g}"
        return f"{value:.4g}"

    def _linear_ticks(self, most: int) -> list[float]:
        step = _step(self.high - self.low, most)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first
        return [round((first + i) * step, 12) for i in range(count + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        if self.high < 6 * self.low:
            return self._linear_ticks(most)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for parts in ((1, 2, 5), (1, 3), (1,)):
            found = [part * 10.0**decade for decade in decades for part in parts]
            found = [value for value in found if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]
            if len(found) <= most + 1:
                return found
        return found[:: math.ceil(len(found) / most)]


def _step(width: float, most: int) -> float:
    """A round number that divides `width` into about `most` parts."""
    if not width > 0:
        return 1.0
    rough = width / most
    size = 10.0 ** math.floor(math.log10(rough))
    return next(part * size for part in (1, 2, 2.5, 5, 10) if part * size >= rough * (1 - 1e-9))


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` of the points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    places = sorted({round(i * (len(points) - 1) / (most - 1)) for i in range(most)})
    return [points[place] for place in places]
