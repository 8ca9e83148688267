"""Every kernel in Triton, for CUDA.

Products are taken in TF32 where torch's own would be, for sequences and convolutions each by its own switch; a TF32
product cuts both its factors to ten bits, and is off by at most 2^-9 of what was multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adadp.gradients.kernels import reference, triton_outer, triton_rows
from adadp.gradients.kernels.reference import MOST_ENTRIES, Plan, Sums
from adadp.gradients.kernels.triton_bounds import bounds
from adadp.gradients.kernels.triton_half_precision import (
    alike_halves,
    halves,
    halves_bounds,
    halves_clamped,
    halves_sum,
)
from adadp.gradients.kernels.triton_normalized import group_norm_sums, layer_norm_sums
from adadp.gradients.kernels.triton_products import clamped, convolution_operands, norms
from adadp.gradients.kernels.triton_rows import alike_norms, kept, row_norms, weighted

if TYPE_CHECKING:
    from adadp.gradients.layers.convolution import Geometry

__all__ = [
    "alike_halves", "alike_norms", "convolution_bounds", "convolution_clamped", "convolution_norms", "dense_clamped",
    "dense_norms", "group_norm_sums", "halves", "halves_bounds", "halves_clamped", "halves_sum", "kept",
    "layer_norm_sums", "outer_clamped", "products_clamped", "products_norms", "row_norms", "weighted",
]  # fmt: skip


def outer_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False, planned: Plan = None) -> Sums:
    """Sums over g_n = b_n a_n^T for b [n, rows], a [n, columns], bound [rows, columns]."""
    if bound.numel() > MOST_ENTRIES:
        return reference.outer_clamped(outputs, inputs, bound, moments)
    return triton_outer.outer_clamped(outputs, inputs, bound, moments, planned=planned)


def dense_clamped(gradients: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over the gradients [n, *shape] of examples, bound of that shape."""
    if bound.numel() > MOST_ENTRIES:
        return reference.dense_clamped(gradients, bound, moments)
    return triton_rows.dense_clamped(gradients, bound, moments)


def dense_norms(gradients: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of gradients [n, ...], multiplied elementwise by `scale`; [n], float64."""
    if math.prod(gradients.shape[1:]) > MOST_ENTRIES:
        return reference.dense_norms(gradients, scale)
    return triton_rows.dense_norms(gradients, scale)


def products_norms(outputs: Tensor, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of `sum_t b_nt a_nt^T`, multiplied elementwise by `scale` [rows, columns]; [n], float64."""
    if outputs.shape[2] * inputs.shape[2] > MOST_ENTRIES:
        return reference.products_norms(outputs, inputs, scale)
    return triton_rows.products_norms(outputs, inputs, scale)


def products_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns]."""
    if bound.numel() > MOST_ENTRIES:
        return reference.products_clamped(outputs, inputs, bound, moments)
    if outputs.shape[1] == 1:
        return outer_clamped(outputs[:, 0], inputs[:, 0], bound, moments)
    return triton_rows.products_clamped(outputs, inputs, bound, moments)


def convolution_clamped(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, bound: Tensor, moments: bool = False, planned: Plan = None
) -> Sums:
    """Sums over the gradients g_n of a convolution's weight; bound has the weight's shape."""
    if len(geometry.kernel) > 2 or math.prod(geometry.weight) > MOST_ENTRIES:
        return reference.convolution_clamped(outputs, inputs, geometry, bound, moments)
    operands = convolution_operands(outputs, inputs, geometry, planned)
    return clamped(operands, bound, moments, _convolution_precision())


def convolution_norms(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, scale: Tensor | None = None, planned: Plan = None
) -> Tensor:
    """Squared norms of the gradients of a convolution's weight, multiplied elementwise by `scale`; [n], float64."""
    if len(geometry.kernel) > 2 or math.prod(geometry.weight) > MOST_ENTRIES:
        return reference.convolution_norms(outputs, inputs, geometry, scale)
    return norms([convolution_operands(outputs, inputs, geometry, planned)], scale, _convolution_precision()).sum(1)


def convolution_bounds(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], geometry: Geometry, lengths: tuple[Tensor, Tensor],
    rounding: float, scale: Tensor | None = None, planned: Plan = None,
) -> Tensor:  # fmt: skip
    """Upper bounds on the squares that `convolution_norms` returns; [n], float64; of several, one's after the other's.

    At most `MOST_ALIKE` outputs and inputs, each alike in shape. See `reference.convolution_bounds`.
    """
    if len(geometry.kernel) > 2 or math.prod(geometry.weight) > MOST_ENTRIES:
        return reference.convolution_bounds(outputs, inputs, geometry, lengths, rounding, scale, planned)
    operands = [convolution_operands(*pair, geometry, planned) for pair in zip(outputs, inputs, strict=True)]
    found = norms(operands, scale, _convolution_precision())
    largest = None if scale is None else scale.abs().amax()
    return bounds(found, lengths, 2.0**-22, rounding, far=math.sqrt(math.prod(geometry.kernel)), largest=largest)


def _convolution_precision() -> str:
    try:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    except RuntimeError:  # of some kinds of layers and not of others: bounds allow for it (`convolutions_are_cut`)
        return "tf32"
