"""One L2 ball over all parameters."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from adadp.clipping.base import Clipping, register
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.gradients.rounding import accumulation_dtype
from adadp.mechanism.sums import BoundedSums


def positive(name: str, value: float) -> float:
    """Return a setting as a float.

    Raises:
        ConfigurationError: it is not a finite number above 0.

    """
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)


class PositiveNumber:
    """A setting that is a finite number above 0 whenever it is set, kept as a Python float.

    A step compares settings to see whether they were changed within a lot; tensors could be changed in place.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, kind: type | None = None) -> float:
        if holder is None:
            raise AttributeError(self._name)  # only objects have it
        return float(vars(holder)[self._name])

    def __set__(self, holder: Any, value: float) -> None:
        vars(holder)[self._name] = positive(self._name, value)


@register("flat")
class Flat(Clipping):
    """Scales each example's gradient g into an L2 ball over all parameters: g * min(1, C / |g|). DPSGD's clipping.

    Args:
        max_grad_norm: C, the radius of the ball.

    Guarantee:
        The sums' L2 sensitivity is C if one example is added or removed, 2C if one is replaced.

    """

    max_grad_norm = PositiveNumber()

    def __init__(self, max_grad_norm: float = 1.0) -> None:
        super().__init__()
        self.max_grad_norm = max_grad_norm

    def steady(self, begun: bool = False) -> bool:
        return True

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        return dict.fromkeys(self.parameters, scale * self._radius())

    def _radius(self) -> float | Tensor:
        """The ball's radius; a tensor where it follows releases."""
        return self.max_grad_norm

    def norm_bound(self) -> float | Tensor:
        return self._radius()

    def bound(self, gradients: Gradients) -> BoundedSums:
        return self._sums(gradients, self.weights(gradients))

    def weights(self, gradients: Gradients) -> Tensor:
        """Factor for each example's gradient, [n]; 0 where it is not finite or not kept."""
        # A subclass, or one whose source looks at the gradients, may ask for more than sums.
        factors = self._factor(gradients.norms(let_go=type(self) in (Flat, Automatic)))
        # Below the smallest normal number a factor is rounded by up to a third. So a gradient that needs such a factor
        # is treated like one that is not finite, whose factor is zero or NaN.
        sure = factors * min(gradients.scale, 1.0) >= self._least_factor()
        return torch.where(sure & gradients.keep, factors, 0.0)

    def _factor(self, lengths: Tensor) -> Tensor:
        """Factor for gradients of these lengths: 0 for infinite, NaN for NaN."""
        return (self._shrunk(self._radius()) / lengths).clamp(max=1.0)

    def _sums(self, gradients: Gradients, weights: Tensor) -> BoundedSums:
        """Sum gradients times `weights` [n]; zero for parameters that no gradient came to."""
        sums = gradients.only(self.parameters).weighted_sums(weights)
        return BoundedSums({name: sums[name] if name in sums else self._zeros(name) for name in self.parameters})

    def _zeros(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return torch.zeros(parameter.shape, dtype=accumulation_dtype(parameter.dtype), device=parameter.device)

    def _exact(self) -> bool:
        return all(parameter.dtype == torch.float64 for parameter in self.parameters.values())

    def _shrunk(self, bound: float | Tensor) -> float | Tensor:
        """A little less than the bound, so that rounding in the sum cannot carry an example outside it."""
        return bound * (1 - (2.0**-44 if self._exact() else 2.0**-20))

    def _least_factor(self) -> float:
        return 4 * float(torch.finfo(torch.float64 if self._exact() else torch.float32).tiny)


@register("automatic")
class Automatic(Flat):
    """Normalises instead of clipping: g * C / (|g| + gamma). There is no bound to tune: C only scales the step.

    Guarantee:
        As for `Flat`: the factor keeps every gradient inside the ball of radius C.

    """

    gamma = PositiveNumber()

    def __init__(self, max_grad_norm: float = 1.0, *, gamma: float = 0.01) -> None:
        super().__init__(max_grad_norm)
        self.gamma = gamma

    def _factor(self, lengths: Tensor) -> Tensor:
        return self._shrunk(self.max_grad_norm) / (lengths + self.gamma)
