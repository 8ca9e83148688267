"""The Gaussian mechanism without sampling, exactly.

Any number of Gaussian releases compose to one of mu = sqrt(sum of 1 / sigma^2), whose privacy profile is
known in closed form (Balle and Wang 2018; Dong, Roth and Su 2022):

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

Guarantee: every function here rounds towards less privacy. `delta` and `epsilon` are never too small,
`mu_for` is never too large.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

_ROUNDING = 8 * sys.float_info.epsilon
_INFLATION = 1 + 1e-9  # the argument of Phi cancels: at mu = 3,000 it keeps about ten digits


def compose(sigmas: Iterable[tuple[float, int]]) -> float:
    """The mu of `count` Gaussian releases of each noise multiplier, rounded up. 0 when there is none."""
    return math.sqrt(math.fsum(count / sigma / sigma for sigma, count in sigmas)) * (1 + _ROUNDING)


def delta(mu: float, epsilon: float) -> float:
    """The smallest delta for which mu-GDP gives (epsilon, delta)-DP, rounded up."""
    from scipy.special import erfcx, ndtr

    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    upper = mu / 2 - epsilon / mu
    lower = upper - mu
    density = math.exp(-0.5 * upper * upper)
    # e^epsilon phi(lower) = phi(upper), so no exponential of epsilon is ever formed. erfcx is the Mills
    # ratio.
    second = 0.5 * density * float(erfcx(-lower / math.sqrt(2)))
    first = float(ndtr(upper)) if upper > 0 else 0.5 * density * float(erfcx(-upper / math.sqrt(2)))
    value = (first - second + _ROUNDING * first) * _INFLATION
    # An underflow must not read as "pure differential privacy".
    return min(1.0, max(value, sys.float_info.min))


def epsilon(mu: float, delta_: float) -> float:
    """The smallest epsilon for which mu-GDP gives (epsilon, delta_)-DP, rounded up."""
    if mu == 0 or delta(mu, 0.0) <= delta_:
        return 0.0
    if math.isinf(mu) or delta_ < sys.float_info.min:
        return math.inf
    low, high = 0.0, mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta_)))
    while delta(mu, high) > delta_:  # only rounding can bring us here
        high *= 1 + 1e-9
        if math.isinf(high):
            return high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        if delta(mu, middle) <= delta_:
            high = middle
        else:
            low = middle
    return high


def mu_for(epsilon_: float, delta_: float) -> float:
    """The largest mu for which mu-GDP gives (epsilon_, delta_)-DP, rounded down."""
    low, high = 0.0, 1.0
    while delta(high, epsilon_) <= delta_:
        low, high = high, 2 * high
        if high > 1e150:
            return math.inf
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if delta(middle, epsilon_) <= delta_:
            low = middle
        else:
            high = middle
        if high < 1e-150:
            return 0.0
    return low
