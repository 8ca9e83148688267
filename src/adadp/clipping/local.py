"""The paper's clipping: an interval for each coordinate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from adadp.clipping.base import Clipping, register
from adadp.clipping.flat import PositiveNumber
from adadp.clipping.shaped import Shaped
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums
from adadp.shapes.diagonal import Diagonal
from adadp.shapes.raw import Raw
from adadp.shapes.source import ModelGradients, Source

#: Bounds below this share of the largest one are zero. The gradient of such a coordinate is what rounding leaves where
#: its terms cancel (the bias of attention's keys), and the rounding of every example may change when one is removed.
SMALLEST_BOUND = 2.0**-20


@register("local")
class Local(Shaped):
    """The paper's box: coordinate i is clamped to +-s_i, s_i = beta * sqrt(E'_i), and noised with sigma s_i sqrt(m).

    Until the variance of sqrt(E') over coordinates exceeds `threshold`, gradients are clipped as by `Flat`; then the
    box stays on (the paper does not say whether it may go off again).

    Args:
        max_grad_norm: the radius of the ball that is used before the box.
        beta: s_i in units of sqrt(E'_i).
        threshold: the variance of sqrt(E') that switches the box on.
        source: where E' comes from; by default `Raw`, as in the paper, which no proof covers.

    Guarantee:
        With m coordinates the radii are s_i sqrt(m): even an example at its bound in every coordinate has
        sum_i s_i^2 / (s_i sqrt(m))^2 = 1. A coordinate with s_i = 0 contributes nothing and gets no noise. So does one
        with an s_i as small as rounding (`SMALLEST_BOUND`): noise of that size would not cover rounding. Gradients may
        be clamped while the backward pass runs (`adadp.clipping.early`), with the same sums for finite examples. One
        that is not finite in a later layer has then already added at most its bound.

    """

    beta = PositiveNumber()

    def __init__(
        self,
        max_grad_norm: float = 4.0,
        *,
        beta: float = 1.2,
        threshold: float = 1e-6,
        source: Source | None = None,
    ) -> None:
        # The shape only keeps the moments E': its exponents are not used.
        super().__init__(max_grad_norm, Diagonal(0.0, 0.0), source if source is not None else Raw())
        self.beta = beta
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ConfigurationError(f"threshold must be a finite number of at least 0, not {threshold!r}")
        self.threshold = threshold
        self.local = False
        self.bounds: dict[str, Tensor] = {}

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        assert isinstance(self.shape, Diagonal)
        self.bounds = {}
        if not self.parameters:
            return
        roots = torch._foreach_sqrt([self.shape.mean_square(name, value) for name, value in self.parameters.items()])
        if not self.local:
            # The host waits for this value until the box is on, and never again.
            self.local = bool(torch.cat([root.flatten() for root in roots]).var(correction=0) > self.threshold)
        torch._foreach_mul_(roots, _counted(roots))
        self.bounds = dict(zip(self.parameters, torch._foreach_mul(roots, self.beta), strict=True))

    def norm_bound(self) -> float | Tensor:
        return Clipping.norm_bound(self)  # refused: a box has a bound for each coordinate, and they change

    def steady(self, begun: bool = False) -> bool:
        return self.local and super().steady(begun)

    def _bounded(self, gradients: Gradients) -> BoundedSums:
        if not self.local:
            return self._sums(gradients, self.weights(gradients))
        sums = gradients.clamped_sums(self.bounds, self.source.looks)
        return BoundedSums({name: sums[name] if name in sums else self._zeros(name) for name in self.bounds})

    def _gradient_radii(self, scale: float) -> dict[str, float | Tensor]:
        if not self.local:
            return super()._gradient_radii(scale)
        coordinates = sum(bound.numel() for bound in self.bounds.values())
        widths = torch._foreach_mul(list(self.bounds.values()), scale * math.sqrt(coordinates))
        return dict(zip(self.bounds, widths, strict=True))


def _counted(roots: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return 1 for each root that is more than rounding and 0 for the others, on the device."""
    largest = torch.stack(torch._foreach_norm([root for root in roots if root.numel()], math.inf)).max()
    smallest = largest.clamp_max(torch.finfo(largest.dtype).max) * SMALLEST_BOUND
    return torch._foreach_clamp_min(torch._foreach_sign(torch._foreach_add(roots, smallest, alpha=-1)), 0)
