"""Each example's product of two matrices of half precision, measured, weighted or clamped as it leaves the registers.

The gradient of example n is g_n = sum_t b_nt a_nt^T. Factors come as float16 times a power of two for each example
(`halves`), padded with zeros to whole tiles: no load needs a mask. Hopper's matrix units take them as they lie in
memory, whichever index runs fastest, which they do of 16-bit values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import Float16Factor, Plan, Sums
from adadp.gradients.kernels.triton_bounds import bounds
from adadp.gradients.kernels.triton_launch import launch, one_or_most
from adadp.gradients.kernels.triton_rows import chosen
from adadp.gradients.kernels.triton_splits import cdiv, next_power_of_2, programs_per_tile, whole

TOKENS = 32  # every example has a multiple of these, the others being zero
SIDE = 128  # the largest side of a tile


class TokenBlocks(NamedTuple):
    """How a program goes through tokens. A tile's sides follow from the matrix (`side`)."""

    tokens: int
    warps: int
    stages: int


# Measured on an H200, 256 tokens, 768 to 3072 rows and columns. Clamping keeps bounds and squares in registers too.
MEASURED = TokenBlocks(32, 4, 3)
CLAMPED = TokenBlocks(32, 8, 4)


@cache
def side(length: int) -> int:
    """Of a tile, along a side of the matrix of `length`."""
    return int(min(SIDE, max(16, next_power_of_2(length))))


@cache
def padded(length: int) -> int:
    """`length` up to whole tiles."""
    return int(cdiv(length, side(length)) * side(length))


def halves(tensor: Tensor, norms: Tensor, planned: Plan = None) -> Float16Factor:
    """`tensor` [n, T, d] in float16, scaled by example so that the norm [n], at least each entry, is below 2^15.

    An example whose norm is not finite is zero.
    """
    return alike_halves([tensor], norms, planned)


