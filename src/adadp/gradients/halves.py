"""Products of long sequences on a GPU, in half precision: twice as fast as TF32, and no less exact.

A TF32 product cuts each factor to eleven bits. So does float16, whose range is too small for gradients, but large
enough once each example has been scaled by a power of two of its own. What is cut is cut once: the norm is taken of the
same numbers that are then summed, so only the additions' rounding stands between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adadp.gradients.arithmetic import matmul_precision
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import Sums

FEWEST_TOKENS = 16  # of which matrix units multiply whole blocks
MOST_ENTRIES = 2**31 - 2**16  # of one example, which are counted in 32 bits


def may_be_halved(outputs: Tensor, inputs: Tensor) -> bool:
    """Whether the user lets products of these factors, [n, T, rows] and [n, T, columns], be cut to eleven bits."""
    tokens, rows, columns = outputs.shape[1], outputs.shape[2], inputs.shape[2]
    if not outputs.is_cuda or outputs.dtype != torch.float32 or tokens < FEWEST_TOKENS:
        return False
    small = max(rows * columns, 2 * tokens * max(rows, columns, 128)) <= MOST_ENTRIES
    return small and matmul_precision() != "highest"


class HalvedProducts:
    """g_n = sum_t b_nt a_nt^T for b `outputs` [n, T, rows] and a `inputs` [n, T, columns], both cut to float16.

    `lengths` are upper bounds on the norms of each example's two factors, each [n].
    """

    def __init__(self, outputs: Tensor, inputs: Tensor, lengths: tuple[Tensor, Tensor]) -> None:
        self._factors = [
            kernel("halves", outputs)(factor, length)
            for factor, length in zip((outputs, inputs), lengths, strict=True)
        ]
        self._kernels = {name: kernel(f"halves_{name}", outputs) for name in ("bounds", "sum", "clamped")}
        # Matrix units cut what they add to about the last bit of the largest, sixteen terms at a time; once where norms
        # are taken and once where sums are. All partial sums are bounded by |a| |b|.
        self._rounding = (16 + 5 * outputs.shape[1]) * 2.0**-24

    def squared_norms(self, scale: Tensor | None = None) -> Tensor:
        """Upper bounds on the squared norms of g_n times `scale` [rows, columns] elementwise; [n], float64."""
        bounds: Tensor = self._kernels["bounds"](*self._factors, self._rounding, scale)
        return bounds

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total: Tensor = self._kernels["sum"](*self._factors, weights, keep)
        return total

    def clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        sums: Sums = self._kernels["clamped"](*self._factors, scale, keep, bound, moments)
        return sums
