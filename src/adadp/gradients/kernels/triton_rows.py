"""Single passes over tensors [n, ...] that exist, a row for each example, in Triton.

Sequences' gradients are made for a few examples at a time by torch's own product, into a buffer that stays in the
device's second-level cache: there these passes find them, and memory never sees them. Nothing is read back, and what is
launched depends on shapes alone, so calls may be recorded in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import Sums
from adadp.gradients.kernels.triton_launch import launch, one_or_most
from adadp.gradients.kernels.triton_splits import cdiv, next_power_of_2, whole

TILE = 4096  # entries that a program of four warps reads at once
CLAMPED_TILE = 1024  # entries whose sums, squares and bounds a program keeps
UNROLLED = 4  # examples whose entries are loaded at once
PROGRAMS = 8  # of four warps, that a multiprocessor should have for memory to be busy
CACHE_BYTES = 50 * 2**20  # of an H100 or H200, for where no device can be asked


def products_clamped(
    outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False, room: int | None = None
) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns].

    `room` is how many bytes of products exist at a time.
    """
    few = _few(outputs, inputs, room)
    sums = _Sums(bound, min(few, len(outputs)), moments)
    for _, products in _products(outputs, inputs, few):
        sums.add(products)
    return sums.result()


def products_norms(outputs: Tensor, inputs: Tensor, scale: Tensor | None = None, room: int | None = None) -> Tensor:
    """Squared norms of `sum_t b_nt a_nt^T`, multiplied elementwise by `scale` [rows, columns]; [n], float64."""
    few = _few(outputs, inputs, room)
    found = _pieces(len(outputs), outputs.shape[2] * inputs.shape[2], outputs.device)
    for part, products in _products(outputs, inputs, few):
        _square([products], scale, found[part])
    return _total(found)


