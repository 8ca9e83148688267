"""Each example's product of two matrices, clamped and summed or measured as it leaves the registers, in Triton.

The gradient of example n is g_n = sum_p b_np a_np^T over the places p where a convolution's kernel stops. A column of
it is one channel of the input seen through one entry of the kernel; which input that is at which place is worked out
while loading, so patches never exist in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import Plan, Sums
from adadp.gradients.kernels.triton_launch import launch, one_or_most
from adadp.gradients.kernels.triton_rows import chosen
from adadp.gradients.kernels.triton_splits import cdiv, next_power_of_2, programs_per_tile, whole

if TYPE_CHECKING:
    from adadp.gradients.layers.convolution import Geometry


OUTSIDE = tl.constexpr(-(2**30))  # of any input: twice this is still a number


class TileBlocks(NamedTuple):
    """A tile of the gradient, how many places are loaded at a time, and how a program works on them."""

    rows: int
    columns: int
    places: int
    warps: int
    stages: int


class Operands(NamedTuple):
    """The two factors of every example's gradient, and the way through them."""

    outputs: Tensor  # [n, groups * rows, lines, places in a line], contiguous
    inputs: Tensor  # [n, channels, *size], contiguous
    examples: int
    groups: int
    rows: int  # of each group
    columns: int
    places: int
    line: int  # places in a line
    size: tuple[int, int]  # of the input: lines, places in a line
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    planned: Plan

    @property
    def empty(self) -> bool:
        return 0 in (self.examples, self.rows, self.columns, self.places)


def convolution_operands(outputs: Tensor, inputs: Tensor, geometry: Geometry, planned: Plan = None) -> Operands:
    """Of one- and two-dimensional convolutions: outputs [n, out, *size], inputs [n, in, *size]."""
    outputs, inputs = outputs.contiguous(), inputs.contiguous()
    way = [geometry.kernel, geometry.stride, geometry.padding, geometry.dilation]
    if len(geometry.kernel) == 1:
        outputs, inputs = outputs.unsqueeze(2), inputs.unsqueeze(2)
        way = [(neutral, *values) for neutral, values in zip((1, 1, 0, 1), way, strict=True)]
    kernel, stride, padding, dilation = ((values[0], values[1]) for values in way)
    examples, rows, lines, line = outputs.shape
    return Operands(
        outputs, inputs,
        examples, geometry.groups, rows // geometry.groups, inputs.shape[1] // geometry.groups * kernel[0] * kernel[1],
        lines * line, line, (inputs.shape[2], inputs.shape[3]), kernel, stride, padding, dilation, planned,
    )  # fmt: skip


def product_blocks(rows: int, columns: int, precision: str) -> TileBlocks:
    """Tiles whose products, sums, squares and bounds all fit in registers.

    A row is loaded 16 bytes at a time and a column 4 at a time: tiles are higher than wide. On matrix units there are
    8 warps and 4 stages of loads, as a convolution of small images waits for memory more than for arithmetic.
    """
    matrix = precision != "ieee" and rows > 32
    height = min(128 if precision != "ieee" else 64, max(16, next_power_of_2(rows)))
    width = min(64 if matrix or precision == "ieee" else 128, max(16, next_power_of_2(columns)))
    if matrix and height * width >= 64 * 64:
        return TileBlocks(height, width, 32, 8, 4)
    return TileBlocks(height, width, 16 if precision == "ieee" else 32, 4, 3)


def clamped(operands: Operands, bound: Tensor, moments: bool, precision: str, blocks: TileBlocks | None = None) -> Sums:
    """`sum_n clamp(g_n, +-bound)` and, with `moments`, `sum_n g_n^2`, each of `bound`'s shape."""
    if operands.empty:
        return torch.zeros_like(bound), torch.zeros_like(bound) if moments else None
    blocks = blocks or product_blocks(operands.rows, operands.columns, precision)
    splits, each = _splits(operands, blocks, part=(1 + moments) * bound.numel())
    sums = torch.empty(splits, *bound.shape, dtype=bound.dtype, device=bound.device)
    squares = torch.empty_like(sums) if moments else sums
    _launch([operands], blocks, precision, splits, each, bound.contiguous(), sums, squares, sums,
            CLAMPED=True, MOMENTS=moments, SCALED=False)  # fmt: skip
    return whole(sums), whole(squares) if moments else None


def norms(
    several: Sequence[Operands], scale: Tensor | None, precision: str, blocks: TileBlocks | None = None
) -> Tensor:
    """|g_n * scale|^2 for each example of parameters that are alike, tile by tile; [parameters * n, tiles] in float64.

    Entries are rounded as the products are, and once more by `scale`; their squares are added in float64, where none of
    them overflows or vanishes (relative error below 2^-40). An entry that is not finite makes the norm so.
    """
    operands = several[0]
    outputs, count = operands.outputs, len(several) * operands.examples
    if operands.empty:
        return torch.zeros(count, 1, dtype=torch.float64, device=outputs.device)
    blocks = blocks or product_blocks(operands.rows, operands.columns, precision)
    splits, each = _splits(operands, blocks)
    found = torch.empty(count, _tiles(operands, blocks), dtype=torch.float64, device=outputs.device)
    factor = outputs if scale is None else scale.contiguous()
    _launch(several, blocks, precision, splits, each, factor, outputs, outputs, found,
            CLAMPED=False, MOMENTS=False, SCALED=scale is not None)  # fmt: skip
    return found


def _tiles(operands: Operands, blocks: TileBlocks) -> int:
    down, across = cdiv(operands.rows, blocks.rows), cdiv(operands.columns, blocks.columns)
    return int(operands.groups * down * across)


