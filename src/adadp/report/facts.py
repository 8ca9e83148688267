"""Runs with what follows from their guarantees: computed once, for figures, pages and JSON alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adadp.errors import ConfigurationError
from adadp.report.attacker import Attacker, attacker, fits
from adadp.report.run import UNLIKE, Run, read
from adadp.report.spending import Spending, spending


@dataclass(frozen=True)
class Facts:
    """One run, what its data's guarantee leaves to an attacker, and how its epsilon grew."""

    run: Run
    attacker: Attacker | None
    spending: Spending

    @classmethod
    def of(cls, run: Run) -> Facts:
        """What follows from a run's guarantee."""
        releases = run.current_releases
        said = ((run.current, releases), (run.own, run.own_releases))
        if any(found and about is not None and not fits(found, about) for found, about in said):
            return cls(replace(run, remarks=(*run.remarks, UNLIKE)), None, Spending((), ()))
        left = None if run.current is None else attacker(run.current, releases)
        known = run.own is not None and run.own_releases is not None
        grown = spending(run.own, run.own_releases, run.all_releases) if known else Spending((), ())  # type: ignore[arg-type]
        return cls(run, left, grown)

    @property
    def guaranteed(self) -> bool:
        """Whether there is an epsilon."""
        return self.run.current is not None and self.run.current.epsilon is not None


def facts_of(folders: Sequence[str | Path], *, public: bool = False) -> list[Facts]:
    """The facts of runs in their folders. Runs of the same folder name are told apart by their paths."""
    if not folders:
        raise ConfigurationError("give the folder of a run, or of several")
    places = [Path(folder).resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise ConfigurationError("give each run once")
    found = [Facts.of(read(folder, public=public, number=number)) for number, folder in enumerate(folders, 1)]
    for folder, each in zip(folders, found, strict=True):
        if public and UNLIKE in each.run.remarks:
            raise ConfigurationError(f"{folder}: {UNLIKE.partition('. ')[0]}. Nothing of it is published")
    return found
