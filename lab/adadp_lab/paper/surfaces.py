"""The standard test functions of optimisation in two variables, with their known minima.

Formulas and search boxes are the usual ones. A start is our choice, as the paper names none: a point of the box from
which descent without noise finds a lowest point in 150 steps (except on Rosenbrock's valley and among Ackley's
hollows).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Point = tuple[float, float]


@dataclass(frozen=True)
class Surface:
    """A function of two variables, written for tensors of any shape.

    `lowest` is its value at each of `minima`, None where it falls without end; `box` is (left, right, bottom, top).
    """

    name: str
    title: str
    formula: Callable[[Tensor, Tensor], Tensor]
    minima: tuple[Point, ...]
    lowest: float | None
    box: tuple[float, float, float, float]
    start: Point

    def value(self, points: Tensor) -> Tensor:
        """The values at `points` [..., 2]: [...]."""
        return self.formula(points[..., 0], points[..., 1])

    def gradient(self, points: Tensor) -> Tensor:
        """The gradients at `points` [..., 2], of the same shape."""
        points = points.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.value(points).sum(), points)
        return gradient


def _beale(x: Tensor, y: Tensor) -> Tensor:
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def _beale_as_printed(x: Tensor, y: Tensor) -> Tensor:
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 3


def _rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def _himmelblau(x: Tensor, y: Tensor) -> Tensor:
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def _booth(x: Tensor, y: Tensor) -> Tensor:
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


def _matyas(x: Tensor, y: Tensor) -> Tensor:
    return 0.26 * (x**2 + y**2) - 0.48 * x * y


def _rastrigin(x: Tensor, y: Tensor) -> Tensor:
    return 20 + x**2 - 10 * torch.cos(2 * math.pi * x) + y**2 - 10 * torch.cos(2 * math.pi * y)


def _ackley(x: Tensor, y: Tensor) -> Tensor:
    # The tiny number gives the square root a gradient at the minimum; it moves the value there by less than 1e-14.
    radius = torch.sqrt(0.5 * (x**2 + y**2) + 1e-30)
    waves = 0.5 * (torch.cos(2 * math.pi * x) + torch.cos(2 * math.pi * y))
    return -20 * torch.exp(-0.2 * radius) - torch.exp(waves) + math.e + 20


def _goldstein_price(x: Tensor, y: Tensor) -> Tensor:
    first = 1 + (x + y + 1) ** 2 * (19 - 14 * x + 3 * x**2 - 14 * y + 6 * x * y + 3 * y**2)
    second = 30 + (2 * x - 3 * y) ** 2 * (18 - 32 * x + 12 * x**2 + 48 * y - 36 * x * y + 27 * y**2)
    return first * second


def _three_hump_camel(x: Tensor, y: Tensor) -> Tensor:
    return 2 * x**2 - 1.05 * x**4 + x**6 / 6 + x * y + y**2


def _mccormick(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x + y) + (x - y) ** 2 - 1.5 * x + 2.5 * y + 1


def _sphere(x: Tensor, y: Tensor) -> Tensor:
    return x**2 + y**2


def _styblinski_tang(x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (x**4 - 16 * x**2 + 5 * x + y**4 - 16 * y**2 + 5 * y)


_HIMMELBLAU = ((3.0, 2.0), (-2.805118, 3.131312), (-3.779310, -3.283186), (3.584428, -1.848126))
_TANG = -2.90353402777118

SURFACES = {
    each.name: each
    for each in (
        Surface("beale", "Beale", _beale, ((3.0, 0.5),), 0.0, (-4.5, 4.5, -4.5, 4.5), (1.0, 1.5)),
        Surface("rosenbrock", "Rosenbrock", _rosenbrock, ((1.0, 1.0),), 0.0, (-2.0, 2.0, -1.0, 3.0), (-1.2, 1.0)),
        Surface("himmelblau", "Himmelblau", _himmelblau, _HIMMELBLAU, 0.0, (-5.0, 5.0, -5.0, 5.0), (-1.0, -1.0)),
        Surface("booth", "Booth", _booth, ((1.0, 3.0),), 0.0, (-10.0, 10.0, -10.0, 10.0), (-5.0, -5.0)),
        Surface("matyas", "Matyas", _matyas, ((0.0, 0.0),), 0.0, (-10.0, 10.0, -10.0, 10.0), (8.0, -4.0)),
        Surface("rastrigin", "Rastrigin", _rastrigin, ((0.0, 0.0),), 0.0, (-5.12, 5.12, -5.12, 5.12), (0.4, -0.35)),
        Surface("ackley", "Ackley", _ackley, ((0.0, 0.0),), 0.0, (-5.0, 5.0, -5.0, 5.0), (2.5, -1.5)),
        Surface(
            "goldstein-price", "Goldstein-Price", _goldstein_price, ((0.0, -1.0),), 3.0, (-2.0, 2.0, -2.0, 2.0),
            (-1.0, -1.5),
        ),
        Surface(
            "three-hump-camel", "Three-hump camel", _three_hump_camel, ((0.0, 0.0),), 0.0, (-5.0, 5.0, -5.0, 5.0),
            (0.8, 2.0),
        ),
        Surface(
            "mccormick", "McCormick", _mccormick, ((-0.547197551, -1.547197551),), -1.913222954981037,
            (-1.5, 4.0, -3.0, 4.0), (0.0, 1.0),
        ),
        Surface("sphere", "Sphere", _sphere, ((0.0, 0.0),), 0.0, (-5.0, 5.0, -5.0, 5.0), (4.0, -2.0)),
        Surface(
            "styblinski-tang", "Styblinski-Tang", _styblinski_tang, ((_TANG, _TANG),), -78.33233140754285,
            (-5.0, 5.0, -5.0, 5.0), (-0.5, -1.0),
        ),
    )
}  # fmt: skip
"""The test functions by name."""

BEALE_AS_PRINTED = Surface(
    "beale-as-printed", "Beale with its last exponent 3, as printed", _beale_as_printed, (), None,
    SURFACES["beale"].box, SURFACES["beale"].start,
)  # fmt: skip
"""Not a test function: its cube falls without end."""


def surface(name: str) -> Surface:
    """The surface of that name."""
    return BEALE_AS_PRINTED if name == BEALE_AS_PRINTED.name else SURFACES[name]
