"""Norms and sums whose bounds hold in floating point: rounding, overflow, values that are not finite.

The norm that a form reports must bound what it then adds to a sum, in the precision in which the machine adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import MOST_ALIKE, MOST_WEIGHTED, Pair, row_norms

_Item = TypeVar("_Item")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are multiplied and summed: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(tensor: Tensor) -> float:
    """Largest relative error of one multiplication in a matrix product of `tensor`, hardware modes included."""
    if tensor.dtype == torch.float64:
        return 2.0**-53
    return TF32 if tensor.is_cuda and matmul_precision() != "highest" else 2.0**-24


def matmul_precision() -> str:
    """The setting of torch.set_float32_matmul_precision.

    Raises:
        ConfigurationError: the precision was set for one kind of product alone.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise ConfigurationError(
            "a precision of float32 products was set by torch.backends...fp32_precision for one kind of product alone, "
            "which the bounds on rounding do not know. Use torch.set_float32_matmul_precision and "
            "torch.backends.cudnn.allow_tf32 instead."
        ) from error


def refuse_unbounded_precision(device: torch.device) -> None:
    """Raise ConfigurationError where training on a CPU would multiply with fewer bits than the bounds allow for.

    `exact_arithmetic` cannot prevent it once CUDA is initialised: one switch governs both devices.
    """
    if device.type != "cuda" and torch.cuda.is_initialized() and matmul_precision() != "highest":  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "torch.set_float32_matmul_precision is not 'highest': CPUs may then multiply with fewer bits than the "
            "bounds on rounding allow for. Set it to 'highest' where a model is trained on a CPU beside work on a GPU."
        )


def convolutions_are_cut() -> bool:
    """Whether cuDNN may multiply in TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # of some kinds of layers and not of others
        return True


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 with all their bits, on every device: results then do not depend on sizes."""
    products = matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)


TF32 = 2.0**-9  # each factor keeps ten bits after its first; the hardware cuts the others off, it does not round


def largest_number(tensor: Tensor) -> float:
    """Half of the largest number of `tensor`'s dtype: a sum bounded by it stays finite with its rounding errors."""
    return float(torch.finfo(tensor.dtype).max) / 2


def drop(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """Zero the examples that are not kept, NaN and Inf included (0 * NaN would spread them over the sum)."""
    keep = None if keep is None else keep_mask(keep)
    if keep is None:
        return tensor
    if tensor.is_cuda:
        made: Tensor = kernel("kept", tensor)(tensor, keep)
        return made
    return torch.where(keep.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0.0)


def weighted(tensor: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """Examples times their weights [n]; those that are not kept are exactly zero, as with `drop`."""
    if tensor.is_cuda:
        made: Tensor = kernel("weighted", tensor)(tensor, weights, keep)
        return made
    return drop(tensor, keep) * weights.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))


def keep_mask(keep: Tensor) -> Tensor | None:
    """`keep != 0`, or None if all examples are kept; on a GPU always the mask, since reading it back would wait."""
    return None if not keep.is_cuda and bool(keep.all()) else keep.bool()


