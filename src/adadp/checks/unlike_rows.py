"""Examples that are unlike each other: which rows of a batch to take, and what to put in their places.

Rows are made of what the batch holds: zero, larger than anything in it, constant at a value that its leaf has. Integers
are never out of a leaf's own range, where a GPU would stop the process instead of raising an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.checks.containers import chosen

KINDS = ("zero", "large", "own", "ignored", "missing")
IGNORED = -100  # torch's label for "do not count this"


@dataclass(frozen=True)
class Row:
    """One row to be made: that of `source`, as it is or turned into a `kind`."""

    source: int
    kind: str = "own"


def unlike_rows(leaves: Sequence[Any], dims: Sequence[int | None], count: int, wanted: int) -> list[int]:
    """`wanted` rows that differ as much as may be, in an order that is not sorted. Fewer examples are repeated."""
    sums = [_sums(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    found: dict[int, None] = {}
    # What models sort by is a number for each example.
    lengths_first = sorted((total for total in sums if total is not None), key=lambda total: total.ndim)
    for total in lengths_first:
        found[int(total.sum.argmax())] = None
        found[int(total.sum.argmin())] = None
    found = dict.fromkeys(list(found)[: max(2, wanted - 1)])
    for index in range(count):
        if len(found) >= min(wanted, count):
            break
        found[index] = None
    order = list(found)
    if lengths_first:
        order.sort(key=lambda i: float(lengths_first[0].sum[i]))
    rows = [order[i % len(order)] for i in range(wanted)]
    turn = wanted // 2
    return rows[turn:] + rows[:turn]  # each one away from where sorting would put it


@dataclass(frozen=True)
class _RowSums:
    sum: Tensor  # [n], on the CPU
    ndim: int


def _sums(leaf: Any, dim: int | None, count: int) -> _RowSums | None:
    """A number for each row of a leaf, None where it has no rows or all are alike in it."""
    if dim is None:
        return None
    if isinstance(leaf, list):
        values = torch.tensor([float(np.size(v)) if not isinstance(v, Tensor) else float(v.numel()) for v in leaf])
        ndim = 2
    else:
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "bifu" else leaf
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            return None
        rows = tensor.detach().movedim(dim, 0).reshape(count, -1)
        values, ndim = rows.double().nan_to_num().sum(1).cpu(), tensor.ndim
    return None if bool((values == values[0]).all()) else _RowSums(values, ndim)


def with_rows(leaf: Any, dim: int | None, rows: Sequence[Row], name: str) -> Any:
    """A leaf with these rows."""
    some = chosen(leaf, dim, [row.source for row in rows])
    kinds = [row.kind for row in rows]
    if dim is None or all(kind == "own" for kind in kinds):
        return some
    if isinstance(some, list):
        return [
            _of_kind(v, leaf, kind, name) if isinstance(v, Tensor) else v for v, kind in zip(some, kinds, strict=True)
        ]
    if isinstance(some, np.ndarray):
        return some
    for kind in dict.fromkeys(kinds):
        if kind != "own":
            shape = [len(rows) if d == dim else 1 for d in range(some.ndim)]
            place = torch.tensor([own == kind for own in kinds]).view(shape).to(some.device)
            some = torch.where(place, _of_kind(some, leaf, kind, name, dim), some)
    return some


def _of_kind(row: Tensor, leaf: Any, kind: str, name: str, dim: int | None = None) -> Tensor:
    """A row (with `dim`: all rows of a tensor) of a kind; as it is where the kind means nothing for its numbers."""
    seen = leaf.detach() if isinstance(leaf, Tensor) else torch.cat([v.detach().reshape(-1) for v in leaf])
    if kind == "own" or not seen.numel() or row.is_complex():
        return row
    if row.is_floating_point():
        if kind == "ignored":
            return row
        if kind == "missing":
            return torch.full_like(row, float("nan"))
        return row * 0 if kind == "zero" else row.nan_to_num(0.0, 0.0, 0.0) + _beyond(seen)
    if kind == "ignored":
        return _mostly_ignored(row, seen, name, dim)
    if kind == "missing":
        return row
    value = seen.min() if kind == "zero" else seen.max()
    return value.expand_as(row)


def _beyond(seen: Tensor) -> Tensor:
    return 1 + 2 * seen.nan_to_num(0.0, 0.0, 0.0).abs().max()


def _mostly_ignored(row: Tensor, seen: Tensor, name: str, dim: int | None) -> Tensor:
    """Labels that count in one place alone, for leaves that look like labels."""
    if row.dtype == torch.bool or row.ndim < (1 if dim is None else 2) or not row.dtype.is_signed:
        return row
    present = bool((seen == IGNORED).any())
    if not present and not (name == "labels" and not row.is_cuda):
        return row
    labels = row.clone() if dim is None else row.movedim(dim, 0).clone()
    labels[..., :-1] = IGNORED
    return labels if dim is None else labels.movedim(0, dim)


def all_differ(leaves: Sequence[Any], others: Sequence[Any], dims: Sequence[int | None], places: Sequence[int]) -> bool:
    """Whether every one of these places holds something else in some leaf."""
    changed = dict.fromkeys(places, False)
    for leaf, other, dim in zip(leaves, others, dims, strict=True):
        if dim is None:
            continue
        for place in places:
            changed[place] = changed[place] or not _same(leaf, other, dim, place)
    return all(changed.values())


def _same(leaf: Any, other: Any, dim: int, place: int) -> bool:
    if isinstance(leaf, list):
        one, two = leaf[place], other[place]
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            return one.shape == two.shape and torch.equal(one, two)
        return bool(np.all(one == two))
    if isinstance(leaf, np.ndarray):
        return bool(np.array_equal(leaf.take(place, dim), other.take(place, dim)))
    return torch.equal(leaf.select(dim, place), other.select(dim, place))


def splits(count: int) -> Iterator[list[int]]:
    """Sets of places to keep: for each two there is one that keeps the first and not the second."""
    for bit in range((count - 1).bit_length()):
        for side in (0, 1):
            yield [place for place in range(count) if place >> bit & 1 == side]


def replaced(rows: Sequence[Row], kept: Sequence[int], kind: str) -> list[Row]:
    """The rows with all but the kept ones replaced: by copies of those, so that no sum over all stays the same."""
    stay = [rows[place].source for place in kept]
    return [
        row
        if place in kept
        else Row(next((s for s in stay[place % len(stay) :] + stay if s != row.source), row.source), kind)
        for place, row in enumerate(rows)
    ]
