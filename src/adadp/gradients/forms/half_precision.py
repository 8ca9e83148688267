"""Products of long sequences on a GPU, in half precision: twice as fast as TF32, and no less exact.

A TF32 product truncates each factor to eleven bits. So does float16, whose range is too small for gradients, but large
enough once each example has been scaled by a power of two of its own. The factors are truncated once, and the norm is
taken of the same numbers that are then summed: the two differ by the rounding of additions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

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


class HalvedProducts(Unstored):
    """g_n = sum_t b_nt a_nt^T for factors that were truncated to float16; every result is of these products.

    Args:
        outputs: b, [n, T, rows].
        inputs: a, [n, T, columns].
        lengths: upper bounds on the norms of each example's two factors, each [n].
        shape, planned: see `PerExample`.
    """

    def __init__(
        self, outputs: Tensor, inputs: Tensor, lengths: tuple[Tensor, Tensor], shape: Sequence[int], planned: int
    ) -> None:
        super().__init__(len(outputs), shape, planned)
        self._like = outputs.new_empty(0)
        cut = kernel("halves", outputs)
        self._factors: tuple[Float16Factor, Float16Factor] = (
            cut(outputs, lengths[0], planned),
            cut(inputs, lengths[1], planned),
        )
        # Matrix units cut what they add to about the last bit of the largest, sixteen terms at a time; once where norms
        # are taken and once where sums are. All partial sums are bounded by |a| |b|.
        self._rounding = (16 + 5 * outputs.shape[1]) * 2.0**-24

    def _bounds(self, scale: Tensor | None) -> Tensor:
        """Upper bounds on the squared norms of g_n times `scale` [rows, columns] elementwise; [n], float64."""
        bounds: Tensor = kernel("halves_bounds", self._like)(*self._factors, self._rounding, scale)
        return bounds

    @cached_property
    def _squared_norms(self) -> Tensor:
        return self._bounds(None)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total: Tensor = kernel("halves_sum", self._like)(*self._factors, weights, keep)
        return total.view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return halves_dense(*self._factors, examples).view(-1, *self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        factor = scale.to(self._like.dtype)
        return Scaled(self, factor, lambda: self._bounds(factor.reshape(self.matrix)), self.weighted_sum)

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        limit = bound.reshape(self.matrix).to(self._like.dtype)
        total, squares = kernel("halves_clamped", self._like)(*self._factors, scale, keep, limit, moments)
        return total.view(self.shape), None if squares is None else squares.view(self.shape)

    def _square_sum(self, keep: Tensor) -> Tensor:
        # Clamped to nothing: it is the same pass.
        _, squares = self._clamped_sums(self._like.new_zeros(self.shape), 1.0, keep, moments=True)
        assert squares is not None
        return squares