def norms(tensor: Tensor) -> Tensor:
    """Upper bound on the L2 norm of each example, shape [n], float64.

    Squares of float32 values overflow above 1e19 and vanish below 1e-19, and a long float32 sum drifts (0.7% over 4e7
    values). On a GPU the sum is taken in float64, which is free there. On a CPU float64 costs several times float32, so
    short blocks are summed in float32 and their norms in float64; examples whose squares overflow or may have vanished
    (an input of 1e-25 may well meet an output gradient of 1e25) are computed again in float64. Only those: if all
    were, one example would change the last digits of every other's norm, which adds up over a lot.
    """
    flat = by_example(tensor)
    length = flat.shape[1]
    if length == 0:
        return flat.new_zeros(len(flat), dtype=torch.float64)
    if flat.dtype == torch.float64:
        return row_norms(flat) * (1 + 2.0**-40) + 1e-154 * math.sqrt(length)
    if flat.is_cuda:
        exact: Tensor = kernel("row_norms", flat)(flat)  # in one pass: torch's own copies everything to float64 first
        return exact * (1 + 2.0**-40)
    if length <= _BLOCK:
        measured: Tensor = torch.linalg.vector_norm(flat, dim=1).double()
    else:
        whole = length - length % _BLOCK
        blocks = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), whole // _BLOCK, _BLOCK), dim=2)
        if whole < length:
            blocks = torch.cat([blocks, torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)], 1)
        measured = row_norms(blocks)
    # Vanished squares hide less than 1e-19 an entry: a 1e-7 of any norm that is not computed again.
    least = 1e-12 * math.sqrt(length)
    if len(measured) and not _all_within(measured, least):
        unsure = ~(measured.isfinite() & (measured >= least))
        measured[unsure] = row_norms(flat[unsure])
    return measured * (1 + _BLOCK * 2.0**-25 + 1e-7)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`norms` of each. A GPU is launched once for all that are alike: launching takes longer than such a norm."""
    matrices = [by_example(tensor) for tensor in tensors]
    fast = [matrix.is_cuda and matrix.dtype == torch.float32 and matrix.shape[1] > 0 for matrix in matrices]
    found = {place: norms(matrix) for place, matrix in enumerate(matrices) if not fast[place]}
    for places in alike(
        (place for place in range(len(matrices)) if fast[place]), lambda place: layout(matrices[place])
    ):
        exact: Tensor = kernel("alike_norms", matrices[places[0]])([matrices[place] for place in places])
        found |= zip(places, (exact * (1 + 2.0**-40)).unbind(), strict=True)
    return [found[place] for place in range(len(matrices))]


def alike(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """The items in groups of equal keys, each of as many as one kernel works on at most."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [
        group[start : start + MOST_ALIKE] for group in groups.values() for start in range(0, len(group), MOST_ALIKE)
    ]


def layout(tensor: Tensor) -> Hashable:
    """All that a kernel that works on several tensors takes to be the same of all."""
    return tensor.shape, tensor.stride(), tensor.get_device(), tensor.data_ptr() % 16


def _all_within(values: Tensor, least: float) -> bool:
    """Whether all are finite and at least `least`, in one pass (NaN shows in both extremes)."""
    low, high = values.aminmax()
    return float(low) >= least and float(high) < math.inf


_BLOCK = 1024


def flattened(tensor: Tensor) -> Tensor:
    """[n, entries], of a parameter without dimensions too."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)


def by_example(tensor: Tensor) -> Tensor:
    """[n, entries], those of an example in any order: as they lie in memory, so that they need not be copied."""
    if tensor.ndim > 2 and not tensor.is_contiguous():
        tensor = tensor.permute(0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True))
    return flattened(tensor)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Turn autocast off: norms in float32 would not bound a sum that is taken in bfloat16.

    Also turn off lower precision of products on a CPU, which no bound allows for. On a GPU bounds do (`unit_roundoff`).
    """
    precision = matmul_precision()
    if precision != "highest" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.set_float32_matmul_precision("highest")
        try:
            with exact_arithmetic():
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        yield  # entering and leaving autocast costs several times as much as this check, and a step comes here often
        return
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def squares(tensor: Tensor) -> Tensor:
    """Upper bound on the squared L2 norm of each example, shape [n], float64."""
    return norms(tensor).square()


def bounded_factors(squared: Tensor, *factors: Tensor) -> Tensor:
    """Squared norms [n] of products, infinite where a factor's norm [n] is too large to be multiplied by a weight.

    An input of 3e38 that meets an output gradient of zero has a gradient of zero. Multiplied by its weight it
    overflows, and infinity times zero is NaN in the whole sum. Such an example counts like one that is not finite.
    """
    for factor in factors:
        squared = torch.where(factor < MOST_WEIGHTED, squared, math.inf)
    return squared


def outer_norms(pairs: Sequence[Pair]) -> Tensor:
    """Upper bounds, [3 * pairs + 1, n] in float64: |a_n|, |b_n| and |b_n a_n^T|^2 of each pair, then their sum.

    For pairs on a CPU in float32. The squares are of what is added to a sum, and `bounded_factors`.
    """
    # Squares of float32 are exact in float64; their sum is off by its length in units of the last bit, in any order.
    longest = max(vectors.shape[1] for pair in pairs for vectors in pair if vectors is not None)
    rounding = (1 + 4 * 2.0**-24) ** 2 * (1 + 2.0**-40 + 2 * longest * 2.0**-53)
    found: Tensor = kernel("outer_norms", pairs[0][0])(pairs, MOST_WEIGHTED)
    return found.mul_(rounding)
