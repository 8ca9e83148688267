"""Kernels for CPUs: loops that clamp and add what a product has just left in the cache, in one pass.

Plain torch goes through the gradients of all examples four times (product, clamp, NaN, sum), each time through memory.
Here each thread owns a part of the output and takes the examples one after the other, so the sum has the same bits
whatever the number of threads is. There are as many as torch uses; where that is one, no pool of threads is touched.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from adadp.gradients.convolution import Geometry
    from adadp.gradients.kernels.reference import Sums

# Gradients are made for a few examples at a time, so that they are still in the cores' own caches when they are used.
BUFFER_BYTES = 2**20
# What a thread works on stays in its first-level cache: sums, squares and bounds of this many coordinates.
TILE = 2048
# Sums of squares that are kept apart, and added up at the end of a tile.
LANES = 64


def outer_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = b_n a_n^T for b [n, rows], a [n, columns], bound [rows, columns]."""
    if inputs.shape[1] < outputs.shape[1] and inputs.shape[1] % 16:  # what a vector of columns leaves over is slow
        total, squares = outer_clamped(inputs, outputs, bound.T, moments)
        return total.T.contiguous(), None if squares is None else squares.T.contiguous()
    total, squares, room = _empty(bound, moments)
    _run(_add_outer, moments, *_arrays(outputs, inputs, bound), total.numpy(), room)
    return total, squares


def products_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns]."""
    return _clamped(_products(outputs, inputs), len(outputs), bound, moments)


def products_norms(outputs: Tensor, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of `sum_t b_nt a_nt^T`, multiplied elementwise by `scale` [rows, columns]; [n], float64."""
    return _norms(_products(outputs, inputs), len(outputs), outputs.shape[2] * inputs.shape[2], scale)


def convolution_clamped(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, bound: Tensor, moments: bool = False
) -> Sums:
    """Sums over the gradients g_n of a convolution's weight; bound has the weight's shape."""
    return _clamped(_weights(outputs, inputs, geometry), len(outputs), bound, moments)


def convolution_norms(outputs: Tensor, inputs: Tensor, geometry: Geometry, scale: Tensor | None = None) -> Tensor:
    """Squared norms of the gradients of a convolution's weight, multiplied elementwise by `scale`; [n], float64."""
    return _norms(_weights(outputs, inputs, geometry), len(outputs), math.prod(geometry.weight), scale)


# ---- a few examples' gradients at a time ----------------------------------------------------------------------------

Maker = Callable[[slice], Tensor]


def _products(outputs: Tensor, inputs: Tensor) -> Maker:
    size = outputs.shape[2] * inputs.shape[2]
    room = outputs.new_empty(min(len(outputs), _few(size)), outputs.shape[2], inputs.shape[2])

    def make(part: slice) -> Tensor:
        return torch.bmm(outputs[part].mT, inputs[part], out=room[: part.stop - part.start])

    return make


def _weights(outputs: Tensor, inputs: Tensor, geometry: Geometry) -> Maker:
    return lambda part: geometry.per_example(inputs[part], outputs[part])


