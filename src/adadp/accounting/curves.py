"""The whole guarantee as a curve: privacy profile, trade-off function, and one number for orientation.

Guarantee: every point of a profile is a valid (epsilon, delta); every point of a trade-off function is a
bound that no test can beat. `gdp_mu` is for orientation only: sampling is not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adadp.accounting import gaussian
from adadp.accounting.accountants import get_accountant, require_delta, require_epsilon
from adadp.accounting.composition import Composition
from adadp.accounting.events import Neighbours


def privacy_profile(
    composition: Composition,
    epsilons: Sequence[float],
    *,
    accountant: str = "pld",
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
    aim: float = 1e-5,
) -> list[float]:
    """The delta of each epsilon. `aim` is the delta for which a distribution is discretised."""
    neighbours = Neighbours(neighbours)
    chosen = get_accountant(accountant)
    releases = chosen.check(composition, neighbours)
    for epsilon in epsilons:
        require_epsilon(epsilon)
    require_delta(aim)
    return chosen.bound_profile(releases, epsilons, neighbours, aim)


def trade_off(epsilons: Sequence[float], deltas: Sequence[float], false_positive_rates: Sequence[float]) -> list[float]:
    """A lower bound on the false negative rate of any test with each false positive rate.

    Every (epsilon, delta) excludes the tests below two lines (Wasserman and Zhou 2010; Kairouz et al. 2015);
    what all of them together leave is the trade-off function of the profile, from below.
    """
    rates = []
    for alpha in false_positive_rates:
        best = 0.0
        for epsilon, delta in zip(epsilons, deltas, strict=True):
            rest = 1 - delta - alpha
            best = max(best, 1 - delta - math.exp(min(epsilon, 700.0)) * alpha, math.exp(-epsilon) * rest)
        rates.append(best)
    return rates


def gdp_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian mechanism is exactly (epsilon, delta)-DP: the difficulty of telling N(0,1) from
    N(mu,1).

    For orientation. It matches the composition at this one point of its profile, not elsewhere.
    """
    require_epsilon(epsilon)
    require_delta(delta)
    return gaussian.mu_for(epsilon, delta)
