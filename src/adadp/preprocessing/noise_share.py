"""How much noise preprocessing may add, from the whole budget."""

from __future__ import annotations

import math

from adadp.accounting import gaussian
from adadp.accounting.accountant import require_target
from adadp.errors import ConfigurationError


def noise_multiplier_for_share(epsilon: float, delta: float, share: float = 0.1) -> float:
    """Noise multiplier whose cost is about `share` of the budget (epsilon, delta).

    Gaussian releases compose by adding 1 / sigma^2, so a share of the budget is a share of the 1 / sigma^2 of
    the single Gaussian release that would spend all of it. This is a plan, not a guarantee: what is spent
    follows from the events, and the training noise is calibrated with those events counted.
    """
    require_target(epsilon, delta)
    if not 0 < share <= 1:
        raise ConfigurationError(f"share must be in (0, 1], not {share!r}")
    whole = 1 / max(gaussian.mu_for(epsilon, delta), 1e-300)
    if whole < 1e-3:
        raise ConfigurationError(f"epsilon {epsilon!r} is so large that hardly any noise is needed; choose sigma")
    return whole / math.sqrt(share)
