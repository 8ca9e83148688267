"""Sums of clamped outer products of vectors, in Triton.

A program owns a tile of the sum and some of the examples, whose vectors it multiplies in registers: no product is ever
stored. What the programs of a tile found is added up afterwards, always in the same order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import Plan, Sums
from adadp.gradients.kernels.triton_launch import launch
from adadp.gradients.kernels.triton_splits import cdiv, next_power_of_2, programs_per_tile, whole

UNROLLED = 4  # examples whose vectors are loaded at once


class OuterBlocks(NamedTuple):
    """A tile of the sum, and how a program works on it."""

    rows: int
    columns: int
    warps: int = 4


def outer_blocks(rows: int, columns: int) -> OuterBlocks:
    """Tiles of at most 4,096 entries: 32 for each thread, with their bounds, leave room for values to come."""
    width = min(64, next_power_of_2(columns))
    return OuterBlocks(min(4096 // width, next_power_of_2(rows)), width)


def outer_clamped(
    outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False, blocks: OuterBlocks | None = None,
    planned: Plan = None,
) -> Sums:  # fmt: skip
    """Sums over g_n = b_n a_n^T for b [n, rows], a [n, columns], bound [rows, columns]; products in float32."""
    (examples, rows), columns = outputs.shape, inputs.shape[1]
    if examples * rows * columns == 0:
        return torch.zeros_like(bound), torch.zeros_like(bound) if moments else None
    blocks = blocks or outer_blocks(rows, columns)
    tiles = cdiv(rows, blocks.rows) * cdiv(columns, blocks.columns)
    # A net on vectors keeps little else than these: parts of the sums, and of squares, may take half as much.
    splits, each = programs_per_tile(
        tiles, examples, blocks.warps, 8, UNROLLED, outputs.device,
        planned=planned, kept=rows + columns, part=2 * (1 + moments) * rows * columns,
    )  # fmt: skip
    sums = outputs.new_empty(splits, rows, columns)
    squares = torch.empty_like(sums) if moments else sums
    aligned = math.gcd(columns, inputs.stride(0), 16)  # the compiler sees by itself what is a multiple of 16, not of 4
    launch(
        _outer, tiles * splits,
        outputs, inputs, bound.contiguous(), sums, squares, examples, each, rows, columns // aligned,
        outputs.stride(0), outputs.stride(1), inputs.stride(0) // aligned, inputs.stride(1), ALIGNED=aligned,
        EXAMPLES=UNROLLED, MOMENTS=moments, ROWS=blocks.rows, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    return whole(sums), whole(squares) if moments else None


@triton.jit(do_not_specialize=["examples", "each"])  # lots vary: one kernel for all of them
def _outer(
    outputs, inputs, bound, sums, squares, examples, each, rows, columns,
    output_example, output_row, input_example, input_column,
    ALIGNED: tl.constexpr, EXAMPLES: tl.constexpr, MOMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns *= ALIGNED
    input_example *= ALIGNED
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    limit = tl.load(bound + place, mask=inside, other=0.0)
    first = split * each
    last = tl.minimum(first + each, examples)
    total, square = _outer_sums(
        outputs, inputs, limit, row, column, rows, columns, first, last,
        output_example, output_row, input_example, input_column, EXAMPLES, MOMENTS, False,
    )  # fmt: skip
    # A product that is not a number shows in the sum. Looking at every product would cost as much again, so that is
    # done where one was: the same sums in the same order, less those products.
    if tl.max(tl.max((total != total).to(tl.int32), 1), 0) > 0:
        total, square = _outer_sums(
            outputs, inputs, limit, row, column, rows, columns, first, last,
            output_example, output_row, input_example, input_column, EXAMPLES, MOMENTS, True,
        )  # fmt: skip
    start = split.to(tl.int64) * rows * columns
    tl.store(sums + start + place, total, mask=inside)
    if MOMENTS:
        tl.store(squares + start + place, square, mask=inside)


@triton.jit
def _outer_sums(
    outputs, inputs, limit, row, column, rows, columns, first, last,
    output_example, output_row, input_example, input_column,
    EXAMPLES: tl.constexpr, MOMENTS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    total = tl.zeros_like(limit)
    square = tl.where(limit == limit, 0.0, limit)  # zeros, spread over threads as the bounds are
    for example in tl.range(first, last, loop_unroll_factor=EXAMPLES):
        output = outputs + tl.cast(example, tl.int64) * output_example
        input = inputs + tl.cast(example, tl.int64) * input_example
        left = tl.load(output + row * output_row, mask=row < rows, other=0.0)
        right = tl.load(input + column * input_column, mask=column < columns, other=0.0)
        product = left[:, None] * right[None, :]
        if CAREFUL:
            product = tl.where(product == product, product, 0.0)
        total += tl.clamp(product, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        if MOMENTS:
            square += product * product
    return total, square
