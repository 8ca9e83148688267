"""A privacy filter: releases chosen as training goes on, under a budget fixed beforehand.

Accountants assume that noise, rates and the number of steps do not depend on earlier outputs. Where they do
(noise that grows, training that stops when validation stalls), the releases go through a filter at one Renyi
order.

Guarantee: if every release is admitted before it happens and the filter's order, epsilon and delta were
fixed before the first, everything released is (epsilon, delta)-DP, however each event was chosen and
whenever the releases end (Feldman and Zrnic 2021: fully adaptive composition of Renyi divergences at a fixed
order). The price is paid in full even if little is used.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction

from adadp.accounting.accountant import require_target
from adadp.accounting.composition import Composition, canonical
from adadp.accounting.events import Event, Neighbours, RenyiBlock, Uncovered
from adadp.errors import AccountingError, BudgetExhaustedError, ConfigurationError


def _conversion(delta: float, order: float) -> float:
    """What turning a Renyi divergence into an epsilon adds to it (Canonne, Kamath and Steinke 2020)."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def best_order(event: Event, epsilon: float, delta: float, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> float:
    """The order at which a filter admits most releases like `event`. Choose it before the first release."""
    from adadp.accounting import renyi

    rows = zip(renyi.ORDERS, renyi.divergences(event, neighbours), strict=True)
    # A release may cost nothing at all (a filter's block of 0): any order then admits any number.
    return max(rows, key=lambda row: (epsilon - _conversion(delta, row[0])) / max(row[1], 1e-300))[0]


class RenyiFilter:
    """Admits releases while their Renyi divergences at `order` sum to no more than the budget allows."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        order: float,
        neighbours: Neighbours = Neighbours.ADD_REMOVE,
    ) -> None:
        """Fix the budget and the order at which it is spent. `best_order` knows one for a planned event."""
        require_target(epsilon, delta)
        if not (math.isfinite(order) and order > 1.01):
            raise ConfigurationError(f"order must be a finite number above 1.01, not {order!r}")
        self.epsilon, self.delta, self.order = epsilon, delta, order
        self.neighbours = Neighbours(neighbours)
        conversion = _conversion(delta, order)
        # What floating point may lose on the way back to epsilon is kept out of the budget.
        self.budget = epsilon - conversion - 1e-11 * (epsilon + abs(conversion))
        if self.budget <= 0:
            raise ConfigurationError(
                f"order {order:g} leaves nothing to spend of epsilon {epsilon:g} at delta {delta:g}: its "
                f"conversion alone costs {conversion:.4g}. Take a larger order"
            )
        self._spent = Fraction(0)  # exact: ten million small charges must not be lost to rounding

    @classmethod
    def for_releases(
        cls,
        event: Event,
        count: int,
        delta: float,
        *,
        beside: Composition = (),
        neighbours: Neighbours = Neighbours.ADD_REMOVE,
    ) -> RenyiFilter:
        """A filter that admits `count` releases like `event`, or fewer dearer ones, at the order that suits best.

        With what is charged `beside` it, its block then costs what the `rdp` accountant says of `count` releases.
        """
        from adadp.accounting import renyi

        planned = canonical([(event, count)])
        _, order = renyi.epsilon(canonical([*canonical(beside), *planned]), delta, neighbours)
        conversion = _conversion(delta, order)
        epsilon = count * renyi.divergences(event, neighbours, (order,))[0] + conversion
        return cls(epsilon + 3e-11 * (abs(epsilon) + abs(conversion)), delta, order, neighbours)

    @property
    def spent(self) -> float:
        """The Renyi divergence admitted so far, at `order`."""
        return float(self._spent)

    @property
    def event(self) -> RenyiBlock:
        """The whole budget as one event. Charge it to the ledger before the first release."""
        return RenyiBlock(self.order, self.budget, self.neighbours)

    def price(self, event: Event, count: int = 1) -> Fraction:
        """What releases add to the Renyi divergence at `order`. Refuses what has no price there."""
        from adadp.accounting import renyi

        if isinstance(event, Uncovered):
            raise AccountingError(f"a privacy filter cannot admit what no proof covers: {event.reason}")
        # Half a release has no price, and one nan in the sum would admit everything after it.
        if not hasattr(count, "__index__") or isinstance(count, bool) or count < 0:
            raise ConfigurationError(f"count must be a whole number >= 0, not {count!r}")
        divergence = renyi.divergences(event, self.neighbours, (self.order,))[0]
        if not math.isfinite(divergence):
            raise AccountingError(f"{event!r} has no finite Renyi divergence at order {self.order:g}")
        return Fraction(divergence) * operator.index(count)

    def fits(self, event: Event, count: int = 1) -> bool:
        """Whether `admit` would admit it. Charges nothing."""
        return self._spent + self.price(event, count) <= Fraction(self.budget)

    def admit(self, event: Event, count: int = 1) -> None:
        """Charge what is about to be released; on `BudgetExhaustedError` it must not be released."""
        cost = self.price(event, count)
        if self._spent + cost > Fraction(self.budget):
            raise BudgetExhaustedError(
                f"the privacy filter's budget ({self.epsilon:g}, {self.delta:g}) does not admit {event!r}: "
                f"it would raise the Renyi divergence at order {self.order:g} from {self.spent:.6g} to "
                f"{float(self._spent + cost):.6g}, above {self.budget:.6g}"
            )
        self._spent += cost
