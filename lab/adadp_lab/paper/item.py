"""What one table or figure of the paper is made of: independent jobs, and a report drawn from their records alone.

    ITEM = register(Item("toy-cosine", "Cosine similarity of three noise shapes", "section III-B", jobs, report))

`jobs(options)` lists what has to be run; a job is one call of a module-level function, so that it can be sent to
another process, and what it returns is kept as JSON. `report(records)` turns the records into tables, figures and
findings and looks at nothing else: whatever stands in the results can be made again from the committed JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from adadp_lab.paper.workbench import Workbench

#: What a job leaves behind: `work` (the function's name), `settings`, `seed`, `seconds`, `device`, and all that its
#: function returned. Plain JSON.
Record = dict[str, Any]
#: (settings, seed, the worker's data and device) -> plain JSON.
Work = Callable[[Mapping[str, Any], int, "Workbench"], dict[str, Any]]


#: Keys of records hold the name that a module had when records began. Modules that were renamed since keep it here.
_RECORDED_AS = {"adadp_lab.paper.table2": "adadp_lab.paper.timing"}


@dataclass(frozen=True)
class Options:
    """What the user asked for. `quick` is a small part of the same curves, to see that they are the same."""

    seeds: int = 3
    quick: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """One call of `work`, a function at the top of a module. Equal jobs of several items are run once.

    `settings` are plain JSON and say everything that matters for the result; `cost` is about how many seconds it takes
    (longest first; it decides about nothing else). What measures time is run `alone`.
    """

    work: Work
    settings: Mapping[str, Any]
    seed: int = 0
    cost: float = 1.0
    alone: bool = False

    @property
    def key(self) -> str:
        """The name of this job's record."""
        home = _RECORDED_AS.get(self.work.__module__, self.work.__module__)
        home = home.replace("adadp_lab.paper", "adadp.reproduce")
        said = json.dumps([home, self.work.__qualname__, self.settings, self.seed], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:20]


Word = Literal["holds", "does not hold", "cannot be known"]
"""What may be said of a claim; "cannot be known" from the paper's text, that is."""


@dataclass(frozen=True)
class Finding:
    """What we found for one claim: a word and our figure, in each reading.

    `readings` are, by name, the published readings ("lot", "example", "published", "as printed") and "sound".
    """

    claim: str
    readings: Mapping[str, tuple[Word, str]]


@dataclass(frozen=True)
class Report:
    """`text` is Markdown, tables "paper | published reading | sound"; `figures` by file name, without ending."""

    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    findings: Sequence[Finding] = ()


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper. `datasets` are those of `adadp.data` without which it cannot be run.

    `by_device`: what was measured on one machine does not replace what was measured on another.
    """

    name: str
    title: str
    where: str
    jobs: Callable[[Options], list[Job]]
    report: Callable[[Sequence[Record]], Report]
    datasets: tuple[str, ...] = ()
    pretrained: tuple[str, ...] = ()
    by_device: bool = False

    @property
    def command(self) -> str:
        """What makes it."""
        return f"adadp reproduce {self.name}"


ITEMS: dict[str, Item] = {}


def register(item: Item) -> Item:
    """Put an item into the list that `adadp reproduce --list` prints, in the order of registration."""
    if item.name in ITEMS:
        raise ValueError(f"two items are called {item.name}")
    ITEMS[item.name] = item
    return item
