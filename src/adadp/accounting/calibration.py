"""From a budget to a setting: the least noise, the most steps, the largest lot.

Each search takes a function from the setting to the *whole* composition, so preprocessing, training, a paid
shape and an audit are calibrated together against one budget.

Guarantee: the returned setting was accounted for and fits: its epsilon is at most the target. It is also
tight: within 0.5% under the target wherever the setting can move epsilon that finely.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from adadp.accounting.accountants import Spent, get_accountant, require_target
from adadp.accounting.composition import Composition
from adadp.accounting.events import Neighbours
from adadp.errors import AccountingError, ConfigurationError

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_TIGHT = 0.998  # an epsilon of this fraction of the target or more ends the search for a real number
_NEGLIGIBLE = 1e-7  # an epsilon that is this little below its target is not worth a long search


@dataclass(frozen=True)
class Calibrated:
    """A noise multiplier and what the whole composition then costs."""

    noise_multiplier: float
    spent: Spent


def _interpolate(low: tuple[float, float], high: tuple[float, float], target: float) -> float:
    """Where a straight line through two points (log setting, log epsilon) reaches `target`."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if not math.isfinite(slope) or slope == 0:
        return 0.5 * (low[0] + high[0])
    # Never within a twentieth of an end: on a curve, one end would otherwise stay for ever.
    margin = 0.05 * (high[0] - low[0])
    point = low[0] + (target - low[1]) / slope
    return min(max(point, low[0] + margin), high[0] - margin)


def _log(value: float) -> float:
    return math.log(min(max(value, 1e-300), 1e300))


def calibrate_noise(
    make_composition: Callable[[float], Composition],
    epsilon: float,
    delta: float,
    *,
    accountant: str = "pld",
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
) -> Calibrated:
    """The smallest noise multiplier for which `make_composition(noise_multiplier)` is (epsilon, delta)-DP.

    Raises `ConfigurationError` when no amount of noise suffices: releases whose noise is fixed cost too much.
    """
    require_target(epsilon, delta)
    chosen = get_accountant(accountant)

    def spend(sigma: float) -> Spent:
        return chosen.epsilon(make_composition(sigma), delta, neighbours)

    sigma, factor = 1.0, 2.0
    if chosen.searches_start_from is not None:
        with contextlib.suppress(ConfigurationError, AccountingError):
            sigma = calibrate_noise(
                make_composition, epsilon, delta, accountant=chosen.searches_start_from, neighbours=neighbours
            ).noise_multiplier
            factor = 1.1
    # `private` fits, `leaky` does not.
    leaky: tuple[float, Spent] | None = None
    private: tuple[float, Spent] | None = None
    while leaky is None or private is None:
        spent = spend(sigma)
        if spent.epsilon <= epsilon:
            private = (sigma, spent)
            if sigma <= _LEAST_NOISE or spent.epsilon >= _TIGHT * epsilon:
                return Calibrated(*private)
            sigma = max(_LEAST_NOISE, sigma / factor)
        else:
            leaky = (sigma, spent)
            if sigma >= _MOST_NOISE:
                raise ConfigurationError(
                    f"no noise multiplier reaches epsilon {epsilon:g} at delta {delta:g}: with one of "
                    f"{sigma:g} epsilon is still {spent.epsilon:.6g}. Releases whose noise is fixed may "
                    "cost too much, or the accountant may not resolve so small an epsilon"
                )
            sigma = min(_MOST_NOISE, factor * sigma)
        factor = factor**1.5
    # Near 0 epsilon falls by orders of magnitude at once: no more is asked there than a noise right to 0.1%.
    finest = 1e-9
    sides = ""
    while private[1].epsilon < _TIGHT * epsilon and private[0] - leaky[0] > finest * private[0]:
        aim = math.log(0.5 * (1 + _TIGHT) * epsilon)
        point = _interpolate(
            (math.log(leaky[0]), _log(leaky[1].epsilon)), (math.log(private[0]), _log(private[1].epsilon)), aim
        )
        if sides.endswith(("pp", "ll")):  # a straight line does not suit: halve
            point, sides = 0.5 * (math.log(leaky[0]) + math.log(private[0])), ""
        spent = spend(math.exp(point))
        if spent.epsilon <= epsilon:
            private, sides = (math.exp(point), spent), sides + "p"
            finest = 1e-3 if epsilon - spent.epsilon < _NEGLIGIBLE else 1e-9
        else:
            leaky, sides = (math.exp(point), spent), sides + "l"
    return Calibrated(*private)


def most(
    make_composition: Callable[[int], Composition],
    epsilon: float,
    delta: float,
    *,
    accountant: str = "pld",
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
    at_most: int = 10**9,
    guess: int = 1,
) -> int:
    """The largest count in 0..at_most for which `make_composition(count)` is (epsilon, delta)-DP.

    For steps, `make_composition` puts the count on the event; for the largest lot, into the sampling rate. 0
    is returned without being accounted for: it means that not even 1 fits. `guess` is where the search
    begins.
    """
    require_target(epsilon, delta)
    if at_most < 1:
        return 0
    chosen = get_accountant(accountant)

    def cost(count: int) -> float:
        return chosen.epsilon(make_composition(count), delta, neighbours).epsilon

    if chosen.searches_start_from is not None:
        with contextlib.suppress(AccountingError):
            guess = most(
                make_composition, epsilon, delta,
                accountant=chosen.searches_start_from, neighbours=neighbours, at_most=at_most, guess=guess,
            )  # fmt: skip
    fits, exceeds = 0, at_most + 1
    fits_cost, exceeds_cost = 0.0, math.inf
    count = min(max(guess, 1), at_most)
    while True:
        value = cost(count)
        if value <= epsilon:
            fits, fits_cost = count, value
        else:
            exceeds, exceeds_cost = count, value
        if exceeds - fits <= 1:
            return fits
        if fits == 0:
            count = max(1, exceeds // 4)
        elif math.isinf(exceeds_cost):
            # Epsilon grows like a power of the count between 1/2 and 1: overshoot a little, to have both
            # ends.
            factor = min(4.0, 1.02 * (epsilon / fits_cost) ** 1.9) if fits_cost > 0 else 4.0
            count = min(at_most, max(fits + 1, math.ceil(factor * fits)))
        else:
            point = _interpolate(
                (math.log(fits), _log(fits_cost)), (math.log(exceeds), _log(exceeds_cost)), math.log(epsilon)
            )
            count = min(max(round(math.exp(point)), fits + 1), exceeds - 1)
