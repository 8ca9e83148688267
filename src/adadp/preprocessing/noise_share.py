"""How much noise preprocessing may add, from the whole budget."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from adadp.errors import ConfigurationError


def gaussian_delta(epsilon: float, noise_multiplier: float) -> float:
    """Smallest delta of one Gaussian release at this epsilon (Balle and Wang, 2018, theorem 8)."""
    mu = 1.0 / noise_multiplier
    first = float(ndtr(mu / 2 - epsilon / mu))
    return first - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))


def noise_multiplier_for_share(epsilon: float, delta: float, share: float = 0.1) -> float:
    """Noise multiplier whose cost is about `share` of the budget (epsilon, delta).

    Gaussian releases compose by adding 1 / sigma^2, so a share of the budget is a share of the 1 / sigma^2 of
    the single Gaussian release that would spend all of it. This is a plan, not a guarantee: what is spent
    follows from the events, and the training noise is calibrated with those events counted.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigurationError(f"epsilon must be a finite number above 0, not {epsilon!r}")
    if not 0 < delta < 1:
        raise ConfigurationError(f"delta must be in (0, 1), not {delta!r}")
    if not 0 < share <= 1:
        raise ConfigurationError(f"share must be in (0, 1], not {share!r}")
    low, high = 1e-3, 1.0
    while gaussian_delta(epsilon, high) > delta:
        high *= 2
    if gaussian_delta(epsilon, low) <= delta:
        raise ConfigurationError(f"epsilon {epsilon!r} is so large that hardly any noise is needed; choose sigma")
    whole = float(brentq(lambda sigma: gaussian_delta(epsilon, sigma) - delta, low, high, xtol=1e-12))
    return whole / math.sqrt(share)
