"""The paper's algorithms on a function of two variables, many walks at once, and the distance between two walks.

There is no lot here: the gradient of the function stands for a lot's, as in the paper, with sensitivity s_i or C taken
as given. An algorithm is two choices of Algorithm 1, whether the step and whether the noise follow the gradient:

| name | step | noise |
| --- | --- | --- |
| dpsgd | g | C sigma |
| adal | g / sqrt(E[g^2] + eps0) | C sigma |
| adan | g | beta sigma sqrt(m E') |
| adadp | g / sqrt(E[g^2] + eps0) | beta sigma sqrt(m E') |

E' is made of the gradients themselves ("raw", as printed: on data, no proof covers it) or of the noisy ones that the
walk released ("released": post-processing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adadp_lab.paper.surfaces import Point, Surface

GAMMA, DECAY, BETA, THRESHOLD = 0.1, 0.9, 1.5, 1e-6
"""As the paper prints them for this experiment: gamma, gamma', beta and G."""
EPSILON0 = 1e-8
STEPS = 150

_FAR = 1e6
"""A walk that leaves this radius is lost: it is held where it was, before numbers overflow."""


@dataclass(frozen=True)
class Rule:
    """Which parts of Algorithm 1 are adaptive, and what E' is made of. Without `clipped` the gradient is left as it is
    (plain SGD, RMSProp), which is defined without noise only.
    """

    adaptive_rate: bool = False
    adaptive_noise: bool = False
    shape: Literal["raw", "released"] = "raw"
    clipped: bool = True


RULES = {
    "dpsgd": Rule(),
    "adal": Rule(adaptive_rate=True),
    "adan": Rule(adaptive_noise=True),
    "adadp": Rule(adaptive_rate=True, adaptive_noise=True),
    "adadp-released": Rule(adaptive_rate=True, adaptive_noise=True, shape="released"),
}


@dataclass(frozen=True)
class Walks:
    """`path` [steps, walks, 2], the points after each step; `lost` [walks], those that ran away."""

    path: Tensor
    lost: Tensor


def walk(
    surface: Surface,
    rule: Rule,
    *,
    start: Point | Tensor,
    rate: float | Tensor,
    sigma: float | Tensor,
    bound: float | Tensor,
    walks: int = 1,
    steps: int = STEPS,
    seed: int = 0,
) -> Walks:
    """Walk down `surface`. `rate`, `sigma` and the L2 bound C are numbers or tensors [walks, 1]; `start` may be
    [walks, 2].
    """
    generator = torch.Generator().manual_seed(seed)
    point = torch.as_tensor(start, dtype=torch.float64).expand(walks, 2).clone()
    mean_square, shape = torch.zeros_like(point), torch.zeros_like(point)  # the paper's E and E'
    local = torch.zeros(walks, 1, dtype=torch.bool)
    lost = torch.zeros(walks, 1, dtype=torch.bool)
    path = torch.empty(steps, walks, 2, dtype=torch.float64)
    for step in range(steps):
        gradient = surface.gradient(point)
        bounded, stddev = gradient, torch.zeros_like(gradient)
        if rule.clipped:
            bounded = gradient / (gradient.norm(dim=1, keepdim=True) / bound).clamp_min(1.0)
            stddev = stddev + sigma * bound
        if rule.clipped and rule.adaptive_noise:
            root = shape.sqrt()
            local = local | (root.var(dim=1, correction=0, keepdim=True) > THRESHOLD)  # once on, it stays on
            box = BETA * root
            bounded = torch.where(local, gradient.clamp(-box, box), bounded)
            stddev = torch.where(local, math.sqrt(2) * sigma * box, stddev)
        released = bounded + stddev * torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
        seen = gradient if rule.shape == "raw" else released
        shape = DECAY * shape + (1 - DECAY) * seen.square()
        move = released
        if rule.adaptive_rate:
            mean_square = (1 - GAMMA) * mean_square + GAMMA * released.square()
            move = released / (mean_square + EPSILON0).sqrt()
        moved = point - rate * move
        lost = lost | ~(moved.norm(dim=1, keepdim=True) < _FAR)  # not a number is lost too
        point = torch.where(lost, point, moved)
        path[step] = point
    return Walks(path, lost[:, 0])


def distance(first: Tensor, second: Tensor) -> Tensor:
    """The paper's D(P, Q): the mean over steps of |p_i - q_i|, for paths [steps, walks, 2] (or one walk): [walks]."""
    distances: Tensor = (first - second).norm(dim=-1).mean(dim=0)
    return distances
