"""Means with standard errors over seeds, and Markdown: what reports are written with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    """A mean over seeds and its standard error (nan for one seed)."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if math.isnan(self.error) else f" ± {self.error:.2f}")

    def less(self, other: Mean) -> Mean:
        """This less another, whose seeds are its own."""
        return Mean(self.value - other.value, math.hypot(self.error, other.error))

    @property
    def slack(self) -> float:
        """How far off it may be: two standard errors."""
        return 0.0 if math.isnan(self.error) else 2 * self.error


def mean(values: Iterable[float]) -> Mean:
    """Over seeds."""
    found = list(values)
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Mean(statistics.fmean(found), error)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["|" + " --- |" * len(head), *(_row(row) for row in rows)]
    return "\n".join([_row(head), *lines])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def paragraph(*sentences: str) -> str:
    """One paragraph of Markdown."""
    return " ".join(" ".join(sentences).split())
