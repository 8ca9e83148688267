"""The accountants: from what was released to (epsilon, delta).

| name | covers | how tight |
| --- | --- | --- |
| `pld` (default) | Poisson + add/remove; Gaussian releases under either relation | exact up to rounding |
| `rdp` | the same, sampling without replacement + replace-one, and privacy filters | 10 to 20% above `pld` |
| `theorem1` | Poisson + add/remove; without replacement + replace-one | the paper's: 2 to 3 times `pld` |

Guarantee: whatever an accountant returns is an upper bound under the neighbouring relation that it was asked
about; it refuses, with the reason, what it does not cover. What an accountant is, and how to add one, is in
`accountant`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from adadp.accounting import gaussian, pld, renyi, theorem1
from adadp.accounting.accountant import (
    ACCOUNTANTS,
    Accountant,
    Spent,
    accountant,
    covering_accountant,
    get_accountant,
    require_delta,
    require_epsilon,
    require_target,
    sampling_refusal,
)
from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian, RenyiBlock
from adadp.errors import AccountingError

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Pld",
    "Rdp",
    "Spent",
    "Theorem1",
    "accountant",
    "covering_accountant",
    "get_accountant",
    "require_delta",
    "require_epsilon",
    "require_target",
]

THEOREM1_NOTE = (
    "Theorem 1 as printed is valid but loose for Poisson sampling under add-or-remove-one neighbours; "
    "for replace-one neighbours, where a clipped sum moves by twice its bound, it needs sigma / 2"
)


@accountant("pld")
class Pld(Accountant):
    """Privacy loss distributions from dp-accounting; the exact formula where every release is a plain
    Gaussian.

    Where no distribution can be had in bounded time and memory, or its arithmetic cannot resolve so small a
    delta, the answer is the Renyi bound and says so.
    """

    searches_start_from = "rdp"  # a tenth of the time, 10 to 20% above

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers Poisson sampling (add/remove) and releases on the whole dataset (either relation)."""
        if isinstance(event, RenyiBlock):
            return "a privacy filter bounds one Renyi order and no distribution"
        reason = sampling_refusal(event, neighbours)
        if reason:
            return reason
        if isinstance(event, FixedSizeGaussian) and event.lot != event.examples:
            return "sampling without replacement has no known loss distribution"
        return None

    def _parts(self, releases: Canonical, neighbours: Neighbours) -> tuple[tuple[pld.Part, ...], float]:
        """Sampled releases, and the mu of all plain Gaussian ones together."""
        sampled: list[pld.Part] = []
        plain: list[tuple[float, int]] = []
        for event, count in releases:
            sigma = renyi.as_gaussian(event, neighbours)
            if sigma is not None:
                plain.append((sigma, count))
            elif isinstance(event, PoissonGaussian):
                sampled.append((event.noise_multiplier, event.rate, count))
            else:  # not an assertion: those can be switched off, and a release would be left out
                raise AccountingError(f"{event!r} has no privacy loss distribution")
        return tuple(sampled), gaussian.compose(plain)

    def parts(self, releases: Canonical, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> tuple[pld.Part, ...]:
        """The releases as `pld` composes them."""
        parts, mu = self._parts(releases, neighbours)
        return (*parts, (1 / mu, 1.0, 1)) if mu > 0 else parts

    def distribution(self, releases: Canonical, delta: float, neighbours: Neighbours) -> pld.Distribution | None:
        """The distribution of all releases together, fine enough for `delta`; None if it cannot be had."""
        parts = self.parts(releases, neighbours)
        aim = delta
        while (scale := renyi.epsilon(releases, aim, neighbours)[0]) == 0:
            aim /= 1000  # epsilon is 0 at this delta; a smaller one shows how wide the losses are spread
        return pld.distribution(parts, delta, scale)

    def bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        return _pld_epsilon(releases, delta, neighbours)

    def _bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        parts, mu = self._parts(releases, neighbours)
        if not parts:
            return Spent(gaussian.epsilon(mu, delta), delta, self.name)
        bound, order = renyi.epsilon(releases, delta, neighbours)
        if bound == 0:
            return Spent(0.0, delta, self.name)
        distribution = self.distribution(releases, delta, neighbours)
        value = math.inf if distribution is None else distribution.epsilon(delta)
        if value <= bound:
            return Spent(value, delta, self.name)
        return Spent(bound, delta, "rdp", order, (_fallback_note(distribution is None),))

    def bound_delta(self, releases: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        parts, mu = self._parts(releases, neighbours)
        if not parts:
            return Spent(epsilon, gaussian.delta(mu, epsilon), self.name)
        bound, order = renyi.delta(releases, epsilon, neighbours)
        # The discretisation has to suit an epsilon, so aim it at the delta that the Renyi bound promises.
        target = min(max(bound, 1e-12), 0.5)
        best, missing = Spent(epsilon, bound, "rdp", order, (_fallback_note(False),)), True
        for _ in range(2):
            distribution = self.distribution(releases, target, neighbours)
            if distribution is None:
                break
            missing = False
            value = distribution.delta(epsilon)
            if value <= best.delta:
                best = Spent(epsilon, value, self.name)
            if value > target / 10:
                break
            target = max(value, 1e-300)  # far below what was aimed at: the tails were cut too early
        if missing:
            return Spent(epsilon, bound, "rdp", order, (_fallback_note(True),))
        return best

    def bound_profile(
        self, releases: Canonical, epsilons: Sequence[float], neighbours: Neighbours, aim: float
    ) -> list[float]:
        """From one distribution, discretised for `aim`, or from the Renyi bound where that is smaller."""
        sampled = bool(releases) and bool(self._parts(releases, neighbours)[0])
        distribution = self.distribution(releases, aim, neighbours) if sampled else None
        if distribution is None:
            return super().bound_profile(releases, epsilons, neighbours, aim)
        return [min(distribution.delta(epsilon), renyi.delta(releases, epsilon, neighbours)[0]) for epsilon in epsilons]


def _fallback_note(missing: bool) -> str:
    why = (
        "a privacy loss distribution could not be had in bounded time and precision"
        if missing
        else "the privacy loss distribution's bound was larger"
    )
    return f"this is the rdp bound: {why}"


@lru_cache(maxsize=64)  # what was asked at every step of a planned run, for instance
def _pld_epsilon(releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
    return Pld()._bound_epsilon(releases, delta, neighbours)


@accountant("rdp")
class Rdp(Accountant):
    """Renyi divergences from dp-accounting, improved conversion."""

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers every event that has a proof."""
        return sampling_refusal(event, neighbours)

    def bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        epsilon, order = renyi.epsilon(releases, delta, neighbours)
        return Spent(epsilon, delta, self.name, order)

    def bound_delta(self, releases: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        delta, order = renyi.delta(releases, epsilon, neighbours)
        return Spent(epsilon, delta, self.name, order)


@accountant("theorem1")
class Theorem1(Accountant):
    """The paper's bound exactly as printed: orders 2..64, classic conversion."""

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers both sampling schemes, each under its own relation, and plain Gaussian releases."""
        if isinstance(event, RenyiBlock):
            return "the paper knows no privacy filters"
        return sampling_refusal(event, neighbours)

    def _divergences(self, releases: Canonical, neighbours: Neighbours) -> list[float]:
        totals = [0.0] * len(theorem1.ORDERS)
        for event, count in releases:
            sigma = renyi.as_gaussian(event, neighbours)
            if isinstance(event, PoissonGaussian):
                row = theorem1.renyi_divergences(event.rate, event.noise_multiplier)
            elif isinstance(event, FixedSizeGaussian):
                row = theorem1.renyi_divergences(event.lot / event.examples, event.noise_multiplier / 2)
            elif sigma is not None:
                row = tuple(order / (2 * sigma * sigma) for order in theorem1.ORDERS)
            else:
                raise AccountingError(f"Theorem 1 does not cover {event!r}")
            totals = [total + count * value for total, value in zip(totals, row, strict=True)]
        return [total * (1 + 1e-13) for total in totals]

    def bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        rows = zip(theorem1.ORDERS, self._divergences(releases, neighbours), strict=True)
        epsilon, order = min((total - math.log(delta) / (order - 1), order) for order, total in rows)
        return Spent(epsilon, delta, self.name, float(order), (THEOREM1_NOTE,))

    def bound_delta(self, releases: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        rows = zip(theorem1.ORDERS, self._divergences(releases, neighbours), strict=True)
        exponent, order = min(((order - 1) * (total - epsilon), order) for order, total in rows)
        delta = max(math.exp(min(exponent, 0.0)), 5e-324)
        return Spent(epsilon, delta, self.name, float(order), (THEOREM1_NOTE,))
