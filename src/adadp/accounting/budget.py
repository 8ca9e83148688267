"""How much may still be released under a budget, known ahead of time.

Accounting one step takes a fraction of a second, a training step may take a millisecond. So counts are
certified in advance: a set of counts whose total cost is within the budget. Costs do not fall when counts
rise, hence anything below a certified set fits too, and no accountant is asked until it is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, Neighbours
from adadp.errors import ConfigurationError

_FIRST_CERTIFICATE = 4096


@dataclass(frozen=True)
class Budget:
    """The most that may be spent, by everything in a ledger together."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigurationError(f"a budget's epsilon must be finite and above 0, not {self.epsilon!r}")
        if not (math.isfinite(self.delta) and 0 < self.delta < 1):
            raise ConfigurationError(f"a budget's delta must be above 0 and below 1, not {self.delta!r}")


class Allowance:
    """What one run may still release under a budget of its own, given what the ledger already holds."""

    def __init__(self, budget: Budget, accountant: str, neighbours: Neighbours) -> None:
        self.budget, self.accountant, self.neighbours = budget, accountant, Neighbours(neighbours)
        self._spent: Canonical = ()
        self._certified: dict[Event, int] = {}

    @property
    def key(self) -> object:
        """Equal for allowances that allow the same: what is within one is then within the other."""
        return self.budget, self.accountant

    def __str__(self) -> str:
        return f"the budget (epsilon {self.budget.epsilon:g}, delta {self.budget.delta:g})"

    def beside(self, spent: Canonical) -> None:
        """Take `spent` as what everything else in the ledger holds by now."""
        if spent != self._spent:
            self._spent, self._certified = spent, {}

    def _with(self, counts: Mapping[Event, int]) -> list[tuple[Event, int]]:
        return [*self._spent, *counts.items()]

    def _fits(self, counts: Mapping[Event, int]) -> bool:
        from adadp.accounting.accountants import get_accountant

        cost = get_accountant(self.accountant).epsilon(self._with(counts), self.budget.delta, self.neighbours)
        return cost.epsilon <= self.budget.epsilon

    def _most(self, grown: Callable[[int], Mapping[Event, int]], at_most: int) -> int:
        """The largest number for which the counts `grown(number)` fit: 0..at_most."""
        from adadp.accounting.calibration import most

        return most(
            lambda more: self._with(grown(more)),
            self.budget.epsilon,
            self.budget.delta,
            accountant=self.accountant,
            neighbours=self.neighbours,
            at_most=at_most,
            guess=max(1, at_most // 2),
        )

    def certify(self, counts: Mapping[Event, int]) -> bool:
        """Whether a run may hold `counts`."""
        if all(self._certified.get(event, 0) >= count for event, count in counts.items()):
            return True
        if not self._fits(counts):
            return False
        self._certified = dict(counts)
        return True

    def most(self, event: Event, counts: Mapping[Event, int], at_most: int) -> int:
        """How many of `event` fit on top of `counts`, which fit: 0..at_most."""
        found = self._most(lambda more: {**counts, event: counts.get(event, 0) + more}, at_most)
        if found:
            self._certified = {**counts, event: counts.get(event, 0) + found}
        return found

    def room(self, event: Event, counts: Mapping[Event, int], need: int) -> int:
        """How many more of `event` fit on top of `counts`: at least `need`, or 0 when `need` does not fit.

        `counts` is all that this run has reserved. For runs without a plan: it looks some way ahead, so that the next
        calls need no accounting. Where a number of steps was planned, `certify` the whole plan instead.
        """
        have = counts.get(event, 0)
        certified = self._certified.get(event, 0)
        if certified >= have + need and all(self._certified.get(e, 0) >= n for e, n in counts.items()):
            return certified - have
        ahead = max(need, _FIRST_CERTIFICATE, have)

        def grown(more: int) -> dict[Event, int]:
            # Kinds that take turns grow together, or every turn would ask the accountant again.
            share = more / have if have else 0.0
            counts_then = {other: n + int(n * share) for other, n in counts.items()}
            counts_then[event] = have + more
            return counts_then

        if self._fits(grown(ahead)):
            self._certified = grown(ahead)
            return ahead
        more = self._most(grown, ahead - 1)
        if more >= need:
            self._certified = grown(more)
            return more
        exact = {**counts, event: have + need}
        if self._fits(exact):
            self._certified = exact
            return need
        return 0
