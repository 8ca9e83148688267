"""Means with standard errors over seeds, and Markdown tables: what reports are written with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from adadp_lab.paper.item import Record, Word


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


def trained(records: Sequence[Record], who: str) -> list[Record]:
    """The runs of one contender."""
    return [r for r in records if r["work"] == "train" and r["settings"]["who"] == who]


def only(records: Sequence[Record], work: str) -> Record:
    """The one record of its kind."""
    (found,) = [record for record in records if record["work"] == work]
    return found


def accuracy(records: Sequence[Record]) -> Mean:
    """In percent, at the end of the run."""
    return mean(100 * record["accuracy"] for record in records)


def curve(records: Sequence[Record]) -> list[tuple[int, Mean]]:
    """Accuracy in percent against steps, at the marks that all seeds have."""
    every = [dict(record["curve"]) for record in records]
    if not every:
        return []
    return [(step, mean(100 * c[step] for c in every)) for step in every[0] if all(step in c for c in every)]


def word(holds: bool) -> Word:
    """A verdict."""
    return "holds" if holds else "does not hold"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["|" + " --- |" * len(head), *(_row(row) for row in rows)]
    return "\n".join([_row(head), *lines])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def paragraph(*sentences: str) -> str:
    """One paragraph of Markdown."""
    return " ".join(" ".join(sentences).split())
