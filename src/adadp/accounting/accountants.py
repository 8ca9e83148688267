"""The accountants: from what was released to (epsilon, delta).

| name | covers | how tight |
| --- | --- | --- |
| `pld` (default) | Poisson + add/remove; Gaussian releases under either relation | exact up to rounding |
| `rdp` | the same, sampling without replacement + replace-one, and privacy filters | 10 to 20% above `pld` |
| `theorem1` | Poisson + add/remove; without replacement + replace-one | the paper's: 2 to 3 times `pld` |

Guarantee: whatever an accountant returns is an upper bound under the neighbouring relation that it was asked
about; it refuses, with the reason, what it does not cover. An accountant is one class here and one entry in
`ACCOUNTANTS`.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from adadp.accounting import gaussian, pld, renyi, theorem1
from adadp.accounting.composition import Canonical, Composition, canonical, refuse_uncovered
from adadp.accounting.events import (
    Event,
    FixedSizeGaussian,
    Neighbours,
    PoissonGaussian,
    RenyiBlock,
    Uncovered,
)
from adadp.errors import AccountingError, ConfigurationError

THEOREM1_NOTE = (
    "Theorem 1 as printed is valid but loose for Poisson sampling under add-or-remove-one neighbours; "
    "for replace-one neighbours, where a clipped sum moves by twice its bound, it needs sigma / 2"
)


@dataclass(frozen=True)
class Spent:
    """What a composition costs: (epsilon, delta), whose bound it is, its Renyi order if any, and remarks."""

    epsilon: float
    delta: float
    accountant: str
    order: float | None = None
    notes: tuple[str, ...] = ()


def require_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ConfigurationError(f"delta must be above 0 and below 1, not {delta!r}")


def require_epsilon(epsilon: float) -> None:
    """Refuse an epsilon that is negative or not finite."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigurationError(f"epsilon must be a finite number >= 0, not {epsilon!r}")


