"""DPOPT's choice of noise: which sigma_i lose least, among those that are private enough.

    minimise  sum_i w_i sigma_i^2   under   sum_i s_i^2 / sigma_i^2 <= 1 / sigma_*^2

(the constraint as the AdaDP paper corrects it, its Lemma 1). Setting the Lagrangian's derivative to zero gives
sigma_i^4 = lambda s_i^2 / w_i, hence sigma_i^2 = sigma_*^2 (s_i / sqrt(w_i)) sum_j s_j sqrt(w_j).
"""

from __future__ import annotations

import torch
from torch import Tensor

DESCENT_STEPS = 50
_SLACK = 1 + 2.0**-20  # rounding must not leave the constraint by a hair


def closed_form(bounds: Tensor, weights: Tensor, noise_multiplier: float) -> Tensor:
    """The optimal sigma_i^2 / sigma_*^2 ... times sigma_*^2, from the formula above. Shapes [m]; weights above 0."""
    roots = weights.double().sqrt()
    total = (bounds.double() * roots).sum()
    return (noise_multiplier**2 * bounds.double() / roots * total).sqrt().to(bounds.dtype)


def descend(
    bounds: Tensor,
    weights: Tensor,
    noise_multiplier: float,
    *,
    start: Tensor | None = None,
    steps: int = DESCENT_STEPS,
    tolerance: float = 1e-4,
) -> Tensor:
    """The optimal sigma_i by projected gradient descent, from `start` or from the same share for every coordinate.

    The gradient is taken in log sigma_i and divided by its curvature there, so that bounds of very different size
    converge alike; the projection is the common factor that makes the constraint hold with equality. Ends early once
    every coordinate's two shares, of the loss and of the constraint, agree to `tolerance`. Coordinates of bound 0 get
    no noise: nothing of them is let through.
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