def alike_halves(tensors: Sequence[Tensor], norms: Tensor, planned: Plan = None) -> Float16Factor:
    """Of tensors that are alike (see `alike_norms`), whose examples follow each other in `norms`."""
    count, tokens, size = tensors[0].shape
    height, width = cdiv(tokens, TOKENS) * TOKENS, padded(size)
    values = torch.empty(len(norms), height, width, dtype=torch.float16, device=norms.device)
    unit = torch.empty(len(norms), dtype=torch.float32, device=norms.device)
    if values.numel():
        some = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in tensors]
        launch(
            _halve, len(norms) * (height // TOKENS) * (width // side(size)),
            one_or_most(some), norms, values, unit, count, tokens, size, height, some[0].stride(0), some[0].stride(1),
            TOKENS=TOKENS, COLUMNS=side(size), num_warps=4,
        )  # fmt: skip
    return Float16Factor(values, unit, norms, size, planned, len(tensors))


@triton.jit(do_not_specialize=["count"])
def _halve(
    tensors, norms, values, unit, count, tokens, size, height, example_stride, token_stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(size, COLUMNS)
    down = height // TOKENS
    example = (tl.program_id(0) // (across * down)).to(tl.int64)
    tile = tl.program_id(0) % (across * down)
    token = tile // across * TOKENS + tl.arange(0, TOKENS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    norm = tl.load(norms + example).to(tl.float32)
    # Its exponent: norm < 2^(exponent + 1), whichever way it was rounded. Far below, powers of two end.
    exponent = tl.maximum((norm.to(tl.int32, bitcast=True) >> 23) - 127, -112)
    finite = norm < float("inf")
    tensor = chosen(tensors, tl.program_id(0) // (across * down) // count)
    up = ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)
    inside = (token < tokens)[:, None] & (column < size)[None, :]
    value = tl.load(
        tensor + example % count * example_stride + token.to(tl.int64)[:, None] * token_stride + column[None, :],
        mask=inside,
        other=0.0,
    )
    place = (example * height + token)[:, None] * (across * COLUMNS) + column[None, :]
    tl.store(values + place, tl.where(finite, value * up, 0.0).to(tl.float16))
    if tile == 0:
        down_again = ((127 - 14 + exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(unit + example, tl.where(finite, down_again, 0.0))


def halves_bounds(
    outputs: Float16Factor, inputs: Float16Factor, rounding: float, scale: Tensor | None = None
) -> Tensor:
    """Upper bounds on |g_n * scale|^2 for each example, `scale` of [rows, columns]; [n], float64.

    Sums may be off by `rounding` times the product of both factors' norms. Where one of these is too large to be
    weighted, the bound is infinite. Squares of a tile's entries, scaled by at most 1, are added in float32 (relative
    error below 2^-15), where none of them overflows; tiles in float64.
    """
    found = torch.empty(len(outputs.unit), _tiles(outputs, inputs), dtype=torch.float32, device=outputs.unit.device)
    largest = None if scale is None else torch.linalg.vector_norm(scale, math.inf)
    if len(found):
        factor = found if scale is None else scale.contiguous()
        shared = _splits(outputs, inputs, MEASURED, sums=0)
        _launch(outputs, inputs, MEASURED, shared, factor, found if largest is None else largest, outputs.unit,
                found, found, found, KIND="norms", SCALED=scale is not None)  # fmt: skip
    return bounds(
        found, (outputs.norms, inputs.norms), 2.0**-16, rounding, largest=largest, units=(outputs.unit, inputs.unit)
    )


def halves_sum(outputs: Float16Factor, inputs: Float16Factor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """`sum_n weights[n] g_n` over the kept examples; [rows, columns], of several parameters [parameters, ...]."""
    shared = _splits(outputs, inputs, MEASURED, sums=1)
    sums = _room(outputs, inputs, shared[0])
    kept = weights if keep is None else keep
    _launch(outputs, inputs, MEASURED, shared, sums, weights, kept, sums, sums, sums,
            KIND="sum", KEPT=keep is not None)  # fmt: skip
    several = outputs.parameters
    return whole(sums) if several == 1 else whole(sums.view(several, -1, *sums.shape[1:]).transpose(0, 1))


def halves_clamped(
    outputs: Float16Factor, inputs: Float16Factor, scale: float, keep: Tensor, bound: Tensor, moments: bool = False
) -> Sums:
    """Clamped sums of `scale * g_n` over the kept examples; bound [rows, columns]."""
    shared = _splits(outputs, inputs, CLAMPED, sums=1 + moments)
    sums = _room(outputs, inputs, shared[0])
    squares = torch.empty_like(sums) if moments else sums
    limit = bound.contiguous()
    _launch(outputs, inputs, CLAMPED, shared, limit, limit, keep, sums, squares, sums,
            scale=scale, KIND="clamped", KEPT=True, MOMENTS=moments)  # fmt: skip
    return whole(sums), whole(squares) if moments else None


def _room(outputs: Float16Factor, inputs: Float16Factor, splits: int) -> Tensor:
    shape = outputs.parameters * splits, outputs.size, inputs.size
    return torch.empty(shape, dtype=torch.float32, device=outputs.unit.device)


def _tiles(outputs: Float16Factor, inputs: Float16Factor) -> int:
    return padded(outputs.size) // side(outputs.size) * (padded(inputs.size) // side(inputs.size))


def _splits(outputs: Float16Factor, inputs: Float16Factor, blocks: TokenBlocks, sums: int) -> tuple[int, int]:
    """For so many sums of the matrix's size. What was cut is kept too, and in float32 as they are.

    Sums of several parameters are several times the tiles. Norms need not know whose example is whose.
    """
    tokens, rows, columns = outputs.values.shape[1], outputs.size, inputs.size
    tiles, several, planned = _tiles(outputs, inputs), outputs.parameters, outputs.planned
    count = len(outputs.unit) // several
    if not sums:
        count, planned = count * several, None if planned is None else planned * several
    return programs_per_tile(
        tiles * several if sums else tiles, max(1, count), blocks.warps, 1, 1, outputs.unit.device,
        planned=planned, kept=tokens * (rows + columns), part=sums * rows * columns,
    )  # fmt: skip


def _launch(
    outputs: Float16Factor, inputs: Float16Factor, blocks: TokenBlocks, shared: tuple[int, int],
    matrix: Tensor, weights: Tensor, keep: Tensor, sums: Tensor, squares: Tensor, found: Tensor, *, scale: float = 1.0,
    KIND: str, SCALED: bool = False, KEPT: bool = False, MOMENTS: bool = False,
) -> None:  # fmt: skip
    splits, each = shared
    several = 1 if KIND == "norms" else outputs.parameters
    launch(
        _products, _tiles(outputs, inputs) * splits * several,
        outputs.values, inputs.values, outputs.unit, inputs.unit, matrix, weights.contiguous(), keep.contiguous(),
        sums, squares, found, float(scale), len(outputs.unit) // several, each, splits,
        outputs.size, inputs.size, outputs.values.shape[1],
        KIND=KIND, SCALED=SCALED, KEPT=KEPT, MOMENTS=MOMENTS,
        ROWS=side(outputs.size), COLUMNS=side(inputs.size), TOKENS=blocks.tokens,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["examples", "each", "splits", "scale"])  # lots vary: one kernel for all of them
def _products(
    outputs, inputs, output_unit, input_unit, matrix, weights, keep, sums, squares, found, scale,
    examples, each, splits, rows, columns, tokens,
    KIND: tl.constexpr, SCALED: tl.constexpr, KEPT: tl.constexpr, MOMENTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) % (down * across)
    part = tl.program_id(0) // (down * across)  # of a parameter's sum; parameters follow each other
    split = part % splits
    first = tl.cast(part // splits, tl.int64) * examples
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    entry = row[:, None] * columns + column[None, :]
    if KIND == "clamped" or SCALED:
        factor = tl.load(matrix + entry, mask=inside, other=0.0)
    if SCALED:
        largest = tl.load(weights)
        factor = tl.where(largest > 0, factor / largest, 0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    height, width = down * ROWS, across * COLUMNS
    for count in range(split * each, tl.minimum(split * each + each, examples)):
        example = first + count
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, tokens, TOKENS):
            token = start + tl.arange(0, TOKENS)
            left = tl.load(outputs + example * tokens * height + (token[:, None] * height + row[None, :]))
            right = tl.load(inputs + example * tokens * width + (token[:, None] * width + column[None, :]))
            product = tl.dot(tl.trans(left), right, product)
        if KIND == "norms":
            if SCALED:
                product = product * factor
            tl.store(found + example * (down * across) + tile, tl.sum(tl.sum(product * product, 1), 0))
        else:
            # Never rounded up by more than a last bit, never infinite.
            unit = tl.load(output_unit + example).to(tl.float64) * tl.load(input_unit + example)
            weight = unit * (scale if KIND == "clamped" else tl.load(weights + count))
            if KEPT:
                weight = tl.where(tl.load(keep + count) != 0, weight, 0.0)
            weight = tl.where(tl.abs(weight) < 2.0**-126, 0.0, weight)
            product = product * tl.minimum(tl.maximum(weight, -3e38), 3e38).to(tl.float32)
            if KIND == "sum":
                total += product
            else:
                # Clamped with the bounds as they are: their negatives would have to be spread over threads again.
                total -= tl.minimum(-tl.minimum(product, factor), factor)
                if MOMENTS:
                    square += product * product
    if KIND != "norms":
        start = tl.cast(part, tl.int64) * rows * columns
        tl.store(sums + start + entry, total, mask=inside)
        if MOMENTS:
            tl.store(squares + start + entry, square, mask=inside)