def dense_clamped(gradients: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over the gradients [n, *shape] of examples, bound of that shape."""
    sums = _Sums(bound, len(gradients), moments)
    sums.add(gradients)
    return sums.result()


def dense_norms(gradients: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of gradients [n, ...], multiplied elementwise by `scale`; [n], float64.

    Squares are added in float64, where none of them overflows or vanishes (relative error below 2^-40). An entry that
    is not finite makes the norm so.
    """
    found = _pieces(len(gradients), math.prod(gradients.shape[1:]), gradients.device)
    _square([gradients], scale, found)
    return _total(found)


def row_norms(tensor: Tensor) -> Tensor:
    """Norms of the rows of a matrix; [rows], float64, as exact as `dense_norms`."""
    return alike_norms([tensor])[0]


def alike_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of rows of at most `MOST_ALIKE` matrices of one shape and with equal strides; [matrices, rows], float64."""
    (count, length), device = tensors[0].shape, tensors[0].device
    found = _pieces(len(tensors) * count, length, device)
    _square(tensors, None, found)
    norms = torch.empty(len(tensors), count, dtype=torch.float64, device=device)
    rows, pieces = found.shape
    if rows:
        wide = min(1024, next_power_of_2(max(1, pieces)))
        height = min(1024 // wide, next_power_of_2(rows))
        launch(_root, cdiv(rows, height), found, norms, rows, pieces, ROWS=height, PIECES=wide, num_warps=1)
    return norms


def weighted(tensor: Tensor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Rows of `tensor` [n, ...] times their weight [n]; zero where weight or `keep` [n] is, whatever they hold."""
    return _weight(tensor, weights, weights if keep is None else keep, multiply=True)


def kept(tensor: Tensor, keep: Tensor) -> Tensor:
    """Rows of `tensor` [n, ...] as they are where `keep` [n] is not zero; zero elsewhere, whatever they hold."""
    return _weight(tensor, keep, keep, multiply=False)


# ---- a few examples at a time ---------------------------------------------------------------------------------------


def _few(outputs: Tensor, inputs: Tensor, room: int | None) -> int:
    """How many examples' products stay in the cache: half of it is theirs, the factors come through the rest."""
    if room is None:
        device = outputs.device
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CACHE_BYTES
        room = cache // 2
    return max(1, room // max(1, 4 * outputs.shape[2] * inputs.shape[2]))


def _products(outputs: Tensor, inputs: Tensor, few: int) -> Iterator[tuple[slice, Tensor]]:
    """Products [some, rows, columns] of the examples in order, each time in the same memory."""
    count = len(outputs)
    buffer = outputs.new_empty(min(few, count), outputs.shape[2], inputs.shape[2])
    for start in range(0, count, few):
        part = slice(start, min(start + few, count))
        yield part, torch.bmm(outputs[part].mT, inputs[part], out=buffer[: part.stop - start])


def _rows(tensor: Tensor) -> Tensor:
    """[n, entries], a row's entries side by side."""
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()


def _aligned(*sizes: int) -> int:
    """A common divisor up to 16: the compiler sees by itself what is a multiple of 16, not of 4."""
    return math.gcd(16, *sizes)


# ---- squared norms --------------------------------------------------------------------------------------------------


def _pieces(count: int, length: int, device: torch.device) -> Tensor:
    """Room for the sum of squares of each tile of each row."""
    return torch.empty(count, cdiv(length, TILE), dtype=torch.float64, device=device)


def _total(pieces: Tensor) -> Tensor:
    return pieces[:, 0] if pieces.shape[1] == 1 else pieces.sum(1)


def _square(tensors: Sequence[Tensor], scale: Tensor | None, found: Tensor) -> None:
    """Of at most `MOST_ALIKE` tensors of one shape, with equal strides."""
    matrices = [_rows(tensor) for tensor in tensors]
    rows = matrices[0]
    count, length = rows.shape
    if count * length == 0:
        return
    columns = min(TILE, next_power_of_2(length))
    height = min(TILE // columns, next_power_of_2(count))
    aligned = _aligned(length, rows.stride(0))
    factor = rows if scale is None else scale.contiguous()
    launch(
        _squares, len(matrices) * cdiv(count, height) * found.shape[1],
        one_or_most(matrices), factor, found, count, length // aligned, rows.stride(0) // aligned,
        ALIGNED=aligned, SCALED=scale is not None, ROWS=height, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@triton.jit
def chosen(tensors, which):
    """One of a tuple of pointers."""
    found = tensors[0]
    for place in tl.static_range(1, len(tensors)):
        found = tl.where(which == place, tensors[place], found)
    return found


@triton.jit(do_not_specialize=["count"])  # lots vary: one kernel for all of them
def _squares(
    tensors, factor, found, count, length, stride,
    ALIGNED: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    length *= ALIGNED
    stride *= ALIGNED
    across = tl.cdiv(length, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * across
    which = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    values = chosen(tensors, which)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < length)[None, :]
    value = tl.load(values + (row.to(tl.int64) * stride)[:, None] + column[None, :], mask=inside, other=0.0)
    if SCALED:
        value = value * tl.load(factor + column, mask=column < length, other=0.0)[None, :]
    exact = value.to(tl.float64)
    place = (tl.cast(which, tl.int64) * count + row) * across + tile % across
    tl.store(found + place, tl.sum(exact * exact, 1), mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _root(found, result, count, pieces, ROWS: tl.constexpr, PIECES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, PIECES], tl.float64)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        inside = (row < count)[:, None] & (piece < pieces)[None, :]
        total += tl.load(found + row.to(tl.int64)[:, None] * pieces + piece[None, :], mask=inside, other=0.0)
    tl.store(result + row, tl.sqrt(tl.sum(total, 1)), mask=row < count)


# ---- clamped sums ---------------------------------------------------------------------------------------------------


class _Sums:
    """Clamped sums, and moments, of gradients that come some examples at a time; at most `most` of them.

    A program owns some coordinates and some of the examples; small layers, of few coordinates, have several programs
    for each. What those found is added up at the end, always in the same order.
    """

    def __init__(self, bound: Tensor, most: int, moments: bool) -> None:
        self.bound = bound.contiguous()
        tiles = cdiv(bound.numel(), CLAMPED_TILE)
        cuda = bound.device.type == "cuda"
        units = torch.cuda.get_device_properties(bound.device).multi_processor_count if cuda else 132
        wanted = max(1, PROGRAMS * units // max(1, tiles))
        self.splits = max(1, min(wanted, most // (2 * UNROLLED)))
        self.total = bound.new_zeros(self.splits, *bound.shape)
        self.squares = torch.zeros_like(self.total) if moments else None

    def add(self, gradients: Tensor) -> None:
        rows = _rows(gradients)
        count, length = rows.shape
        if count * length == 0:
            return
        aligned = _aligned(length, rows.stride(0))
        launch(
            _clamp, cdiv(length, CLAMPED_TILE) * self.splits,
            rows, self.bound, self.total, self.total if self.squares is None else self.squares,
            count, cdiv(count, self.splits), length // aligned, rows.stride(0) // aligned,
            ALIGNED=aligned, EXAMPLES=UNROLLED, MOMENTS=self.squares is not None, ENTRIES=CLAMPED_TILE, num_warps=4,
        )  # fmt: skip

    def result(self) -> Sums:
        return whole(self.total), None if self.squares is None else whole(self.squares)


@triton.jit(do_not_specialize=["count", "each"])
def _clamp(
    values, bound, total, squares, count, each, length, stride,
    ALIGNED: tl.constexpr, EXAMPLES: tl.constexpr, MOMENTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    length *= ALIGNED
    stride *= ALIGNED
    tiles = tl.cdiv(length, ENTRIES)
    split = tl.program_id(0) // tiles
    entry = tl.program_id(0) % tiles * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < length
    place = split.to(tl.int64) * length + entry
    limit = tl.load(bound + entry, mask=inside, other=0.0)
    sums = tl.load(total + place, mask=inside, other=0.0)
    if MOMENTS:
        moments = tl.load(squares + place, mask=inside, other=0.0)
    for row in tl.range(split * each, tl.minimum(split * each + each, count), loop_unroll_factor=EXAMPLES):
        value = tl.load(values + tl.cast(row, tl.int64) * stride + entry, mask=inside, other=0.0)
        value = tl.where(value == value, value, 0.0)
        sums += tl.clamp(value, -limit, limit)
        if MOMENTS:
            moments += value * value
    tl.store(total + place, sums, mask=inside)
    if MOMENTS:
        tl.store(squares + place, moments, mask=inside)


# ---- weights --------------------------------------------------------------------------------------------------------


def _weight(tensor: Tensor, weights: Tensor, keep: Tensor, multiply: bool) -> Tensor:
    rows = _rows(tensor)
    count, length = rows.shape
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if result.numel() == 0:
        return result
    columns = min(TILE, next_power_of_2(length))
    height = min(TILE // columns, next_power_of_2(count))
    aligned = _aligned(length, rows.stride(0))
    launch(
        _weigh, cdiv(count, height) * cdiv(length, columns),
        rows, weights.contiguous(), keep.contiguous(), result, count, length // aligned, rows.stride(0) // aligned,
        ALIGNED=aligned, MULTIPLY=multiply, ROWS=height, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["count"])
def _weigh(
    values, weights, keep, result, count, length, stride,
    ALIGNED: tl.constexpr, MULTIPLY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    length *= ALIGNED
    stride *= ALIGNED
    across = tl.cdiv(length, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < length)[None, :]
    weight = tl.load(weights + row, mask=row < count, other=0).to(tl.float32)
    counts = (tl.load(keep + row, mask=row < count, other=0) != 0) & (weight != 0)
    wide = row.to(tl.int64)
    # What has no weight is not even read.
    value = tl.load(values + (wide * stride)[:, None] + column[None, :], mask=inside & counts[:, None], other=0.0)
    if MULTIPLY:
        value = tl.where(counts[:, None], value * weight[:, None], 0.0)
    tl.store(result + (wide * length)[:, None] + column[None, :], value, mask=inside)
