"""Whether a quick run is the beginning of the full one: accuracy at the same step, costs at the same step.

Runs of one seed begin alike (weights, DP-PCA, lots), but their noise differs between devices, and it has followed the
lot's number only since most records were made. Accuracy in the first steps swings with it: by up to 13 points between
the seeds of one full run. So a run agrees if its mean accuracy over all steps that both know is within `POINTS` points
of that of a full run, whatever its seed (what diverged, below `CHANCE`, counts as that). A run that falls `FALLEN`
points below its best diverges, and the last digits decide how: it is compared up to there, if that is a few steps at
least. Costs have to be equal.
A job that is the same in both (the toys) has to give the same numbers, means over random walks within four standard
errors.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adadp_lab.paper.item import Record

#: Seen between a CPU and an H200, over 58 runs: up to 1.5, and 0.4 in the middle.
POINTS, CHANCE, FALLEN, FEW = 2.5, 20.0, 10.0, 3
_APART = ("stop", "snapshots")


@dataclass(frozen=True)
class Compared:
    """One number of a quick run beside the full one's."""

    what: str
    step: int
    quick: float
    full: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Within the tolerance."""
        return abs(self.quick - self.full) <= self.tolerance

    def __str__(self) -> str:
        said = f"{self.what} to step {self.step}: {self.quick:.6g}, full {self.full:.6g} (± {self.tolerance:.2g})"
        return f"{said}: {'agrees' if self.agrees else 'DIFFERS'}"


def compare(quick: Sequence[Record], full: Sequence[Record]) -> list[Compared]:
    """Every quick run for which there are full ones with the same settings."""
    made = []
    for record in quick:
        same = [other for other in full if other["work"] == record["work"] and _same(record, other)]
        if same and record["work"] == "train":
            made += _accuracies(record, same)
        elif same and record["work"] == "account":
            made += _costs(record, same[0])
        elif same and record["work"] == "cost":
            made += _ways(record, same[0])
        elif record["work"] not in ("train", "account", "cost", "measure"):
            made += [line for other in full if other["key"] == record["key"] for line in _equal(record, other)]
    return made


def _same(one: Record, other: Record) -> bool:
    return _said(one["work"], one["settings"]) == _said(other["work"], other["settings"])


def _said(work: str, settings: Mapping[str, Any]) -> str:
    apart = (*_APART, "steps", "pld") if work in ("account", "cost") else _APART
    return json.dumps({key: value for key, value in settings.items() if key not in apart}, sort_keys=True)


def _accuracies(record: Record, full: Sequence[Record]) -> list[Compared]:
    """The run beside the full one that comes nearest to it; nothing where none has enough in common with it."""
    made = []
    for other in full:
        curve = dict(map(tuple, other["curve"]))
        known = [(step, 100 * value, 100 * curve[step]) for step, value in record["curve"] if step in curve]
        steady = _until_fallen([longer for _, _, longer in known])
        if steady < min(len(known), FEW):  # of a single accuracy in its first steps nothing can be said
            continue
        known = known[:steady]
        if known:
            quick, longer = (statistics.mean(max(CHANCE, pair[place]) for pair in known) for place in (1, 2))
            made.append(Compared(record["settings"]["who"], known[-1][0], quick, longer, POINTS))
    return [min(made, key=lambda line: abs(line.quick - line.full))] if made else []


def _until_fallen(accuracies: Sequence[float]) -> int:
    """How many of them come before the first that is far below the best so far."""
    best = -math.inf
    for count, accuracy in enumerate(accuracies):
        best = max(best, accuracy)
        if accuracy < best - FALLEN:
            return count
    return len(accuracies)


def _equal(record: Record, full: Record) -> list[Compared]:
    """Every number of a job that is the same in both."""
    settings, made = record["settings"], []
    drawn = settings.get("walks", settings.get("draws"))

    def walk(path: str, one: Any, other: Any) -> None:
        if isinstance(one, dict) and set(one) >= {"mean", "spread"}:
            error = 4 * math.sqrt(2 / drawn) * max(one["spread"], other["spread"])
            made.append(Compared(path, 0, one["mean"], other["mean"], error + 1e-5))
        elif isinstance(one, dict):
            for key in one:
                walk(f"{path} {key}", one[key], other[key])
        elif isinstance(one, list):
            for index, pair in enumerate(zip(one, other, strict=True)):
                walk(f"{path} {index}", *pair)
        elif isinstance(one, float) and not drawn:
            made.append(Compared(path, 0, one, other, 1e-4 * max(1.0, abs(other))))

    skipped = {"key", "work", "settings", "seed", "seconds", "device"}
    walk(record["work"], {k: v for k, v in record.items() if k not in skipped}, full)
    return made


def _costs(record: Record, full: Record) -> list[Compared]:
    costs = dict(zip(full["claimed"]["steps"], full["claimed"]["epsilon"], strict=True))
    pairs = zip(record["claimed"]["steps"], record["claimed"]["epsilon"], strict=True)
    return [Compared("Theorem 1", step, value, costs[step], 1e-6) for step, value in pairs if step in costs]


def _ways(record: Record, full: Record) -> list[Compared]:
    """epsilon by each way of accounting, at the steps that both have, and by each misprint."""
    steps, made = full["settings"]["steps"], []
    for name, costs in record["ways"].items():
        for step, (epsilon, _) in zip(record["settings"]["steps"], costs, strict=True):
            if step in steps:
                made.append((f"epsilon, {name}", step, epsilon, full["ways"][name][steps.index(step)][0]))
    at = record["settings"]["at"]
    made += [(f"epsilon, misprint {name}", at, own[0], full["misprints"][name][0])
             for name, own in record["misprints"].items()]  # fmt: skip
    sigma = record["settings"]["sigma"]
    return [
        Compared(f"{what}, sigma {sigma:g}", step, one, other, 1e-4 * max(1.0, other))
        for what, step, one, other in made
    ]
