"""Products of long sequences on a GPU, in half precision: twice as fast as TF32, and no less exact.

A TF32 product truncates each factor to eleven bits. So does float16, whose range is too small for gradients, but large
enough once each example has been scaled by a power of two of its own. The factors are truncated once, and the norm is
taken of the same numbers that are then summed: the two differ by the rounding of additions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adadp.gradients.forms.dense import Unstored
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.scaled import Scaled
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import MOST_ENTRIES, Float16Factor, Sums, halves_dense
from adadp.gradients.rounding import matmul_precision

FEWEST_TOKENS = 16  # of which matrix units multiply whole blocks


def may_be_halved(outputs: Tensor, inputs: Tensor) -> bool:
    """Whether products of these factors, [n, T, rows] and [n, T, columns], may be truncated to eleven bits.

    That is the user's choice (`torch.set_float32_matmul_precision`).
    """
    tokens, rows, columns = outputs.shape[1], outputs.shape[2], inputs.shape[2]
    if not outputs.is_cuda or outputs.dtype != torch.float32 or tokens < FEWEST_TOKENS:
        return False
    small = rows * columns > 0 and max(rows * columns, 2 * tokens * max(rows, columns, 128)) <= MOST_ENTRIES
    return small and matmul_precision() != "highest"


class Halves:
    """Both factors of several parameters' products, cut to float16: [parameters * n, T, rows] and columns.

    Args:
        outputs: b of each parameter, [n, T, rows]; alike in shape, strides and device.
        inputs: a of each, [n, T, columns]; likewise.
        lengths: upper bounds on the norms of each example's two factors, each [n], by parameter.
        planned: see `PerExample`.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], lengths: Sequence[Sequence[Tensor]], planned: int
    ) -> None:
        self.like = outputs[0].new_empty(0)
        cut = kernel("alike_halves", self.like)
        left, right = (torch.cat(norms) for norms in zip(*lengths, strict=True))
        self.factors: tuple[Float16Factor, Float16Factor] = cut(outputs, left, planned), cut(inputs, right, planned)
        # Matrix units cut what they add to about the last bit of the largest, sixteen terms at a time; once where norms
        # are taken and once where sums are. All partial sums are bounded by |a| |b|.
        self.rounding = (16 + 5 * outputs[0].shape[1]) * 2.0**-24
        self.count = len(outputs)

    @cached_property
    def squared_norms(self) -> Sequence[Tensor]:
        """Upper bounds on the squared norms of each parameter's gradients, each [n] in float64."""
        bounds: Tensor = kernel("halves_bounds", self.like)(*self.factors, self.rounding, None)
        return bounds.view(self.count, -1).unbind()

    def weighted_sums(self, weights: Tensor, keep: Tensor | None) -> Sequence[Tensor]:
        """The weighted sum of each parameter's gradients, each [rows, columns]."""
        total: Tensor = kernel("halves_sum", self.like)(*self.factors, weights, keep)
        return total.unbind() if self.count > 1 else [total]


class HalvedProducts(Unstored):
    """g_n = sum_t b_nt a_nt^T for factors that were truncated to float16; every result is of these products.

    Args:
        group: the factors of this parameter and others, with which norms and sums are computed.
        place: which of the group this is.
        like: the form whose factors they were.
    """

    def __init__(self, group: Halves, place: int, like: PerExample) -> None:
        super().__init__(like.count, like.shape, like.planned)
        self.group, self.place = group, place

    @cached_property
    def _factors(self) -> tuple[Float16Factor, Float16Factor]:
        outputs, inputs = self.group.factors
        return outputs.of(self.place), inputs.of(self.place)

    def _kernel(self, name: str) -> Callable[..., Any]:
        return kernel(name, self.group.like)

    def squared_norms(self) -> Tensor:
        return self.group.squared_norms[self.place]

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total: Tensor = self._kernel("halves_sum")(*self._factors, weights, keep)
        return total.view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return halves_dense(*self._factors, examples).view(-1, *self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        factor = scale.to(self.group.like.dtype)

        def measure() -> Tensor:
            bounds: Tensor = self._kernel("halves_bounds")(
                *self._factors, self.group.rounding, factor.reshape(self.matrix)
            )
            return bounds

        return Scaled(self, factor, measure, self.weighted_sum)

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        limit = bound.reshape(self.matrix).to(self.group.like.dtype)
        total, squares = self._kernel("halves_clamped")(*self._factors, scale, keep, limit, moments)
        return total.view(self.shape), None if squares is None else squares.view(self.shape)

    def _square_sum(self, keep: Tensor) -> Tensor:
        # Clamped to nothing: it is the same pass.
        _, squares = self._clamped_sums(self.group.like.new_zeros(self.shape), 1.0, keep, moments=True)
        assert squares is not None
        return squares
