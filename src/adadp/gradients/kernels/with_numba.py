"""Kernels for CPUs: loops that clamp and add what a product has just left in the cache, in one pass.

Plain torch goes through the gradients of all examples four times (product, clamp, NaN, sum), each time through memory.
Here the output is cut into tiles, and whoever works on a tile takes the examples one after the other: the sum has the
same bits whatever the number of threads is. The threads are torch's own (`in_parallel`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numba
import torch
from numba import types
from torch import Tensor

from adadp.gradients.kernels.numba_loops import TILE, add, add_outer, outer_lengths, squared_lengths
from adadp.gradients.kernels.threads import in_parallel

if TYPE_CHECKING:
    from adadp.gradients.kernels.reference import Pair, Plan, Sums
    from adadp.gradients.layers.convolution import Geometry

# Gradients are made for a few examples at a time, so that they are still in the cores' own caches when they are used.
BUFFER_BYTES = 4 * 2**20


def outer_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False, planned: Plan = None) -> Sums:
    """Sums over g_n = b_n a_n^T for b [n, rows], a [n, columns], bound [rows, columns]."""
    if inputs.shape[1] < outputs.shape[1] and inputs.shape[1] % 16:  # what a vector of columns leaves over is slow
        total, squares = outer_clamped(inputs, outputs, bound.T, moments)
        return total.T.contiguous(), None if squares is None else squares.T.contiguous()
    total, squares = _zeros(bound, moments)
    outputs, inputs, bound = outputs.contiguous(), inputs.contiguous(), bound.contiguous()
    (count, columns), rows = inputs.shape, outputs.shape[1]
    if outputs.shape != (count, rows) or bound.shape != (rows, columns):
        raise ValueError(f"outputs, inputs and bound of {[*outputs.shape]}, {[*inputs.shape]} and {[*bound.shape]}")
    _run(add_outer, moments, (outputs, inputs, bound, total, squares), (count, rows, columns))
    return total, squares


def outer_norms(pairs: Sequence[Pair], most: float) -> Tensor:
    """Rows |a_n|, |b_n| and |b_n a_n^T|^2 of each pair, the last infinite where one is `most`; then their sum."""
    count = len(pairs[0][0])
    whole = [(b.contiguous(), None if a is None else a.contiguous()) for b, a in pairs]  # alive until all is done
    numbers: list[int] = []
    for b, a in whole:
        if len(b) != count or (a is not None and len(a) != count):
            raise ValueError(f"vectors of {count}, {len(b)} and {len(b) if a is None else len(a)} examples")
        numbers += (*_addresses((b, a)), b.shape[1], -1 if a is None else a.shape[1])
    found = torch.empty(3 * len(pairs) + 1, count, dtype=torch.float64)
    _start(outer_lengths, most, (found.data_ptr(), count, len(pairs), *numbers))
    return found


def products_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns]."""
    return _clamped(_products(outputs, inputs), len(outputs), bound, moments)


def products_norms(outputs: Tensor, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of `sum_t b_nt a_nt^T`, multiplied elementwise by `scale` [rows, columns]; [n], float64."""
    return _norms(_products(outputs, inputs), len(outputs), outputs.shape[2] * inputs.shape[2], scale)


def convolution_clamped(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, bound: Tensor, moments: bool = False, planned: Plan = None
) -> Sums:
    """Sums over the gradients g_n of a convolution's weight; bound has the weight's shape."""
    return _clamped(_weights(outputs, inputs, geometry), len(outputs), bound, moments)


def convolution_norms(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, scale: Tensor | None = None, planned: Plan = None
) -> Tensor:
    """Squared norms of the gradients of a convolution's weight, multiplied elementwise by `scale`; [n], float64."""
    return _norms(_weights(outputs, inputs, geometry), len(outputs), math.prod(geometry.weight), scale)


def dense_clamped(gradients: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over the gradients [n, *shape] of examples, bound of that shape."""
    return _clamped(lambda part: gradients[part], len(gradients), bound, moments)


def dense_norms(gradients: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of gradients [n, ...], multiplied elementwise by `scale`; [n], float64."""
    rows, factor = gradients.flatten(1).contiguous(), None if scale is None else scale.flatten().contiguous()
    count, size = rows.shape
    if factor is not None and factor.numel() != size:
        raise ValueError(f"a scale of {factor.numel()} values for gradients of {size}")
    pieces = torch.empty(count, -(-size // TILE), dtype=torch.float64)
    _run(squared_lengths, scale is not None, (rows, factor, pieces), (count, size, pieces.shape[1]))
    return pieces.sum(1)


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
    total, squares = _zeros(bound, moments)
    bound = bound.contiguous()
    for part in _parts(count, bound.numel()):
        gradients = make(part).contiguous()
        if gradients[:1].numel() != bound.numel():
            raise ValueError(f"a bound of {[*bound.shape]} for gradients of {[*gradients.shape[1:]]}")
        _run(add, moments, (gradients, bound, total, squares), (len(gradients), bound.numel()))
    return total, squares


def _norms(make: Maker, count: int, size: int, scale: Tensor | None) -> Tensor:
    found = torch.empty(count, dtype=torch.float64)
    for part in _parts(count, size):
        found[part] = dense_norms(make(part), scale)
    return found


def _zeros(bound: Tensor, moments: bool) -> tuple[Tensor, Tensor | None]:
    total = torch.zeros(bound.shape, dtype=torch.float32)
    return total, torch.zeros_like(total) if moments else None


# ---- loops on torch's threads ---------------------------------------------------------------------------------------


def _run(loop: Callable[[bool], Any], variant: bool, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
    """Run one of the loops over tensors, which it knows by their addresses."""
    exact = tensors[-1:] if loop is squared_lengths else []  # where it puts what it found
    own = tensors[: len(tensors) - len(exact)]
    _start(loop, variant, (*_addresses(own), *_addresses(exact, torch.float64), *sizes))


def _addresses(tensors: Sequence[Tensor | None], dtype: torch.dtype = torch.float32) -> Iterator[int]:
    """Where they lie, 0 for None. A loop that is given addresses would not see that something else lies there."""
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()):
            raise TypeError(f"a CPU kernel was given {tensor.dtype} on {tensor.device}, or values that lie apart")
        yield 0 if tensor is None else tensor.data_ptr()


def _start(loop: Callable[[Any], Any], variant: float, numbers: Sequence[int]) -> None:
    given = (ctypes.c_int64 * (1 + len(numbers)))(0, *numbers)
    in_parallel(_compiled(loop, variant).address, ctypes.addressof(given))


@cache
def _compiled(loop: Callable[[Any], Any], variant: float) -> Any:
    """Compiled when it is first needed, and kept on the disk for the next process where that is possible."""
    compiler, pointer = cast(Any, numba.cfunc), cast(Any, types.CPointer)
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    signature = types.void(pointer(types.int64))
    try:
        return compiler(signature, cache=True, **options)(loop(variant))
    except RuntimeError:  # no folder that can be written to
        return compiler(signature, **options)(loop(variant))
