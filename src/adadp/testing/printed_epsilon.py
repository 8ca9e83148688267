"""Whether the number that a function prints covers all that it released: what engines say against what was seen."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from adadp.accounting.events import Event, Neighbours, RenyiBlock
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.accounting.reading import ReadableLedger
from adadp.clipping import Release
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError, UntriedWarning
from adadp.mechanism.observation import watched_by
from adadp.mechanism.optimizer import OBSERVED, BudgetWarning, PrivateOptimizer
from adadp.mechanism.step import Unnoised
from adadp.sampling.loader import PrivateLoader
from adadp.testing.changed_dataset import items_of

_ROUNDING = 1e-3  # relative: accountants add up on a grid

Train = Callable[[Any], Any]


@dataclass(frozen=True)
class Spending:
    """What engines print for what a function released, and what all of it costs.

    `printed` has the epsilon of every ledger that the function used, in order, None for none; `total` is that of all
    releases which one example may be in, None where no accountant adds them up (`reasons`).
    """

    printed: tuple[float | None, ...]
    total: float | None
    delta: float
    releases: int
    runs: int
    reasons: tuple[str, ...] = ()

    @property
    def largest(self) -> float | None:
        """The largest number that is printed."""
        return max((each for each in self.printed if each is not None), default=None)

    @property
    def passed(self) -> bool:
        """Whether one engine's number covers everything, or none prints one. It proves nothing about other runs."""
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
    """Whether one of the numbers that `train(dataset)` prints holds for all that it releases about one example.

    Runs that go on from each other, sweeps, folds and fine-tuning after pretraining on the same data cost what they
    cost together. The function is run once, to its end. Engines that name one ledger's path share one in memory;
    nothing is written, and `get_epsilon` gives what it would give.

    Args:
        train: the user's own function.
        dataset: what it is called with. Of the function's loaders, `Subset`s hold the items that they name; whatever
            else a loader reads is taken to hold all of them.
        delta: at which epsilons are compared.

    Raises:
        ConfigurationError: the function released nothing.

    """
    watch = _Watch()
    with warnings.catch_warnings(), watched_by(watch), _books_open():
        warnings.simplefilter("ignore", UntriedWarning)
        warnings.simplefilter("ignore", BudgetWarning)
        train(dataset)
    runs = [run for run in watch.runs if run.events]
    if not runs:
        raise ConfigurationError("the function released nothing: it has to make a model private and train it")
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
    """What a ledger would say, had nobody watched its runs."""
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
    # A privacy filter, or lots of a fixed size, are covered by Renyi divergences alone.
    filtered = any(isinstance(event, RenyiBlock) for event, _ in ledger.composition())
    return "rdp" if filtered or ledger.neighbours is Neighbours.REPLACE_ONE else "pld"


def _together(runs: list[_ChargedRun], count: int, delta: float) -> tuple[float | None, tuple[str, ...]]:
    """The largest epsilon of the releases that one item may be in."""
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
class _ChargedRun:
    """A private run and what it released: an event for each lot."""

    optimizer: PrivateOptimizer
    loader: PrivateLoader
    events: dict[int, Event] = field(default_factory=dict)

    @property
    def ledger(self) -> ReadableLedger:
        return self.optimizer._ledger

    def noising(self, release: Unnoised) -> None:
        """Sums are not looked at."""

    def noised(self, release: Unnoised, noisy: Release) -> None:
        # All that a lot releases is charged as one event.
        self.events[release.lot] = release.event

    def stepped(self, lot: int, gradient: Release) -> None:
        """Nor are steps."""


class _Watch:
    def __init__(self) -> None:
        self.runs: list[_ChargedRun] = []

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> _ChargedRun:
        self.runs.append(_ChargedRun(optimizer, loader))
        return self.runs[-1]


@contextmanager
def _books_open() -> Iterator[None]:
    """Engines that name one path share a ledger in memory, and say their number although they are watched."""
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
