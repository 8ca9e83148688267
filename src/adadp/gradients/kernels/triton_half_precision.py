"""Each example's product of two matrices of half precision, measured, weighted or clamped as it leaves the registers.

The gradient of example n is g_n = sum_t b_nt a_nt^T. Factors come as float16 times a power of two for each example
(`halves`), padded with zeros to whole tiles: no load needs a mask. Hopper's matrix units take them as they lie in
memory, whichever index runs fastest, which they do of 16-bit values alone.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import CANCELLED, MOST_WEIGHTED, Float16Factor, Plan, Sums
from adadp.gradients.kernels.triton_splits import programs_per_tile, whole

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
    return int(min(SIDE, max(16, triton.next_power_of_2(length))))


@cache
def padded(length: int) -> int:
    """`length` up to whole tiles."""
    return int(triton.cdiv(length, side(length)) * side(length))


def halves(tensor: Tensor, norms: Tensor, planned: Plan = None) -> Float16Factor:
    """`tensor` [n, T, d] in float16, scaled by example so that the norm [n], at least each entry, is below 2^15.

    An example whose norm is not finite is zero.
    """
    count, tokens, size = tensor.shape
    tensor = tensor if tensor.stride(2) == 1 else tensor.contiguous()
    height, width = triton.cdiv(tokens, TOKENS) * TOKENS, padded(size)
    values = torch.empty(count, height, width, dtype=torch.float16, device=tensor.device)
    unit = torch.empty(count, dtype=torch.float32, device=tensor.device)
    if values.numel():
        _halve[(count * (height // TOKENS) * (width // side(size)),)](
            tensor, norms, values, unit, tokens, size, height, tensor.stride(0), tensor.stride(1),
            TOKENS=TOKENS, COLUMNS=side(size), num_warps=4,
        )  # fmt: skip
    return Float16Factor(values, unit, norms, size, planned)


@triton.jit
def _halve(
    tensor, norms, values, unit, tokens, size, height, example_stride, token_stride,
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
    up = ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)
    inside = (token < tokens)[:, None] & (column < size)[None, :]
    value = tl.load(
        tensor + example * example_stride + token.to(tl.int64)[:, None] * token_stride + column[None, :],
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
    count, device = len(outputs.unit), outputs.unit.device
    found = torch.empty(count, _tiles(outputs, inputs), dtype=torch.float32, device=device)
    bounds = torch.empty(count, dtype=torch.float64, device=device)
    if count == 0:
        return bounds
    largest = found if scale is None else torch.linalg.vector_norm(scale, math.inf)
    factor = found if scale is None else scale.contiguous()
    scaled = scale is not None
    shared = _splits(outputs, inputs, MEASURED, sums=0)
    _launch(outputs, inputs, MEASURED, shared, factor, largest, outputs.unit, found, found, found,
            KIND="norms", SCALED=scaled)  # fmt: skip
    _bound[(count,)](
        found, largest, outputs.unit, inputs.unit, outputs.norms, inputs.norms, bounds, rounding, found.shape[1],
        MOST=MOST_WEIGHTED, LEAST=CANCELLED, SCALED=scaled,
        TILES=min(1024, triton.next_power_of_2(found.shape[1])), num_warps=1,
    )  # fmt: skip
    return bounds


@triton.jit
def _bound(
    found, largest, output_unit, input_unit, output_norms, input_norms, bounds, rounding, tiles,
    MOST: tl.constexpr, LEAST: tl.constexpr, SCALED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILES], tl.float64)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        total += tl.load(found + example * tiles + tile, mask=tile < tiles, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0)) * tl.load(output_unit + example).to(tl.float64) * tl.load(input_unit + example)
    left, right = tl.load(output_norms + example), tl.load(input_norms + example)
    # Factors close to the smallest number may double where they are cut.
    reach = (left + 2.0**-120) * (right + 2.0**-120)
    bound = tl.maximum(norm * (1 + 2.0**-16) + reach * rounding, reach * LEAST)
    if SCALED:
        bound *= tl.load(largest).to(tl.float64)
    tl.store(bounds + example, tl.where((left < MOST) & (right < MOST), bound * bound, float("inf")))


def halves_sum(outputs: Float16Factor, inputs: Float16Factor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """`sum_n weights[n] g_n` over the kept examples; [rows, columns]."""
    shared = _splits(outputs, inputs, MEASURED, sums=1)
    sums = _room(outputs, inputs, shared[0])
    kept = weights if keep is None else keep
    _launch(outputs, inputs, MEASURED, shared, sums, weights, kept, sums, sums, sums,
            KIND="sum", KEPT=keep is not None)  # fmt: skip
    return whole(sums)


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
    return torch.empty(splits, outputs.size, inputs.size, dtype=torch.float32, device=outputs.unit.device)


def _tiles(outputs: Float16Factor, inputs: Float16Factor) -> int:
    return padded(outputs.size) // side(outputs.size) * (padded(inputs.size) // side(inputs.size))


def _splits(outputs: Float16Factor, inputs: Float16Factor, blocks: TokenBlocks, sums: int) -> tuple[int, int]:
    """For so many sums of the matrix's size. What was cut is kept too, and in float32 as they are."""
    count, tokens, rows, columns = len(outputs.unit), outputs.values.shape[1], outputs.size, inputs.size
    return programs_per_tile(
        _tiles(outputs, inputs), max(1, count), blocks.warps, 1, 1, outputs.unit.device,
        planned=outputs.planned, kept=tokens * (rows + columns), part=sums * rows * columns,
    )  # fmt: skip


def _launch(
    outputs: Float16Factor, inputs: Float16Factor, blocks: TokenBlocks, shared: tuple[int, int],
    matrix: Tensor, weights: Tensor, keep: Tensor, sums: Tensor, squares: Tensor, found: Tensor, *, scale: float = 1.0,
    KIND: str, SCALED: bool = False, KEPT: bool = False, MOMENTS: bool = False,
) -> None:  # fmt: skip
    splits, each = shared
    launch: Any = _products[(_tiles(outputs, inputs) * splits,)]
    launch(
        outputs.values, inputs.values, outputs.unit, inputs.unit, matrix, weights.contiguous(), keep.contiguous(),
        sums, squares, found, scale, len(outputs.unit), each, outputs.size, inputs.size, outputs.values.shape[1],
        KIND=KIND, SCALED=SCALED, KEPT=KEPT, MOMENTS=MOMENTS,
        ROWS=side(outputs.size), COLUMNS=side(inputs.size), TOKENS=blocks.tokens,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["examples", "each", "scale"])  # lots vary: one kernel for all of them
def _products(
    outputs, inputs, output_unit, input_unit, matrix, weights, keep, sums, squares, found, scale,
    examples, each, rows, columns, tokens,
    KIND: tl.constexpr, SCALED: tl.constexpr, KEPT: tl.constexpr, MOMENTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) % (down * across)
    split = tl.program_id(0) // (down * across)
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
        example = tl.cast(count, tl.int64)
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
            weight = unit * (scale if KIND == "clamped" else tl.load(weights + example))
            if KEPT:
                weight = tl.where(tl.load(keep + example) != 0, weight, 0.0)
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
        start = split.to(tl.int64) * rows * columns
        tl.store(sums + start + entry, total, mask=inside)
        if MOMENTS:
            tl.store(squares + start + entry, square, mask=inside)
