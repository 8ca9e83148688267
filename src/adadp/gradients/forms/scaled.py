"""Gradients multiplied elementwise by one tensor: sum_n w_n (S * g_n) = S * sum_n w_n g_n, so they need not be made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.forms.dense import Unstored
from adadp.gradients.forms.factors import last_bit
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.rounding import bounded_factors, norms, unit_roundoff


class Scaled(Unstored):
    """Gradients multiplied elementwise, measured without being made; their sum is multiplied instead.

    Args:
        form: the gradients before they are multiplied.
        scale: of the parameter's shape, or of its shape as a matrix.
        measure: returns upper bounds on the squared norms of the products, [n].
        add: `weighted_sum` of what is not multiplied yet.
    """

    def __init__(
        self,
        form: PerExample,
        scale: Tensor,
        measure: Callable[[], Tensor],
        add: Callable[[Tensor, Tensor | None], Tensor],
    ) -> None:
        super().__init__(form.count, form.shape, form.planned)
        self.form, self.scale, self._measure, self._add = form, scale, measure, add

    @cached_property
    def _squared_norms(self) -> Tensor:
        return self._measure()

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return self._add(weights, keep) * self.scale.reshape(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return self.form.dense(examples) * self.scale.reshape(self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        return self.form.scaled(self.scale.reshape(self.shape) * scale.to(self.scale.dtype))


class ScaledVectors(Scaled):
    """Outer products b_n a_n^T multiplied elementwise by a matrix S.

    |S * b a^T|^2 = sum_ij S_ij^2 b_i^2 a_j^2 is a quadratic form in the squares of a and b: nothing is stored.

    Args:
        form: the outer products themselves.
        inputs: a, [n, columns].
        outputs: b, [n, rows].
        scale: S, of the parameter's shape.
    """

    def __init__(self, form: PerExample, inputs: Tensor, outputs: Tensor, scale: Tensor) -> None:
        super().__init__(form, scale, self._quadratic_form, form.weighted_sum)
        self._inputs, self._outputs = inputs, outputs

    def _quadratic_form(self) -> Tensor:
        inputs, outputs = self._inputs, self._outputs
        largest = self.scale.abs().amax().clamp_min(1e-30)
        weights = (self.scale / largest).view(outputs.shape[1], inputs.shape[1]).square()
        input_norms, output_norms = norms(inputs), norms(outputs)
        if inputs.is_cuda or inputs.dtype == torch.float64:
            bound = self._form_of_units(inputs, outputs, weights, input_norms, output_norms)
        else:
            # Two passes over the vectors less. Examples whose squares would vanish or overflow are done again, alone.
            if weights.shape[0] >= weights.shape[1]:
                bound = ((outputs.square() @ weights) * inputs.square()).sum(1)
            else:  # the longer side first: what is left to multiply is short
                bound = ((inputs.square() @ weights.T) * outputs.square()).sum(1)
            bound = bound.double() * (1 + self._summing)
            lengths = (1 + input_norms.square()) * (1 + output_norms.square())  # squares of steep scales vanish too
            bound += 2e-38 * sum(weights.shape) * lengths
            safe = ((input_norms > 1e-9) & (input_norms < 1e9)) & ((output_norms > 1e-9) & (output_norms < 1e9))
            rest = (~safe).nonzero().squeeze(1)
            if len(rest):
                exact = (self.scale.double() / largest.double()).view(weights.shape).square()
                bound[rest] = self._form_of_units(
                    inputs[rest].double(), outputs[rest].double(), exact, input_norms[rest], output_norms[rest]
                )
        return bounded_factors(bound * largest.double().square(), input_norms, output_norms)

    def _form_of_units(
        self, inputs: Tensor, outputs: Tensor, weights: Tensor, input_norms: Tensor, output_norms: Tensor
    ) -> Tensor:
        """The quadratic form of unit vectors, whose squares neither vanish nor overflow, times the norms."""
        input_norms, output_norms = input_norms.clamp_min(1e-150), output_norms.clamp_min(1e-150)
        inputs = (inputs / input_norms.unsqueeze(1)).to(inputs.dtype)
        outputs = (outputs / output_norms.unsqueeze(1)).to(outputs.dtype)
        form = ((outputs.square() @ weights.to(outputs.dtype)) * inputs.square()).sum(1)
        vanished = 2e-38 * sum(weights.shape)  # what squares of unit values can still hide
        rounding = self._summing + 8 * unit_roundoff(self._outputs)
        return (form.double() * (1 + rounding) + vanished) * (input_norms * output_norms).square()

    @property
    def _summing(self) -> float:
        """The relative error of the form: of its two sums, of terms that are not negative, and of a few products."""
        return (16 + sum(self.matrix)) * 2 * last_bit(self._outputs)
