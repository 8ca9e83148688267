"""DPOPT's choice of noise: the sigma_i of least weighted variance that keep the privacy of one sigma_*.

    minimise  sum_i w_i sigma_i^2   under   sum_i s_i^2 / sigma_i^2 <= 1 / sigma_*^2

(the constraint as the AdaDP paper corrects it, its Lemma 1). Setting the Lagrangian's derivative to zero gives
sigma_i^4 = lambda s_i^2 / w_i, hence sigma_i^2 = sigma_*^2 (s_i / sqrt(w_i)) sum_j s_j sqrt(w_j).
"""

from __future__ import annotations

import torch
from torch import Tensor

DESCENT_STEPS = 50
_SLACK = 1 + 2.0**-20  # rounding must not violate the constraint


def descend(
    bounds: Tensor,
    weights: Tensor,
    noise_multiplier: float,
    *,
    start: Tensor | None = None,
    steps: int = DESCENT_STEPS,
    tolerance: float = 1e-4,
) -> Tensor:
    """Return the optimal sigma_i, [m], found by projected gradient descent.

    The gradient is taken in log sigma_i and divided by its curvature there, so that bounds of very different size
    converge at the same rate. The projection is the common factor that makes the constraint hold with equality (up to
    a slack for rounding).

    Args:
        bounds: s_i, [m]. Where s_i is 0 the coordinate contributes nothing, and its sigma_i is 0.
        weights: w_i, [m], above 0.
        noise_multiplier: sigma_*.
        start: sigma_i to begin with; by default all coordinates have the same share of the constraint.
        steps: the largest number of descent steps.
        tolerance: descent ends (on the CPU) once each coordinate's share of the loss and its share of the constraint
            differ by less than this, relative to their sum.

    """
    live = bounds > 0
    squares = torch.where(live, bounds, 1).square()
    variance = squares * live.sum() if start is None else torch.where(live & (start > 0), start.square(), squares)
    for _ in range(steps):
        loss, spent = weights * variance, squares / variance
        loss, spent = loss / loss[live].sum(), spent / spent[live].sum()
        apart = (loss - spent) / (loss + spent)
        variance = variance * torch.exp(-apart)
        if not variance.is_cuda and float(apart.abs().max()) < tolerance:
            break
    needed = (squares / variance)[live].sum() * noise_multiplier**2 * _SLACK
    return torch.where(live, (variance * needed).sqrt(), 0)
