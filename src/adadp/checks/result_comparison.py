"""Compares the results of two runs, example by example, at the precision in which they were computed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def coarse(module: nn.Module) -> float:
    """Relative difference that rounding alone may cause when the number of rows changes, in the run's precision."""
    halves = [p.dtype for p in module.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    halves += [torch.get_autocast_dtype(device) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    return max([1e-2, *(16 * torch.finfo(dtype).eps for dtype in halves)])


def one_row_less(one: Tensor, less: Tensor, count: int, dimensions: Iterable[int]) -> bool:
    """Whether a tensor has `count` rows, and one row less in a run with one example less."""
    return any(
        one.ndim > d and less.ndim > d and one.shape[d] == count and less.shape[d] == count - 1 for d in dimensions
    )


def example_dimension(one: Tensor, less: Tensor) -> int | None:
    """The dimension of examples: the one that is shorter by one in a run with one example less.

    A dimension that has the same length by chance, such as the layers of a recurrent network, does not shrink.
    """
    if one.ndim != less.ndim:
        return None
    return next((d for d in range(one.ndim) if one.shape[d] == less.shape[d] + 1), None)


@dataclass(frozen=True)
class ExampleAxis:
    """Where examples are in a tensor: in dimension `dim`, alone or folded with `each` tokens ([n * each, ...])."""

    dim: int
    each: int = 1
    examples_first: bool = True

    def unfolded(self, tensor: Tensor) -> Tensor:
        """The tensor with examples in the first dimension."""
        if self.each == 1:
            return tensor.movedim(self.dim, 0)
        sizes = (-1, self.each) if self.examples_first else (self.each, -1)
        shape = (*tensor.shape[: self.dim], *sizes, *tensor.shape[self.dim + 1 :])
        return tensor.reshape(shape).movedim(self.dim + (not self.examples_first), 0)


def example_axis(one: Tensor, less: Tensor, count: int, examples_first: bool) -> ExampleAxis | None:
    """Where the `count` examples of `one` are, given the result of a run with one example less. None if unknown."""
    dim = example_dimension(one, less)
    if dim is not None:
        return ExampleAxis(dim)
    if one.ndim != less.ndim:
        return None
    other = [d for d in range(one.ndim) if one.shape[d] != less.shape[d]]
    if len(other) == 1 and one.shape[other[0]] * (count - 1) == less.shape[other[0]] * count:
        return ExampleAxis(other[0], one.shape[other[0]] // count, examples_first)
    return None


def example_axes(
    one: Tensor, other: Tensor, count: int, examples_first: bool
) -> tuple[ExampleAxis, ExampleAxis] | None:
    """Where the `count` examples are in two results whose sequences may differ in length. None if unknown."""
    if one.ndim != other.ndim:
        return None
    for dim in (0,) if examples_first else (1, 0):
        if one.ndim > dim and one.shape[dim] == other.shape[dim] == count:
            return ExampleAxis(dim), ExampleAxis(dim)
    if one.ndim and not one.shape[0] % count and not other.shape[0] % count and one.shape[0] != other.shape[0]:
        return (
            ExampleAxis(0, one.shape[0] // count, examples_first),
            ExampleAxis(0, other.shape[0] // count, examples_first),
        )
    return None


def differs(
    one: Tensor, other: Tensor, dim: int | None, kept: Collection[int], relative: float = 1e-4, least: float = 0.0
) -> bool:
    """Whether two results of the same shape differ for any of the examples that were `kept`."""
    if dim is None or one.shape != other.shape:
        return False
    rows = torch.tensor(sorted(kept), device=one.device)
    first, second = one.index_select(dim, rows), other.index_select(dim, rows)
    if torch.equal(first, second):
        return False  # the usual case, and faster to see
    if not first.is_floating_point():
        return not torch.equal(first, second)
    absolute = max(relative * 1e-2 * min(largest_finite(first, 1.0), 1.0), least)  # small results: at their own size
    return not torch.allclose(first, second, rtol=relative, atol=absolute, equal_nan=True)


def largest_finite(tensor: Tensor, default: float) -> float:
    """The largest finite absolute value; `default` where there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else default


def padded_alike(one: Tensor, other: Tensor, relative: float, least: float) -> bool:
    """Whether two results of one example agree where both have entries: at the start, or at the end (left padding)."""
    if one.ndim != other.ndim:
        return False
    lengths = [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]

    def close(first: Tensor, second: Tensor) -> bool:
        if not first.is_floating_point():
            return torch.equal(first, second)
        absolute = max(relative * largest_finite(first, 1.0), least)
        return torch.allclose(first, second, rtol=relative, atol=absolute, equal_nan=True)

    if close(_front(one, lengths), _front(other, lengths)):
        return True
    return one.shape != other.shape and close(_end(one, lengths), _end(other, lengths))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(
        one.isnan(), other.isnan()
    )  # fmt: skip


def common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """What two tensors of as many dimensions both have: the first entries of each dimension."""
    if one.ndim != other.ndim:
        return one, other
    lengths = [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
    return _front(one, lengths), _front(other, lengths)


def _front(tensor: Tensor, lengths: Iterable[int]) -> Tensor:
    return tensor[tuple(slice(0, length) for length in lengths)]


def _end(tensor: Tensor, lengths: Iterable[int]) -> Tensor:
    return tensor[tuple(slice(size - length, size) for size, length in zip(tensor.shape, lengths, strict=True))]
