"""An L2 ball whose radius follows a quantile of the gradients' norms (Andrew et al. 2021, "Differentially Private
Learning with Adaptive Clipping")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from adadp.clipping.base import register
from adadp.clipping.flat import Flat, PositiveNumber, positive
from adadp.clipping.shaped import STATISTIC
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.paid import split_noise
from adadp.shapes.source import ModelGradients

#: What one example adds to the count, in absolute value: +1/2 where its norm is within the bound, -1/2 where it is not.
#: Counting 1 and 0 would have twice the sensitivity.
HALF = 0.5


@register("adaptive")
class Adaptive(Flat):
    """Clips as `Flat` does, with a bound C that moves until a given part of the examples is left unclipped.

    Each lot releases one number more than its gradient: how many examples were within C, noised. After the lot, C is
    multiplied by exp(-rate * (that part - quantile)). Gradients that are not finite are not counted.

    Args:
        max_grad_norm: C for the first lot. As an attribute, the bound of the lot that comes next.
        quantile: the part of the examples whose norms should be within C.
        rate: how fast C moves. By 0.2, a lot in which nobody is clipped makes C a tenth smaller (at quantile 0.5).
        share: part of the step's 1/sigma^2 that the count takes. With 0.01, the gradient gets half a percent more
            noise, and the count noise of standard deviation 5 sigma.
        least: the smallest that C may become.
        most: the largest.

    Guarantee:
        C is fixed before a lot is looked at, and follows from released counts alone. In a lot, an example adds at most
        1/2 to the count, as +1/2 or -1/2, and at most C to the gradient. The gradient's radius is C / sqrt(1 - share)
        and the count's (1/2) / sqrt(share), so that both together have length at most 1: with sigma_b the standard
        deviation of the count's noise, 1/sigma^2 = 1/sigma_gradient^2 + 1/(2 sigma_b)^2. The lot stays one event of
        noise multiplier sigma.

    """

    rate, least, most = PositiveNumber(), PositiveNumber(), PositiveNumber()

    def __init__(
        self,
        max_grad_norm: float = 1.0,
        *,
        quantile: float = 0.5,
        rate: float = 0.2,
        share: float = 0.01,
        least: float = 1e-6,
        most: float = 1e6,
    ) -> None:
        # A tensor, so that no GPU is waited for and a recorded step can go on from what the last one left.
        self._bound = torch.zeros((), dtype=torch.float64)
        super().__init__(max_grad_norm)
        self.quantile, self.share = part("quantile", quantile), part("share", share)
        self.rate, self.least, self.most = rate, least, most
        if not self.least <= self.max_grad_norm <= self.most:
            raise ConfigurationError(
                f"max_grad_norm must be between least and most, not {max_grad_norm!r} outside [{least!r}, {most!r}]"
            )

    @property
    def max_grad_norm(self) -> float:
        """The bound: of the lot that is out, or else of the next one."""
        return float(self._bound)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if self.parameters:
            raise ConfigurationError(
                "adaptive clipping sets its bound itself, from what each lot releases: give max_grad_norm where the "
                'clipping is made, or use clipping="flat", whose bound may be changed between lots'
            )
        self._bound = torch.tensor(positive("max_grad_norm", value), dtype=torch.float64)

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        for parameter in self.parameters.values():
            self._bound = self._bound.to(parameter.device)
            return

    def _radius(self) -> Tensor:
        return self._bound

    @property
    def _count(self) -> str:
        """The count's key in the sums: a statistic of the first parameter, so that `Grouped` finds whose it is."""
        return f"{STATISTIC}{next(iter(self.parameters))}/unclipped"

    def bound(self, gradients: Gradients) -> BoundedSums:
        weights = self.weights(gradients)
        sums = self._sums(gradients, weights)
        if self.parameters:
            signs = torch.where(weights == 1.0, HALF, -HALF)
            like = self._zeros(next(iter(self.parameters)))
            sums[self._count] = torch.where(weights > 0.0, signs, 0.0).sum().to(like.dtype)
        return sums

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        gradient, count = split_noise(scale, self.share)
        found: dict[str, float | Tensor] = dict.fromkeys(self.parameters, gradient * self._radius())
        if self.parameters:
            found[self._count] = count * HALF
        return found

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        if self.parameters:
            # The expected lot, never the realised one: how many were drawn is private.
            unclipped = HALF + noisy.pop(self._count).double() / self.expected_lot
            moved = self._bound * torch.exp(-self.rate * (unclipped - self.quantile))
            self._bound = moved.clamp(self.least, self.most)
        return ReleasedGradient(noisy)


def part(name: str, value: float) -> float:
    """`value`, a part of the whole, between 0 and 1; raises where it is not."""
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and 0 < value < 1):
        raise ConfigurationError(f"{name} must be between 0 and 1, not {value!r}")
    return float(value)