def _splits(operands: Operands, blocks: TileBlocks, part: int = 0) -> tuple[int, int]:
    tiles, outputs, inputs = _tiles(operands, blocks), operands.outputs, operands.inputs
    kept = math.prod(outputs.shape[1:]) + math.prod(inputs.shape[1:])
    return programs_per_tile(
        tiles, operands.examples, blocks.warps, 1, 1, outputs.device, planned=operands.planned, kept=kept, part=part
    )


def _launch(
    several: Sequence[Operands], blocks: TileBlocks, precision: str, splits: int, each: int,
    matrix: Tensor, sums: Tensor, squares: Tensor, found: Tensor, **kind: bool,
) -> None:  # fmt: skip
    o = several[0]
    launch(
        _products, _tiles(o, blocks) * splits * len(several),
        one_or_most([one.outputs for one in several]), one_or_most([one.inputs for one in several]),
        matrix, sums, squares, found,
        o.examples, each, splits, o.groups, o.rows, o.columns, o.places, o.line, *o.size,
        math.prod(o.outputs.shape[1:]), math.prod(o.inputs.shape[1:]), math.prod(o.size),
        KERNEL_Y=o.kernel[0], KERNEL_X=o.kernel[1], STRIDE_Y=o.stride[0], STRIDE_X=o.stride[1],
        PADDING_Y=o.padding[0], PADDING_X=o.padding[1], DILATION_Y=o.dilation[0], DILATION_X=o.dilation[1],
        PRECISION=precision, **kind,
        ROWS=blocks.rows, COLUMNS=blocks.columns, PLACES=blocks.places,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["examples", "each", "splits"])  # lots vary: one kernel for all of them
def _products(
    several_outputs, several_inputs, matrix, sums, squares, found,
    examples, each, splits, groups, rows, columns, places, line, height, width,
    output_example, input_example, input_channel,
    KERNEL_Y: tl.constexpr, KERNEL_X: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    PADDING_Y: tl.constexpr, PADDING_X: tl.constexpr, DILATION_Y: tl.constexpr, DILATION_X: tl.constexpr,
    PRECISION: tl.constexpr, CLAMPED: tl.constexpr, MOMENTS: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    tiles = groups * down * across
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    which = tl.program_id(0) // tiles // splits
    outputs = chosen(several_outputs, which)
    inputs = chosen(several_inputs, which)
    group = tile // (down * across)
    row = (tile // across) % down * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    entry = (group * rows + row)[:, None] * columns + column[None, :]
    # Where each column looks, from the corner of a patch.
    channel = column // (KERNEL_Y * KERNEL_X)
    down_by = column // KERNEL_X % KERNEL_Y * DILATION_Y - PADDING_Y
    right_by = tl.where(column < columns, column % KERNEL_X * DILATION_X - PADDING_X, OUTSIDE)
    looks_at = (group * (columns // (KERNEL_Y * KERNEL_X)) + channel) * input_channel
    if KERNEL_Y * KERNEL_X > 1 or PADDING_Y + PADDING_X > 0:
        looks_at += down_by * width + (column % KERNEL_X * DILATION_X - PADDING_X)
    stands_at = (group * rows + row) * places
    if CLAMPED or SCALED:  # kept in registers: spreading it over threads as products are takes as long as a product
        factor = tl.load(matrix + entry, mask=inside, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    # One loop over examples and their places, so that one example's are on their way while another's are multiplied.
    steps = tl.cdiv(places, PLACES)
    for step in range(split * each * steps, tl.minimum(split * each + each, examples) * steps):
        example = tl.cast(step // steps, tl.int64)
        start = step % steps * PLACES
        place = start + tl.arange(0, PLACES)
        left = tl.load(
            outputs + example * output_example + (stands_at[:, None] + place[None, :]),
            mask=(row < rows)[:, None] & (place < places)[None, :],
            other=0.0,
        )
        y = place // line * STRIDE_Y
        x = place % line * STRIDE_X
        if PADDING_Y + PADDING_X > 0:
            # Few comparisons, as each is made for every entry: what is left of the first is far right, unsigned.
            at_x = tl.where(place < places, x, OUTSIDE)[:, None] + right_by[None, :]
            seen = at_x.to(tl.uint32, bitcast=True) < tl.cast(width, tl.uint32)
            if PADDING_Y > 0:
                at_y = y[:, None] + down_by[None, :]
                seen = seen & (at_y.to(tl.uint32, bitcast=True) < tl.cast(height, tl.uint32))
        else:
            seen = (place < places)[:, None] & (column < columns)[None, :]
        corner = (y * width + x)[:, None]
        right = tl.load(inputs + example * input_example + (corner + looks_at[None, :]), mask=seen, other=0.0)
        product = tl.dot(left, right, product, input_precision=PRECISION)
        if start + PLACES >= places:
            if CLAMPED:
                product = tl.where(product == product, product, 0.0)
                # Clamped with the bounds as they are: their negatives would again have to be spread over threads.
                total -= tl.minimum(-tl.minimum(product, factor), factor)
                if MOMENTS:
                    square += product * product
            else:
                if SCALED:
                    product = product * factor
                exact = tl.where(inside, product, 0.0).to(tl.float64)
                tl.store(
                    found + (tl.cast(which, tl.int64) * examples + example) * tiles + tile,
                    tl.sum(tl.sum(exact * exact, 1), 0),
                )
            product = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CLAMPED:
        start = split.to(tl.int64) * groups * rows * columns
        tl.store(sums + start + entry, total, mask=inside)
        if MOMENTS:
            tl.store(squares + start + entry, square, mask=inside)