class Accountant(abc.ABC):
    """Answers for compositions that it covers. Answers are upper bounds."""

    name: str

    @abc.abstractmethod
    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Why this event is not covered under this relation; None when it is."""

    @abc.abstractmethod
    def _epsilon(self, composition: Canonical, delta: float, neighbours: Neighbours) -> Spent: ...

    @abc.abstractmethod
    def _delta(self, composition: Canonical, epsilon: float, neighbours: Neighbours) -> Spent: ...

    def check(self, composition: Composition, neighbours: Neighbours) -> Canonical:
        """The canonical composition, if all of it is covered; `AccountingError` with the reason if not."""
        neighbours = Neighbours(neighbours)
        releases = canonical(composition)
        refuse_uncovered(releases)
        for event, _ in releases:
            reason = self.refusal(event, neighbours)
            if reason:
                raise AccountingError(f"the {self.name} accountant does not cover {event!r}: {reason}")
        return releases

    def epsilon(self, composition: Composition, delta: float, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> Spent:
        """An epsilon for which the composition is (epsilon, delta)-DP. 0 for no release at all."""
        require_delta(delta)
        neighbours = Neighbours(neighbours)  # a plain string is compared with neither relation by `is`
        releases = self.check(composition, neighbours)
        if not releases:
            return Spent(0.0, delta, self.name)
        return self._epsilon(releases, delta, neighbours)

    def delta(self, composition: Composition, epsilon: float, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> Spent:
        """A delta (the paper's delta_*) for which the composition is (epsilon, delta)-DP. At most 1."""
        require_epsilon(epsilon)
        neighbours = Neighbours(neighbours)
        releases = self.check(composition, neighbours)
        if not releases:
            return Spent(epsilon, 0.0, self.name)
        return self._delta(releases, epsilon, neighbours)


def _sampling_refusal(event: Event, neighbours: Neighbours) -> str | None:
    """What the two sampling schemes have proofs for, whoever does the sums."""
    if isinstance(event, PoissonGaussian) and neighbours is not Neighbours.ADD_REMOVE:
        return "Poisson sampling is covered under add-or-remove-one neighbours only"
    if isinstance(event, FixedSizeGaussian) and neighbours is not Neighbours.REPLACE_ONE:
        return (
            "lots of a fixed size are covered under replace-one neighbours only: adding an example changes "
            "who else is drawn"
        )
    return None


class Rdp(Accountant):
    """Renyi divergences from dp-accounting, improved conversion."""

    name = "rdp"

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers every event that has a proof."""
        return _sampling_refusal(event, neighbours)

    def _epsilon(self, composition: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        epsilon, order = renyi.epsilon(composition, delta, neighbours)
        return Spent(epsilon, delta, self.name, order)

    def _delta(self, composition: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        delta, order = renyi.delta(composition, epsilon, neighbours)
        return Spent(epsilon, delta, self.name, order)


class Pld(Accountant):
    """Privacy loss distributions from dp-accounting; the exact formula where every release is a plain
    Gaussian.

    Where no distribution can be had in bounded time and memory, or its arithmetic cannot resolve so small a
    delta, the answer is the Renyi bound and says so.
    """

    name = "pld"

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers Poisson sampling (add/remove) and releases on the whole dataset (either relation)."""
        if isinstance(event, RenyiBlock):
            return "a privacy filter bounds one Renyi order and no distribution; use the rdp accountant"
        reason = _sampling_refusal(event, neighbours)
        if reason:
            return reason
        if isinstance(event, FixedSizeGaussian) and event.lot != event.examples:
            return "sampling without replacement has no known loss distribution; use the rdp accountant"
        return None

    def _parts(self, composition: Canonical, neighbours: Neighbours) -> tuple[tuple[pld.Part, ...], float]:
        """Sampled releases, and the mu of all plain Gaussian ones together."""
        sampled: list[pld.Part] = []
        plain: list[tuple[float, int]] = []
        for event, count in composition:
            sigma = renyi.as_gaussian(event, neighbours)
            if sigma is not None:
                plain.append((sigma, count))
            else:
                assert isinstance(event, PoissonGaussian)
                sampled.append((event.noise_multiplier, event.rate, count))
        return tuple(sampled), gaussian.compose(plain)

    def distribution(self, composition: Canonical, delta: float, neighbours: Neighbours) -> pld.Distribution | None:
        """The composition's distribution, fine enough for `delta`; None if it cannot be had."""
        parts, mu = self._parts(composition, neighbours)
        if mu > 0:
            parts = (*parts, (1 / mu, 1.0, 1))
        aim = delta
        while (scale := renyi.epsilon(composition, aim, neighbours)[0]) == 0:
            aim /= 1000  # epsilon is 0 at this delta; a smaller one shows how wide the losses are spread
        return pld.distribution(parts, delta, scale)

    def _epsilon(self, composition: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        parts, mu = self._parts(composition, neighbours)
        if not parts:
            return Spent(gaussian.epsilon(mu, delta), delta, self.name)
        bound, order = renyi.epsilon(composition, delta, neighbours)
        if bound == 0:
            return Spent(0.0, delta, self.name)
        distribution = self.distribution(composition, delta, neighbours)
        value = math.inf if distribution is None else distribution.epsilon(delta)
        if value <= bound:
            return Spent(value, delta, self.name)
        return Spent(bound, delta, "rdp", order, (_fallback_note(distribution is None),))

    def _delta(self, composition: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        parts, mu = self._parts(composition, neighbours)
        if not parts:
            return Spent(epsilon, gaussian.delta(mu, epsilon), self.name)
        bound, order = renyi.delta(composition, epsilon, neighbours)
        # The discretisation has to suit an epsilon, so aim it at the delta that the Renyi bound promises.
        target = min(max(bound, 1e-12), 0.5)
        best, missing = Spent(epsilon, bound, "rdp", order, (_fallback_note(False),)), True
        for _ in range(2):
            distribution = self.distribution(composition, target, neighbours)
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


def _fallback_note(missing: bool) -> str:
    why = (
        "a privacy loss distribution could not be had in bounded time and precision"
        if missing
        else "the privacy loss distribution's bound was larger"
    )
    return f"this is the rdp bound: {why}"


class Theorem1(Accountant):
    """The paper's bound exactly as printed: orders 2..64, classic conversion."""

    name = "theorem1"

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Covers both sampling schemes, each under its own relation, and plain Gaussian releases."""
        if isinstance(event, RenyiBlock):
            return "the paper knows no privacy filters; use the rdp accountant"
        return _sampling_refusal(event, neighbours)

    def _divergences(self, composition: Canonical, neighbours: Neighbours) -> list[float]:
        totals = [0.0] * len(theorem1.ORDERS)
        for event, count in composition:
            sigma = renyi.as_gaussian(event, neighbours)
            if isinstance(event, PoissonGaussian):
                row = theorem1.renyi_divergences(event.rate, event.noise_multiplier)
            elif isinstance(event, FixedSizeGaussian):
                row = theorem1.renyi_divergences(event.lot / event.examples, event.noise_multiplier / 2)
            else:
                assert sigma is not None
                row = tuple(order / (2 * sigma * sigma) for order in theorem1.ORDERS)
            totals = [total + count * value for total, value in zip(totals, row, strict=True)]
        return [total * (1 + 1e-13) for total in totals]

    def _epsilon(self, composition: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        rows = zip(theorem1.ORDERS, self._divergences(composition, neighbours), strict=True)
        epsilon, order = min((total - math.log(delta) / (order - 1), order) for order, total in rows)
        return Spent(epsilon, delta, self.name, float(order), (THEOREM1_NOTE,))

    def _delta(self, composition: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        rows = zip(theorem1.ORDERS, self._divergences(composition, neighbours), strict=True)
        exponent, order = min(((order - 1) * (total - epsilon), order) for order, total in rows)
        delta = max(math.exp(min(exponent, 0.0)), 5e-324)
        return Spent(epsilon, delta, self.name, float(order), (THEOREM1_NOTE,))


ACCOUNTANTS: dict[str, Accountant] = {each.name: each for each in (Pld(), Rdp(), Theorem1())}


def get_accountant(name: str) -> Accountant:
    """The accountant of that name, or `ConfigurationError` with the names there are."""
    try:
        return ACCOUNTANTS[name]
    except KeyError:
        raise ConfigurationError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {name!r}") from None


def default_accountant(composition: Composition) -> str:
    """`pld`, or `rdp` where a distribution is not known for some event."""
    for event, _ in canonical(composition):
        known = event.claimed if isinstance(event, Uncovered) else event
        if isinstance(known, RenyiBlock) or (isinstance(known, FixedSizeGaussian) and known.lot != known.examples):
            return "rdp"
    return "pld"