def _few(size: int) -> int:
    return max(1, BUFFER_BYTES // max(1, 4 * size))


def _parts(count: int, size: int) -> Iterator[slice]:
    few = _few(size)
    return (slice(start, min(start + few, count)) for start in range(0, count, few))


def _clamped(make: Maker, count: int, bound: Tensor, moments: bool) -> Sums:
    total, squares, room = _empty(bound.reshape(1, -1), moments)
    (limit,) = _arrays(bound.reshape(1, -1))
    for part in _parts(count, bound.numel()):
        (gradients,) = _arrays(make(part).flatten(1))
        _run(_add, moments, gradients, limit, total.numpy(), room)
    return total.view(bound.shape), None if squares is None else squares.view(bound.shape)


def _norms(make: Maker, count: int, size: int, scale: Tensor | None) -> Tensor:
    found = torch.zeros(count, dtype=torch.float64)
    factor = np.zeros(0, dtype=np.float32) if scale is None else _arrays(scale.flatten())[0]
    for part in _parts(count, size):
        (gradients,) = _arrays(make(part).flatten(1))
        pieces = np.empty((len(gradients), -(-size // TILE)))
        _run(_squared_lengths, scale is not None, gradients, factor, pieces)
        found[part] = torch.from_numpy(pieces.sum(1))
    return found


def _empty(bound: Tensor, moments: bool) -> tuple[Tensor, Tensor | None, np.ndarray[Any, Any]]:
    """Zeros for the sums and, where asked for, the squares; and the latter as the loops take them."""
    total = torch.zeros(bound.shape, dtype=torch.float32)
    squares = torch.zeros_like(total) if moments else None
    return total, squares, np.zeros((0, 0), dtype=np.float32) if squares is None else squares.numpy()


def _arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


# ---- threads --------------------------------------------------------------------------------------------------------

_HOME = os.getpid()
_POOL = threading.Lock()


Loop = Callable[[bool, Any], Callable[..., None]]


def _run(loop: Loop, variant: bool, *arguments: Any) -> None:
    """Call the loop on as many threads as torch uses.

    One caller at a time may have the pool of threads: not every one that numba knows allows two. And in a forked
    process it is gone. Who does not get it goes on alone, to the same result.
    """
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads == 1 or os.getpid() != _HOME or not _POOL.acquire(blocking=False):
        _compiled(loop, variant, False)(*arguments)
        return
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(threads)
        _compiled(loop, variant, True)(*arguments)
    finally:
        numba.set_num_threads(before)
        _POOL.release()


@cache
def _compiled(loop: Loop, variant: bool, parallel: bool) -> Callable[..., None]:
    """Compiled when first called, and kept on the disk for the next process where that is possible."""
    written = loop(variant, numba.prange if parallel else range)
    options: dict[str, Any] = {"parallel": parallel, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        made: Callable[..., None] = numba.njit(cache=True, **options)(written)
    except RuntimeError:  # no folder that can be written to
        made = numba.njit(**options)(written)
    return made


# ---- loops ----------------------------------------------------------------------------------------------------------
# Written so that the compiler vectorises them: comparisons that become the processor's own min and max, and columns
# counted without a sign, which need no look at whether they count from the end. `moments`, `scaled` and `each`
# (how tiles are gone through: one by one, or shared out among threads) are constants of what is compiled.


@numba.njit(inline="always")
def _number(value):  # type: ignore[no-untyped-def]
    return value if value == value else np.float32(0)


@numba.njit(inline="always")
def _within(value, limit):  # type: ignore[no-untyped-def]
    value = limit if limit < value else value
    return -limit if -limit > value else value


def _add_outer(moments: bool, each: Any) -> Callable[..., None]:
    """total[r, c] += clamp(outputs[n, r] * inputs[n, c]) over n, and squares likewise."""

    def loop(outputs, inputs, bound, total, squares):  # type: ignore[no-untyped-def]
        count, columns = inputs.shape
        rows = outputs.shape[1]
        wide = min(columns, 512)
        high = max(1, TILE // wide)
        across, down = (columns + wide - 1) // wide, (rows + high - 1) // high
        fours = count // 4 * 4
        for tile in each(across * down):
            top, left = (tile // across) * high, (tile % across) * wide
            bottom, right = min(top + high, rows), min(left + wide, columns)
            for n in range(0, fours, 4):  # four at a time: the sum is loaded and stored less often
                for row in range(top, bottom):
                    b0, b1, b2, b3 = outputs[n, row], outputs[n + 1, row], outputs[n + 2, row], outputs[n + 3, row]
                    for c in range(np.uint64(left), np.uint64(right)):
                        p0, p1 = _number(b0 * inputs[n, c]), _number(b1 * inputs[n + 1, c])
                        p2, p3 = _number(b2 * inputs[n + 2, c]), _number(b3 * inputs[n + 3, c])
                        limit = bound[row, c]
                        first, second = _within(p0, limit) + _within(p1, limit), _within(p2, limit) + _within(p3, limit)
                        total[row, c] += first + second
                        if moments:
                            squares[row, c] += (p0 * p0 + p1 * p1) + (p2 * p2 + p3 * p3)
            for n in range(fours, count):
                for row in range(top, bottom):
                    b0 = outputs[n, row]
                    for c in range(np.uint64(left), np.uint64(right)):
                        p0 = _number(b0 * inputs[n, c])
                        total[row, c] += _within(p0, bound[row, c])
                        if moments:
                            squares[row, c] += p0 * p0

    return loop


def _add(moments: bool, each: Any) -> Callable[..., None]:
    """total[c] += clamp(gradients[n, c]) over n, and squares likewise."""

    def loop(gradients, bound, total, squares):  # type: ignore[no-untyped-def]
        count, size = gradients.shape
        for tile in each((size + TILE - 1) // TILE):
            left, right = tile * TILE, min((tile + 1) * TILE, size)
            for n in range(count):
                for c in range(np.uint64(left), np.uint64(right)):
                    value = _number(gradients[n, c])
                    total[0, c] += _within(value, bound[0, c])
                    if moments:
                        squares[0, c] += value * value

    return loop


def _squared_lengths(scaled: bool, each: Any) -> Callable[..., None]:
    """pieces[n, tile] = the sum of squares of gradients[n, c] * factor[c] over the tile's c, in float64."""

    def loop(gradients, factor, pieces):  # type: ignore[no-untyped-def]
        count, size = gradients.shape
        tiles = pieces.shape[1]
        for tile in each(count * tiles):
            n, left = tile // tiles, (tile % tiles) * TILE
            right = min(left + TILE, size)
            lanes = np.zeros(LANES)
            whole = left + (right - left) // LANES * LANES
            for start in range(np.uint64(left), np.uint64(whole), np.uint64(LANES)):
                for k in range(np.uint64(LANES)):
                    value = gradients[n, start + k] * factor[start + k] if scaled else gradients[n, start + k]
                    lanes[k] += np.float64(value) * np.float64(value)
            for k in range(np.uint64(right - whole)):
                c = np.uint64(whole) + k
                value = gradients[n, c] * factor[c] if scaled else gradients[n, c]
                lanes[k] += np.float64(value) * np.float64(value)
            pieces[n, tile % tiles] = lanes.sum()

    return loop
