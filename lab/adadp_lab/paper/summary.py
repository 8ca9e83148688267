"""What the reports read from records: the runs of one contender, their accuracy, a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from adadp_lab.paper.item import Record, Word
from adadp_lab.report.tables import Mean, mean


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
