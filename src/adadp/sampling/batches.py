"""A batch as rows: filling it up, and taking some of its rows, whatever containers it comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from adadp.errors import ConfigurationError


def row_dimension(leaf: Tensor, count: int, batch_first: bool) -> int | None:
    """The dimension of `leaf` that holds the `count` examples, None if there is none."""
    order = (0,) if batch_first else (1, 0)
    return next((d for d in order if leaf.ndim > d and leaf.shape[d] == count), None)


def map_rows(batch: Any, count: int, batch_first: bool, change: Callable[[Tensor, int], Tensor], what: str) -> Any:
    """Return `batch` with each leaf that holds `count` rows replaced by `change(leaf, dimension of the rows)`.

    A list with one entry for each example is treated alike: `change` is applied to the row numbers, and the list's
    entries are picked by the result. None stays. Anything else is refused, because a leaf without rows may depend on
    all examples; the error begins with `what`, which says what could not be done.
    """

    def refuse(kind: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what}: a {kind} in the batch does not have one row for each example. Let collate return tensors whose "
            "first dimension is the batch, and lists with one entry for each example."
        )

    def changed(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, Tensor):
            dimension = row_dimension(part, count, batch_first)
            if dimension is None:
                raise refuse(f"tensor of {part.ndim} dimensions")
            return change(part, dimension)
        if isinstance(part, Mapping):
            kept = {key: changed(value) for key, value in part.items()}
            return kept if type(part) is dict else type(part)(kept)  # type: ignore[call-arg]
        if isinstance(part, list | tuple):
            if len(part) == count and not all(_has_rows(value) for value in part):
                numbers = change(torch.arange(count), 0).tolist()
                return type(part)(part[number] for number in numbers)
            values = [changed(value) for value in part]
            return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
        raise refuse(type(part).__name__)

    def _has_rows(part: Any) -> bool:
        """Whether this is a part of the batch with rows of its own, rather than one example's entry."""
        if isinstance(part, Tensor):
            return row_dimension(part, count, batch_first) is not None
        if isinstance(part, Mapping):
            return all(_has_rows(value) for value in part.values())
        return isinstance(part, list | tuple) and len(part) == count

    return changed(batch)


def filled_up(batch: Any, count: int, size: int, batch_first: bool) -> Any:
    """The batch with `size` rows: its first row stands in for those that are missing. They are not to be counted."""
    if size == count:
        return batch

    def repeat(leaf: Tensor, dimension: int) -> Tensor:
        first = leaf.narrow(dimension, 0, 1)
        more = first.expand(*[size - count if d == dimension else -1 for d in range(leaf.ndim)])
        return torch.cat([leaf, more], dimension)

    return map_rows(batch, count, batch_first, repeat, "a batch cannot be filled up to one size (pad_lots=True)")


def some_rows(batch: Any, count: int, start: int, size: int, batch_first: bool) -> Any:
    """Rows `start` to `start + size` of the batch."""
    if size == count:
        return batch
    return map_rows(
        batch, count, batch_first, lambda leaf, dimension: leaf.narrow(dimension, start, size),
        "a lot cannot be cut into parts (max_physical_batch_size=)",
    )  # fmt: skip
