"""The paper's Theorem 1, as printed: subsampled Renyi divergences at orders 2..64, classic conversion.

    epsilon = min over alpha of  T / (alpha - 1) * log(1 + q^2 C(alpha, 2) min{4 (e^{1/s^2} - 1), 2 e^{1/s^2}}
                  + 4 sum_{j=3}^{alpha} q^j C(alpha, j) sqrt(B(2 ceil(j/2)) B(2 floor(j/2))))
              + log(1 / delta) / (alpha - 1),
    B(l)    = sum_{i=0}^{l} (-1)^i C(l, i) e^{i (i - 1) / (2 s^2)}

B(l) is the l-th central moment of a likelihood ratio, a small number written as a difference of huge ones: at
s = 50 its terms agree in their first 84 digits. It is therefore summed in decimal arithmetic whose precision
grows until the cancellation is paid for, and rounded up, so the bound is never too small.

Guarantee: the formula bounds the Renyi divergence of Poisson sampling under add-or-remove-one neighbours
(loosely) and that of sampling without replacement under replace-one neighbours when `sigma` is the noise
over the sensitivity of the *replacement*, which is twice an example's bound.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Overflow, localcontext
from functools import lru_cache

ORDERS = tuple(range(2, 65))
"""The orders that the paper searches."""

_LARGEST_SIGMA = 1e6
"""B(l) falls as sigma grows; above this sigma it is taken here, an upper bound that changes nothing."""

_GUARD_DIGITS = 25


def _round_up(value: float) -> float:
    """A float that is certainly not below what `value` was rounded from."""
    return math.nextafter(math.nextafter(value, math.inf), math.inf)


@lru_cache(maxsize=256)
def log_moments(sigma: float) -> dict[int, float]:
    """log B(l) for every even l up to 64, rounded up. Infinite where B(l) is beyond any number."""
    sigma = min(sigma, _LARGEST_SIGMA)
    highest = ORDERS[-1]
    precision = 80
    while True:
        context = Context(prec=precision, Emax=MAX_EMAX, Emin=MIN_EMIN)
        with localcontext(context):
            try:
                unit = 1 / (2 * Decimal(sigma) ** 2)
                powers = [(unit * (i * (i - 1))).exp() for i in range(highest + 1)]
            except Overflow:
                return dict.fromkeys(range(2, highest + 1, 2), math.inf)
            logs: dict[int, float] = {}
            for order in range(2, highest + 1, 2):
                terms = [math.comb(order, i) * powers[i] for i in range(order + 1)]
                moment = sum((-term if i % 2 else term for i, term in enumerate(terms)), Decimal(0))
                # Every term is right to `precision` digits, so this much of the largest one is noise.
                noise = max(terms) * Decimal(10) ** (_GUARD_DIGITS - precision)
                if moment <= noise:
                    break
                logs[order] = _round_up(float(moment.ln()))
            else:
                return logs
        precision *= 2


def _log_sum_exp(values: list[float]) -> float:
    top = max(values)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def _log_one_plus_exp(value: float) -> float:
    """log(1 + e^value), exact also where e^value is far below 1 or far above the largest float."""
    if value > 0:
        return value + math.log1p(math.exp(-value))
    return math.log1p(math.exp(value))


def renyi_divergence(rate: float, sigma: float, order: int) -> float:
    """Theorem 1's bound on one step's Renyi divergence of integer `order` >= 2, at sampling rate `rate`."""
    moments = log_moments(sigma)
    inverse = 1.0 / sigma / sigma
    log_rate = math.log(rate)
    # min{4 (e^x - 1), 2 e^x}, in logarithms so that x may be thousands.
    second = math.log(2) + inverse if inverse > math.log(2) else math.log(4 * math.expm1(inverse))
    logs = [2 * log_rate + math.log(math.comb(order, 2)) + second]
    for j in range(3, order + 1):
        root = 0.5 * (moments[2 * ((j + 1) // 2)] + moments[2 * (j // 2)])
        logs.append(math.log(4) + j * log_rate + math.log(math.comb(order, j)) + root)
    return _log_one_plus_exp(_log_sum_exp(logs)) / (order - 1)


@lru_cache(maxsize=256)
def renyi_divergences(rate: float, sigma: float) -> tuple[float, ...]:
    """`renyi_divergence` at every order of `ORDERS`."""
    return tuple(renyi_divergence(rate, sigma, order) for order in ORDERS)
