"""A budget that all runs of a ledger share, whatever each was chosen by.

Runs that are chosen after seeing earlier ones are adaptive: how many there are, and with which noise, depends on
released values. Their total is bounded by a privacy filter (`filter.RenyiFilter`), whose budget is fixed when the
ledger is made and whose order is fixed before anything is released. Stopping when a privacy loss distribution says so
is no valid filter (arXiv 2602.06756), so no ledger does that: distributions are for plans declared as a whole.

One such plan may have all of a shared budget. If the first thing that would ever be released is a step of a run that
declared its number of steps and the ledger's own budget, if the filter cannot hold that plan and the run's accountant
certifies all of it, then the ledger belongs to that plan alone. That is sound because nothing has been released when it
is decided: rate, noise and number of steps of everything that this ledger will ever hold are fixed at that moment, so
the accountant's bound on the whole plan holds, and ending early is a prefix of it. Every other run is refused from then
on, so there is nothing left that could be chosen by what the plan releases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from adadp.accounting.budget import Budget
from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, Neighbours, Uncovered
from adadp.accounting.filter import RenyiFilter, best_order
from adadp.errors import AccountingError, BudgetExhaustedError, ConfigurationError

_PLENTY = 10**12  # of releases that cost nothing


@dataclass(frozen=True)
class OnePlan:
    """The only plan that a ledger's shared budget is for: `steps` of `event`, by `run` and what resumes it."""

    run: str
    event: Event
    steps: int
    accountant: str


class Limit(Protocol):
    """Something that bounds what a run may release. See `budget.Allowance`."""

    @property
    def key(self) -> object: ...
    def beside(self, spent: Canonical) -> None: ...
    def certify(self, counts: Mapping[Event, int]) -> bool: ...
    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int: ...
    def room(self, event: Event, counts: Mapping[Event, int], need: int) -> int: ...


class _SharedLimit(ABC):
    """What the two ways to keep a shared budget have in common."""

    _spent: Canonical = ()

    def beside(self, spent: Canonical) -> None:
        """Take `spent` as what everything else in the ledger holds by now."""
        self._spent = spent

    @abstractmethod
    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int:
        """How many of `event` fit on top of `counts`: 0..at_most."""

    def room(self, event: Event, counts: Mapping[Event, int], need: int) -> int:
        """As `Allowance.room`."""
        fit = self.most(event, counts, _PLENTY)
        return fit if fit >= need else 0


class FilterLimit(_SharedLimit):
    """What a ledger's privacy filter still admits: everything in the ledger counts, at one Renyi order."""

    def __init__(self, budget: Budget, order: float, neighbours: Neighbours) -> None:
        self._filter = RenyiFilter(budget.epsilon, budget.delta, order, neighbours)
        self.event = self._filter.event

    @property
    def key(self) -> object:
        return "filter"

    def __str__(self) -> str:
        return (
            f"the ledger's shared budget (epsilon {self._filter.epsilon:g}, delta {self._filter.delta:g}; kept by a "
            f"Renyi filter at order {self._filter.order:g})"
        )

    def _left(self, counts: Mapping[Event, int]) -> Fraction:
        prices = (self._filter.price(event, count) for event, count in (*self._spent, *counts.items()))
        return Fraction(self._filter.budget) - sum(prices, Fraction(0))

    def certify(self, counts: Mapping[Event, int]) -> bool:
        """Whether a run may hold `counts`."""
        return self._left(counts) >= 0

    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int:
        left, price = self._left(counts), self._filter.price(event)
        if left < 0:
            return 0
        return at_most if price == 0 else min(at_most, left // price)


class PlanLimit(_SharedLimit):
    """What is left of the one plan that has all of a shared budget; nothing for anybody else (`steps` 0)."""

    def __init__(self, plan: OnePlan, *, mine: bool) -> None:
        self._plan, self._steps = plan, plan.steps if mine else 0

    @property
    def key(self) -> object:
        return "plan", self._steps

    def __str__(self) -> str:
        return (
            f"the ledger's shared budget, all of which belongs to the plan of {self._plan.run} ({self._plan.steps:,} "
            f"of {self._plan.event!r}),"
        )

    def certify(self, counts: Mapping[Event, int]) -> bool:
        """Whether a run may hold `counts`."""
        held = [(event, count) for event, count in (*self._spent, *counts.items()) if count]
        return all(event == self._plan.event for event, _ in held) and sum(n for _, n in held) <= self._steps

    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int:
        if event != self._plan.event or not self.certify(counts):
            return 0
        return min(at_most, self._steps - sum(n for _, n in self._spent) - sum(counts.values()))


class Limits:
    """All that bounds one run: a release has to be within each. `tightest` is the one that refused last."""

    def __init__(self, parts: Sequence[Limit]) -> None:
        self.parts = tuple(parts)
        self.spent: Canonical = ()
        self.tightest: Limit = self.parts[0]

    def covers(self, other: Limits) -> bool:
        """Whether what is within these limits is within `other` too."""
        return {part.key for part in other.parts} <= {part.key for part in self.parts}

    def beside(self, spent: Canonical) -> None:
        """Take `spent` as what everything else in the ledger holds by now."""
        self.spent = spent
        for part in self.parts:
            part.beside(spent)

    def certify(self, counts: Mapping[Event, int]) -> bool:
        """Whether a run may hold `counts`."""
        for part in self.parts:
            if not part.certify(counts):
                self.tightest = part
                return False
        return True

    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int:
        """How many of `event` fit on top of `counts`, which fit: 0..at_most."""
        for part in self.parts:
            fit = part.most(event, counts, at_most)
            if fit < at_most:
                self.tightest, at_most = part, fit
        return at_most

    def room(self, event: Event, counts: Mapping[Event, int], need: int) -> int:
        """How many more of `event` fit on top of `counts`: at least `need`, or 0 when `need` does not fit."""
        least = _PLENTY
        for part in self.parts:
            fit = part.room(event, counts, need)
            if fit < need:
                self.tightest = part
                return 0
            least = min(least, fit)
        return least


def fix_order(event: Event, budget: Budget, neighbours: Neighbours) -> float:
    """The order of a ledger's filter, from the first event that it is asked for. Nothing was released before."""
    if isinstance(event, Uncovered):
        raise AccountingError(f"a shared budget cannot admit what no proof covers: {event.reason}")
    order = best_order(event, budget.epsilon, budget.delta, neighbours)
    try:
        RenyiFilter(budget.epsilon, budget.delta, order, neighbours)
    except ConfigurationError:
        raise BudgetExhaustedError(
            f"the shared budget (epsilon {budget.epsilon:g}, delta {budget.delta:g}) is too small for a Renyi filter "
            "at any order: nothing may be released under it. Make a ledger with a larger budget"
        ) from None
    return order
