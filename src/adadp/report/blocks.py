"""What a report is made of, before it has a format. All text is plain: formats escape it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from adadp.report.charts import Chart


class Tone(enum.StrEnum):
    """How a notice is to be taken."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    NONE = "none"
    """There is no guarantee."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Notice:
    """A paragraph that must not be overlooked, with its title and, below it, a list."""

    tone: Tone
    title: str
    text: str = ""
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Card:
    """One large number: what it is, the number, and a line about it."""

    label: str
    value: str
    text: str = ""
    tone: Tone = Tone.NOTE


@dataclass(frozen=True)
class Cards:
    """The numbers that matter most."""

    cards: Sequence[Card]


@dataclass(frozen=True)
class Items:
    """A list with its title."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Columns and rows. `marked` are numbers of rows to point out; `code` of columns that hold names of files."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    code: frozenset[int] = frozenset()
    title: str = ""


@dataclass(frozen=True)
class Code:
    """Lines for a terminal."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A chart with its title and what has to be known beside it. `numbers`: its table, if not the chart's own."""

    title: str
    chart: Chart
    note: str = ""
    warning: str = ""
    numbers: tuple[list[str], list[list[str]]] | None = None

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows with what is drawn."""
        return self.chart.table() if self.numbers is None else self.numbers


@dataclass(frozen=True)
class Figures:
    """Figures side by side."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Beside:
    """Blocks, and beside them, where there is room, figures."""

    blocks: Sequence[Block]
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Folded:
    """Blocks that open on request."""

    title: str
    blocks: Sequence[Block]


Block = Text | Notice | Cards | Items | Table | Code | Figures | Beside | Folded


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report: its title, a line below it, who may see it, and its sections. The first one has no title."""

    title: str
    subtitle: str
    public: bool
    sections: Sequence[Section]
    footer: str = field(default="")
