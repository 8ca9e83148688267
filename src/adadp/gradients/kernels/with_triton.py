"""Every kernel in Triton, for CUDA.

Products are taken in TF32 where torch's own would be, for sequences and convolutions each by its own switch; a TF32
product cuts both its factors to ten bits, and is off by at most 2^-9 of what was multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adadp.gradients.kernels import reference, triton_rows
from adadp.gradients.kernels.reference import Sums
from adadp.gradients.kernels.triton_outer import outer_clamped
from adadp.gradients.kernels.triton_products import clamped, convolution_operands, norms
from adadp.gradients.kernels.triton_rows import dense_clamped, dense_norms, kept, products_norms, row_norms, weighted

if TYPE_CHECKING:
    from adadp.gradients.convolution import Geometry

__all__ = [
    "convolution_clamped", "convolution_norms", "dense_clamped", "dense_norms", "kept", "outer_clamped",
    "products_clamped", "products_norms", "row_norms", "weighted",
]  # fmt: skip


def products_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns]."""
    if outputs.shape[1] == 1:
        return outer_clamped(outputs[:, 0], inputs[:, 0], bound, moments)
    return triton_rows.products_clamped(outputs, inputs, bound, moments)


def convolution_clamped(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, bound: Tensor, moments: bool = False
) -> Sums:
    """Sums over the gradients g_n of a convolution's weight; bound has the weight's shape."""
    if len(geometry.kernel) > 2:
        return reference.convolution_clamped(outputs, inputs, geometry, bound, moments)
    return clamped(convolution_operands(outputs, inputs, geometry), bound, moments, _convolution_precision())


def convolution_norms(outputs: Tensor, inputs: Tensor, geometry: Geometry, scale: Tensor | None = None) -> Tensor:
    """Squared norms of the gradients of a convolution's weight, multiplied elementwise by `scale`; [n], float64."""
    if len(geometry.kernel) > 2:
        return reference.convolution_norms(outputs, inputs, geometry, scale)
    return norms(convolution_operands(outputs, inputs, geometry), scale, _convolution_precision())


def _convolution_precision() -> str:
    try:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    except RuntimeError:  # of some kinds of layers and not of others: bounds allow for it (`convolutions_are_cut`)
        return "tf32"
