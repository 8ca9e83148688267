"""The kinds of a table's columns: declared by the user, or read off the cells.

What is read off the cells counts as public, because one person's cell can change it. What is declared does not depend
on anybody's row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from adadp.dates import day_of
from adadp.errors import DataError

KINDS = ("number", "flag", "category", "text", "date")
"""What a column can hold. A flag is true or false, a category one of some words, text is free text."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Declared:
    """What the user says of the columns beforehand.

    Attributes:
        kinds: column -> one of `KINDS`.
        ranges: column of numbers or dates -> the lowest and highest value that count; others are clipped to them. A
            date's are days (`adadp.dates.day_of`).
        values: column of categories -> its values. Categories without declared values are hashed.
        ignored: columns that are left out.

    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are spoken of."""
        return (*self.kinds, *self.ignored)


def declare(
    *,
    number: Iterable[str] = (),
    category: Iterable[str] = (),
    text: Iterable[str] = (),
    date: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Declared:
    """Read declarations: `NAME`, or `NAME=LOW..HIGH` for numbers and dates, or `NAME=VALUE,VALUE,...` for categories.

    Raises:
        DataError: a column is declared twice, or a range or list cannot be read.

    """
    kinds: dict[str, str] = {}
    ranges: dict[str, Range] = {}
    values: dict[str, tuple[str, ...]] = {}
    for kind, given in (("number", number), ("category", category), ("text", text), ("date", date)):
        for item in given:
            name, equals, rest = item.partition("=")
            name = name.strip()
            if name in kinds:
                raise DataError(f"column {name!r} is declared twice: as {kinds[name]} and as {kind}")
            kinds[name] = kind
            if not equals:
                continue
            if kind == "text":
                raise DataError(f"a column of text takes no values: {item!r}")
            if kind == "category":
                values[name] = _listed(item, rest)
            else:
                ranges[name] = _range(item, rest, kind)
    ignored = tuple(name.strip() for name in ignore)
    twice = [name for name in ignored if name in kinds]
    if twice:
        raise DataError(f"column {twice[0]!r} is declared twice: as {kinds[twice[0]]} and as one to ignore")
    return Declared(kinds, ranges, values, ignored)


def _listed(item: str, text: str) -> tuple[str, ...]:
    found = tuple(value.strip() for value in text.split(","))
    if "" in found or len(set(found)) != len(found):
        raise DataError(f"the values in {item!r} must be different and not empty: NAME=VALUE,VALUE,...")
    return found


def _range(item: str, text: str, kind: str) -> Range:
    ends = text.split("..")
    try:
        low, high = (day_of(end) if kind == "date" else float(end) for end in ends)
    except ValueError:
        example = "signup=2015-01-01..2025-12-31" if kind == "date" else "age=0..120"
        raise DataError(f"{item!r} is not a range: write NAME=LOW..HIGH, such as {example}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise DataError(f"the range in {item!r} must go from a finite number to a larger one")
    return low, high
