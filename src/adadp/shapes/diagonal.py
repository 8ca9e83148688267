"""A second moment for every coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adadp.gradients.forms.per_example import PerExample
from adadp.shapes.shape import Shape, Statistics


class Diagonal(Shape):
    """A second moment for every coordinate: the paper's E'. Exponents (1/2, 0) give the paper's noise and step."""

    low_sensitivity = 1.0  # |g^2|_2 <= |g|_2^2

    def __init__(self, before: float = 0.5, after: float = 0.0, *, damping: float = 0.1) -> None:
        super().__init__(before, after, damping)
        self._squares: dict[str, Tensor] = {}
        self._powers: dict[tuple[str, float], Tensor] = {}  # made where they are first needed

    def mean_square(self, name: str, parameter: Tensor) -> Tensor:
        """Return E', the mean squared gradient of each coordinate; zero if nothing was learnt yet."""
        known = self._squares.get(name)
        return torch.zeros(parameter.shape, device=parameter.device) if known is None else known

    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        return {"square": form.square_sum(keep)}

    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        total = None
        for examples, gradients in form.chunks():
            weight = weights[examples].to(gradients.dtype).view(-1, *[1] * (gradients.ndim - 1))
            gradients = torch.where(weight != 0, gradients * weight, 0)
            term = gradients.square().sum(0)
            total = term if total is None else total + term
        return {"square": total if total is not None else torch.zeros(form.shape)}

    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        return {"square": torch.zeros(parameter.shape, device=parameter.device)}

    def moments_of(self, gradient: Tensor) -> Statistics:
        return {"square": gradient.square()}

    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        return {"square": self.apply(name, torch.ones_like(gradient) * stddev, self.before).square()}

    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        if statistics:
            squares = torch._foreach_clamp_min([found["square"] for found in statistics.values()], 0)
            self._squares |= zip(statistics, squares, strict=True)
            self._make([key for key in self._powers if key[0] in statistics])

    def _make(self, keys: Sequence[tuple[str, float]]) -> None:
        """Raise moments, scaled to mean 1 and damped, to exponents."""
        if keys:
            squares = [self._squares[name] for name, _ in keys]
            means = [square.mean().clamp_min(torch.finfo(square.dtype).tiny) for square in squares]
            scaled = torch._foreach_div(squares, means)
            torch._foreach_add_(scaled, self.damping)
            self._powers |= zip(keys, torch._foreach_pow(scaled, [exponent for _, exponent in keys]), strict=True)

    def _power(self, name: str, exponent: float) -> Tensor:
        key = (name, exponent)
        if key not in self._powers:
            self._make([key])
        return self._powers[key]

    def apply_before(self, name: str, form: PerExample) -> PerExample:
        if self.before == 0 or name not in self._squares:
            return form
        return form.scaled(self._power(name, -self.before))

    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        if exponent == 0 or name not in self._squares:
            return tensor
        return tensor * self._power(name, exponent).to(tensor.dtype)

    def deviations(self, name: str, like: Tensor, exponent: float) -> float | Tensor:
        if exponent == 0 or name not in self._squares:
            return 1.0
        squares = self._squares[name]
        return (squares / squares.mean().clamp_min(torch.finfo(squares.dtype).tiny) + self.damping) ** exponent
