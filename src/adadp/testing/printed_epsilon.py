"""Whether the epsilon that a function prints covers all that it released: what engines say against what was seen."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from adadp.accounting.accountants import covering_accountant
from adadp.accounting.events import Event, Neighbours
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.accounting.reading import ReadableLedger
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.optimizer import OBSERVED, PrivateOptimizer
from adadp.mechanism.sums import NoisedSums
from adadp.sampling.loader import PrivateLoader
from adadp.testing.changed_dataset import items_of
from adadp.testing.watching import RELEASED_NOTHING, Train, quietly_watched_by

_ROUNDING = 1e-3  # relative: accountants round on a grid


@dataclass(frozen=True)
class Spending:
    """What engines print for a function's releases, and what all of them cost together.

    `printed` has the epsilon of every ledger that the function used, in order, None for no guarantee. `total` is the
    epsilon of all releases that one example may be in; None where no accountant can compose them, for `reasons`.
    """

    printed: tuple[float | None, ...]
    total: float | None
    delta: float
    releases: int
    runs: int
    reasons: tuple[str, ...] = ()

    @property
    def largest(self) -> float | None:
        """The largest epsilon that is printed; None where none is."""
        return max((each for each in self.printed if each is not None), default=None)

    @property
    def passed(self) -> bool:
        """Whether the largest printed epsilon covers all releases, or none is printed. Other runs may differ."""
        if self.largest is None:
            return True
        return self.total is not None and self.largest >= self.total * (1 - _ROUNDING)

    def __str__(self) -> str:
        made = f"{self.releases} releases by {self.runs} private runs"
        if self.largest is None:
            return f"spending: no engine prints a number for {made}"
        if self.total is None:
            return f"spending: {made} have no number together: {'; '.join(self.reasons)}"
        costs = f"the largest epsilon that is printed is {self.largest:.4g}, and {made} cost {self.total:.4g} together"
        if self.passed:
            return f"spending: {costs} at delta {self.delta:g}"
        return (
            f"spending: not as it should be: {costs} at delta {self.delta:g}. Nobody's number holds for all of them: "
            "use one engine, or one ledger (ledger='runs.jsonl'), and load a checkpoint with its optimizer's state"
        )


def spending(train: Train, dataset: Any, *, delta: float = 1e-5) -> Spending:
    """Whether one of the epsilons that `train(dataset)` prints holds for all that it releases about one example.

    Runs that continue each other, sweeps, folds and fine-tuning after pretraining on the same data compose: their cost
    is that of all releases together. The function is run once, to its end. Engines with the same ledger path share one
    ledger in memory; nothing is written, and `get_epsilon` returns what it would return without this test.

    Args:
        train: the user's own function.
        dataset: what it is called with. A loader over a `Subset` reads the items that the subset names; any other
            loader is assumed to read all of them.
        delta: at which epsilons are compared.

    Raises:
        ConfigurationError: the function released nothing.

    """
    watch = _Watch()
    with quietly_watched_by(watch), _ledgers_in_memory():
        train(dataset)
    runs = [run for run in watch.runs if run.events]
    if not runs:
        raise ConfigurationError(RELEASED_NOTHING)
    ledgers = {id(run.ledger): run.ledger for run in runs}
    total, reasons = _together(runs, len(dataset), delta)
    return Spending(
        printed=tuple(unobserved(ledger, delta).epsilon for ledger in ledgers.values()),
        total=total,
        delta=delta,
        releases=sum(len(run.events) for run in runs),
        runs=len(runs),
        reasons=reasons,
    )


def unobserved(ledger: ReadableLedger, delta: float) -> Guarantee:
    """The guarantee of a ledger as if its runs had not been watched."""
    return _unobserved(ledger.guarantee(delta, accountant=_accountant(ledger)), ledger)


def _unobserved(guarantee: Guarantee, ledger: ReadableLedger) -> Guarantee:
    reasons = tuple(reason for reason in guarantee.reasons if reason != OBSERVED)
    if guarantee.epsilon is not None or reasons:
        return replace(guarantee, reasons=reasons)
    known = make_guarantee(
        ledger.composition(), guarantee.delta, accountant=_accountant(ledger), neighbours=guarantee.neighbours
    )
    return replace(guarantee, epsilon=known.epsilon, reasons=known.reasons, accountant=known.accountant)


def _accountant(ledger: ReadableLedger) -> str:
    return covering_accountant(ledger.composition(), ledger.neighbours or Neighbours.ADD_REMOVE)


def _together(runs: list[_ChargedRun], count: int, delta: float) -> tuple[float | None, tuple[str, ...]]:
    """The largest epsilon over items, each of all releases that the item may be in; or None and why."""
    relations = {run.loader.sampling.neighbours for run in runs}
    if len(relations) > 1:
        return None, ("some runs are about adding an example and some about replacing it: no number is about both",)
    accountant = "rdp" if any(_accountant(run.ledger) == "rdp" for run in runs) else "pld"
    holding: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        for item in set(items_of(run.loader.dataset, count)):
            holding.setdefault(item, []).append(number)
    largest = 0.0
    for numbers in {tuple(each) for each in holding.values()}:
        events: Counter[Event] = Counter()
        for number in numbers:
            events.update(runs[number].events.values())
        known = make_guarantee(tuple(events.items()), delta, accountant=accountant, neighbours=next(iter(relations)))
        if known.epsilon is None:
            return None, known.reasons
        largest = max(largest, known.epsilon)
    return largest, ()


# ---- watching -------------------------------------------------------------------------------------------------------


@dataclass
class _ChargedRun(Observer):
    """A private run and what it released: an event for each lot."""

    optimizer: PrivateOptimizer
    loader: PrivateLoader
    events: dict[int, Event] = field(default_factory=dict)

    @property
    def ledger(self) -> ReadableLedger:
        return self.optimizer._ledger

    def noised(self, release: Unnoised, noisy: NoisedSums) -> None:
        # All releases of a lot are charged as one event.
        self.events[release.lot] = release.event


class _Watch:
    def __init__(self) -> None:
        self.runs: list[_ChargedRun] = []

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> _ChargedRun:
        self.runs.append(_ChargedRun(optimizer, loader))
        return self.runs[-1]


@contextmanager
def _ledgers_in_memory() -> Iterator[None]:
    """Engines with the same ledger path share a ledger in memory, and state a guarantee although they are watched."""
    shared: dict[str, Ledger] = {}
    own_open, own_guarantee = PrivacyEngine._open, PrivacyEngine.guarantee

    def opened(engine: PrivacyEngine) -> Ledger:
        path = None if engine._ledger_path is None else os.path.abspath(engine._ledger_path)
        if engine._ledger is None and path in shared:
            engine._ledger = shared[path]
        ledger = own_open(engine)
        return ledger if path is None else shared.setdefault(path, ledger)

    def guarantee(engine: PrivacyEngine, delta: float) -> Guarantee:
        return _unobserved(own_guarantee(engine, delta), engine._open())

    with patch.object(PrivacyEngine, "_open", opened), patch.object(PrivacyEngine, "guarantee", guarantee):
        yield


__all__ = ["Spending", "spending", "unobserved"]
