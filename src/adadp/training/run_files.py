"""Who may see each file of a run. docs/threat-model.md shows this table; `adadp report` and `adadp export` go by it.

"May be published" means that the run's guarantee covers the file, or that nothing of anybody is in it. What is made of
releases is covered as far as they are: where the guarantee is *none*, it is for the curator only. So is every file that
is not in the table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


class Audience(enum.StrEnum):
    """Who may see a file. The curator is whoever may see the private data anyway."""

    PUBLIC = "may be published"
    CURATOR = "curator only"


@dataclass(frozen=True)
class RunFile:
    """One file of a run's folder.

    Attributes:
        name: of the file; `*` stands for any text.
        audience: who may see it, where the run has a guarantee.
        why: the reason, and what to look at first.
        of_releases: whether it is computed from releases: it is for the curator only if no guarantee covers them.
        passing: whether it is there only while another file is written, or after a crash in that moment.

    """

    name: str
    audience: Audience
    why: str
    of_releases: bool = False
    passing: bool = False

    def audience_with(self, guaranteed: bool) -> Audience:
        """Who may see it in a run whose `guarantee.json` has an epsilon, or has none."""
        return self.audience if guaranteed or not self.of_releases else Audience.CURATOR

    def why_with(self, guaranteed: bool) -> str:
        """The reason, in a run that has a guarantee or has none."""
        if self.audience_with(guaranteed) is self.audience:
            return self.why
        return "computed from private data, and no guarantee covers it"


_PUBLIC, _CURATOR = Audience.PUBLIC, Audience.CURATOR
_LEDGER = (
    "it holds the key of the seeds' fingerprints: whoever has both finds a seed of few bits by trying. Its events and "
    "plans alone are no secret; `adadp ledger show --json` prints them without key and fingerprints"
)
_SUMS = (
    "keyed digests of sums (of runs with a seed that may be resumed): whoever has the seed can test a guess of a lot's "
    "sum against its digest"
)
_HEAD = (
    "a count of records and a hash over records that begin with 256 random bits. A copy elsewhere finds a ledger that "
    "was cut short"
)
_CONFIG = (
    "settings; the seed is left out. For data of your own it holds the seed of the split, which says at which places "
    "of the file rows were held out, nothing of what is in them. Look at its paths first: they are as you typed them"
)
_CHECKPOINT = (
    "weights, optimizer state and shapes are post-processing; in a checkpoint of a run whose ledger is in memory is "
    "the ledger, with its key. A run whose shapes are made of raw gradients keeps them here"
)

FILES: tuple[RunFile, ...] = (
    RunFile(
        "model.safetensors",
        _PUBLIC,
        "weights: post-processing of releases. Buffers that change are refused",
        of_releases=True,
    ),
    RunFile(
        "preprocessing.safetensors",
        _PUBLIC,
        "settings and noised statistics, without the seed; names and types of columns are in it",
        of_releases=True,
    ),
    RunFile("guarantee.json", _PUBLIC, "made of events and settings; the assumptions belong to it"),
    RunFile("guarantee.md", _PUBLIC, "the same for people. For your own data it names N and the classes"),
    RunFile("config.json", _PUBLIC, _CONFIG),
    RunFile(
        "releases.json",
        _PUBLIC,
        "kinds and numbers of releases, of this run and of all on the data; random ids of runs",
    ),
    RunFile(
        "history.jsonl",
        _PUBLIC,
        "computed from released gradients and the size of their noise, at planned steps. Runs without proof have none",
        of_releases=True,
    ),
    RunFile("metrics.jsonl", _CURATOR, "loss and accuracy on held-out rows without noise; seconds"),
    RunFile(
        "result.json", _CURATOR, "figures on held-out rows without noise (how many of each class, too), seconds, paths"
    ),
    RunFile(
        "tensorboard",
        _CURATOR,
        "a folder, with `--tensorboard`: the figures of metrics.jsonl and history.jsonl, and when each was written",
    ),
    RunFile("run.json", _CURATOR, "settings with whole paths, never the seed"),
    RunFile("checkpoint.safetensors", _CURATOR, _CHECKPOINT),
    RunFile("checkpoint.safetensors.before", _CURATOR, "as checkpoint.safetensors"),
    RunFile("ledger.jsonl", _CURATOR, _LEDGER),
    RunFile("ledger.jsonl.head", _PUBLIC, _HEAD),
    RunFile("ledger.jsonl.left", _CURATOR, "how many reserved releases are left"),
    RunFile("ledger.jsonl.sums", _CURATOR, _SUMS),
    RunFile("lock", _CURATOR, "empty; held by the process that works in the folder"),
    RunFile("report.*", _CURATOR, "of `adadp report`: it shows what metrics.jsonl and result.json hold"),
    RunFile("report-public.*", _PUBLIC, "of `adadp report --public`: made of what may be published alone"),
    RunFile(".run.json.part", _CURATOR, "as run.json", passing=True),
    RunFile(".checkpoint.safetensors*.part", _CURATOR, "as checkpoint.safetensors", passing=True),
    RunFile("ledger.jsonl.head.new", _PUBLIC, "as ledger.jsonl.head", passing=True),
)

PATHS = ("dataset", "test", "data_dir", "out", "ledger")
"""Settings in config.json that may be paths, as they were typed."""

UNKNOWN = RunFile("*", _CURATOR, "not written by adadp: nobody has said who may see it")


def run_file(name: str) -> RunFile:
    """The table's line for a file of this name; `UNKNOWN` where there is none."""
    return next((file for file in FILES if fnmatchcase(name, file.name)), UNKNOWN)


def files_of(folder: Path) -> Iterator[tuple[str, RunFile]]:
    """Name and line of each file that lies in a run's folder, in the table's order; what is unknown comes last."""
    order = {file.name: place for place, file in enumerate((*FILES, UNKNOWN))}
    found = ((path.name, run_file(path.name)) for path in folder.iterdir())
    yield from sorted(found, key=lambda pair: (order[pair[1].name], pair[0]))


def to_markdown() -> str:
    """The table, as docs/threat-model.md shows it: files that are there only in passing are left out."""
    lines = ["| file of a run | who | why |", "| --- | --- | --- |"]
    for file in FILES:
        if not file.passing:
            who = f"{file.audience}{', if there is a guarantee' if file.of_releases else ''}"
            lines.append(f"| `{file.name}` | {who} | {file.why} |")
    return "\n".join(lines) + "\n"
