"""Renyi divergences of every event, from dp-accounting, with their rounding errors paid for.

Guarantee: `divergences` bounds the Renyi divergence of one release from above at every order, in both
directions, for the neighbouring relation asked for; sums over releases bound the composition.

dp-accounting sums up to a thousand terms in logarithms. When the true divergence is below the rounding error
of that sum (a sampling rate of 1e-8 suffices) the result may be zero or negative, which its conversion reads
as epsilon = 0. A million such steps are not free, so each order gets a bound on its rounding error added.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from adadp.accounting import theorem1
from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian, RenyiBlock
from adadp.errors import AccountingError

ORDERS: tuple[float, ...] = (
    *(1.02, 1.05),
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(128, 256, 512, 1024, 2048, 4096),
)
"""dp-accounting's orders, some closer to 1 (epsilons in the thousands), some larger (below 0.01)."""

_UNIT = sys.float_info.epsilon


def _gaussian(sigma: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(order / (2 * sigma * sigma) * (1 + 4 * _UNIT) for order in orders)


def _rounding(rate: float, sigma: float, order: float) -> float:
    """A bound on the error of dp-accounting's logarithm of the moment of order `order`."""
    magnitude = 2 * math.lgamma(order + 1) + order * (abs(math.log(rate)) + abs(math.log1p(-rate)))
    error = 8 * _UNIT * (magnitude + order * order / (sigma * sigma) + 300)
    if not float(order).is_integer():
        error += 1e-12  # its series stops once a term is e^-30 of the sum
    return error


def _poisson(rate: float, sigma: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _quiet():
        accountant.compose(event)
    bounds = [
        min(max(float(value), 0.0) + _rounding(rate, sigma, order) / (order - 1), _chord(rate, sigma, order))
        for order, value in zip(orders, accountant.rdp, strict=True)
    ]
    return _convex(orders, bounds)


def _chord(rate: float, sigma: float, order: float) -> float:
    """A bound for large rates: the moment is convex in the rate, 1 at rate 0 and the Gaussian's at rate 1."""
    log_moment = order * (order - 1) / (2 * sigma * sigma)
    if log_moment < 30:
        logarithm = math.log1p(rate * math.expm1(log_moment))
    else:  # log(1 - q + q e^m), with q e^m taken out so that m may be thousands
        large = log_moment + math.log(rate)
        rest = math.log1p(-rate)
        logarithm = max(large, rest) + math.log1p(math.exp(-abs(large - rest)))
    return (logarithm + 1e-13) / (order - 1) * (1 + 8 * _UNIT)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about orders that did not converge: `_convex` answers for them."""
    from absl import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _convex(orders: tuple[float, ...], bounds: list[float]) -> tuple[float, ...]:
    """The largest convex curve below the bounds, through 0 at order 1.

    (order - 1) * divergence is convex in the order, so a chord between two bounds is a bound as well. It answers for
    orders at which dp-accounting's series did not converge (near q = 0.5) or adds what should be subtracted.
    """
    points = [(1.0, 0.0)]
    points += [(a, (a - 1) * r) for a, r in sorted(zip(orders, bounds, strict=True)) if math.isfinite(r)]
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    corners = [x for x, _ in hull]
    result = []
    for order, bound in zip(orders, bounds, strict=True):
        right = bisect.bisect_left(corners, order)
        if right == len(corners):
            result.append(bound)  # beyond the last order that is known: infinite, or the last one itself
            continue
        (x0, y0), (x1, y1) = hull[right - 1], hull[right]
        weight = (order - x0) / (x1 - x0)
        chord = ((1 - weight) * y0 + weight * y1) / (order - 1) * (1 + 4 * _UNIT)
        result.append(min(bound, chord))
    return tuple(result)


def _fixed_size(event: FixedSizeGaussian, orders: tuple[float, ...]) -> tuple[float, ...]:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    # dp-accounting takes sigma as noise over the sensitivity of a replacement and does not double it for us.
    sigma = event.noise_multiplier / 2
    release = dp_accounting.SampledWithoutReplacementDpEvent(
        event.examples, event.lot, dp_accounting.GaussianDpEvent(sigma)
    )
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(release)
    rate = event.lot / event.examples
    bounds = []
    for order, value in zip(orders, accountant.rdp, strict=True):
        # Its alternating sums lose digits: up to 6e-8 too small and up to 14 times too large were seen.
        # Theorem 1 is the same bound without its last refinement, in exact arithmetic, so the smaller of the
        # two holds.
        bound = max(float(value), 0.0) * (1 + 1e-6) + _rounding(rate, sigma, order) / (order - 1)
        if order in theorem1.ORDERS:
            bound = min(bound, theorem1.renyi_divergence(rate, sigma, int(order)) * (1 + 1e-12))
        bounds.append(bound)
    return tuple(bounds)


def _block(event: RenyiBlock, orders: tuple[float, ...]) -> tuple[float, ...]:
    # Renyi divergences do not fall with the order, so the bound holds below its order and says nothing above.
    return tuple(event.divergence if order <= event.order else math.inf for order in orders)


def as_gaussian(event: Event, neighbours: Neighbours) -> float | None:
    """Noise over the sensitivity of a neighbour, where the event is a Gaussian release on every example."""
    neighbours = Neighbours(neighbours)  # a string that slips through must not halve the sensitivity
    if isinstance(event, Gaussian):
        return event.noise_multiplier / (2 if neighbours is Neighbours.REPLACE_ONE else 1)
    if isinstance(event, PoissonGaussian) and event.rate == 1 and neighbours is Neighbours.ADD_REMOVE:
        return event.noise_multiplier
    if isinstance(event, FixedSizeGaussian) and event.lot == event.examples and neighbours is Neighbours.REPLACE_ONE:
        return event.noise_multiplier / 2
    return None


@lru_cache(maxsize=512)
def divergences(event: Event, neighbours: Neighbours, orders: tuple[float, ...] = ORDERS) -> tuple[float, ...]:
    """An upper bound on one release's Renyi divergence at each order. Refuses what it does not cover."""
    neighbours = Neighbours(neighbours)
    sigma = as_gaussian(event, neighbours)
    if sigma is not None:
        return _gaussian(sigma, orders)
    if isinstance(event, PoissonGaussian) and neighbours is Neighbours.ADD_REMOVE:
        return _poisson(event.rate, event.noise_multiplier, orders)
    if isinstance(event, FixedSizeGaussian) and neighbours is Neighbours.REPLACE_ONE:
        return _fixed_size(event, orders)
    if isinstance(event, RenyiBlock):
        return _block(event, orders)
    raise AccountingError(f"Renyi accounting does not cover {event!r} under {neighbours} neighbours")


def orders_for(composition: Canonical) -> tuple[float, ...]:
    """The orders to search: the usual ones and those at which a privacy filter fixed its budget."""
    extra = {event.order for event, _ in composition if isinstance(event, RenyiBlock)}
    return tuple(sorted({*ORDERS, *extra})) if extra else ORDERS


def total(composition: Canonical, neighbours: Neighbours, orders: tuple[float, ...]) -> list[float]:
    """The composition's Renyi divergence at each order, from above."""
    rows = [(count, divergences(event, neighbours, orders)) for event, count in composition]
    # Below 1e-15 dp-accounting's conversion takes the logarithm of 0.
    return [max(1e-15, math.fsum(count * row[index] for count, row in rows)) for index in range(len(orders))]


def epsilon(composition: Canonical, delta: float, neighbours: Neighbours) -> tuple[float, float]:
    """(epsilon, best order) for `delta`, by dp-accounting's conversion (Canonne, Kamath and Steinke 2020)."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    orders = orders_for(composition)
    value, order = compute_epsilon(orders, total(composition, neighbours, orders), delta)
    return float(value) * (1 + 1e-12), float(order)


def delta(composition: Canonical, epsilon_: float, neighbours: Neighbours) -> tuple[float, float]:
    """(smallest delta, best order) for `epsilon_`."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    orders = orders_for(composition)
    value, order = compute_delta(orders, total(composition, neighbours, orders), epsilon_)
    return min(1.0, max(float(value) * (1 + 1e-9), sys.float_info.min)), float(order)
