"""The rows that trials run on: examples that differ much from each other, and what is put in their places.

Private rows are replaced by values made of their own batch: zeros, values larger than any in it, NaN. Integers never
leave the range of their leaf: an index out of range stops a GPU process instead of raising an error.

Synthetic rows are made of shapes and dtypes alone, so that a refusal on them says nothing about anybody's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.checks.containers import Arguments, chosen

KINDS = ("zero", "large", "own", "ignored", "missing")
IGNORED = -100  # the label that torch's cross entropy leaves out
#: How many synthetic rows: a number that is rarely a length inside a model.
SYNTHETIC = 7


@dataclass(frozen=True)
class Row:
    """A row to be made: row `source` of the batch as it is ("own"), or turned into another `kind`."""

    source: int
    kind: str = "own"


# ---- rows of a batch -------------------------------------------------------------------------------------------------


def unlike_rows(arguments: Arguments, wanted: int) -> list[int]:
    """`wanted` rows that differ as much as possible, in an order that is not sorted. Too few examples are repeated."""
    sums = [_row_sums(leaf, dim, arguments.count) for leaf, dim in arguments.pairs()]
    found: dict[int, None] = {}
    # Leaves with one number for each example come first: a length, for instance, by which models sort.
    lengths_first = sorted((total for total in sums if total is not None), key=lambda total: total.ndim)
    for total in lengths_first:
        found[int(total.sum.argmax())] = None
        found[int(total.sum.argmin())] = None
    found = dict.fromkeys(list(found)[: max(2, wanted - 1)])
    for index in range(arguments.count):
        if len(found) >= min(wanted, arguments.count):
            break
        found[index] = None
    order = list(found)
    if lengths_first:
        order.sort(key=lambda i: float(lengths_first[0].sum[i]))
    rows = [order[i % len(order)] for i in range(wanted)]
    turn = wanted // 2
    return rows[turn:] + rows[:turn]  # no row is where sorting would put it


@dataclass(frozen=True)
class _RowSums:
    sum: Tensor  # [n], on the CPU
    ndim: int


def _row_sums(leaf: Any, dim: int | None, count: int) -> _RowSums | None:
    """A number for each row of a leaf; None where it has no rows or the number is the same for all."""
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


def splits(count: int) -> Iterator[list[int]]:
    """Sets of rows to keep. For every ordered pair (i, j), some set keeps i and not j."""
    for bit in range((count - 1).bit_length()):
        for side in (0, 1):
            yield [place for place in range(count) if place >> bit & 1 == side]


def replaced(rows: Sequence[Row], kept: Sequence[int], kind: str) -> list[Row]:
    """The rows with all but the kept ones replaced by copies of kept ones (so that sums over the batch change too)."""
    stay = [rows[place].source for place in kept]
    return [
        row
        if place in kept
        else Row(next((s for s in stay[place % len(stay) :] + stay if s != row.source), row.source), kind)
        for place, row in enumerate(rows)
    ]


def all_differ(leaves: Sequence[Any], others: Sequence[Any], dims: Sequence[int | None], places: Sequence[int]) -> bool:
    """Whether each of these rows differs in some leaf."""
    pairs = [(leaf, other, dim) for leaf, other, dim in zip(leaves, others, dims, strict=True) if dim is not None]
    return all(any(not _same(leaf, other, dim, place) for leaf, other, dim in pairs) for place in places)


def _same(leaf: Any, other: Any, dim: int, place: int) -> bool:
    if isinstance(leaf, list):
        one, two = leaf[place], other[place]
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            return one.shape == two.shape and torch.equal(one, two)
        return bool(np.all(one == two))
    if isinstance(leaf, np.ndarray):
        return bool(np.array_equal(leaf.take(place, dim), other.take(place, dim)))
    return torch.equal(leaf.select(dim, place), other.select(dim, place))


# ---- what is put in their places -------------------------------------------------------------------------------------


def with_rows(leaf: Any, dim: int | None, rows: Sequence[Row], name: str) -> Any:
    """A leaf that holds these rows. `name` is the key it was found under: "labels" may hold ignored labels."""
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
    """One row (with `dim`: all rows of a tensor) turned into a kind; unchanged where its dtype has no such kind."""
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
    """All labels but the last are ignored, for leaves that look like labels."""
    if row.dtype == torch.bool or row.ndim < (1 if dim is None else 2) or not row.dtype.is_signed:
        return row
    present = bool((seen == IGNORED).any())
    if not present and not (name == "labels" and not row.is_cuda):
        return row
    labels = row.clone() if dim is None else row.movedim(dim, 0).clone()
    labels[..., :-1] = IGNORED
    return labels if dim is None else labels.movedim(0, dim)


# ---- rows that hold nobody's data ------------------------------------------------------------------------------------


def synthetic(arguments: Arguments, count: int) -> Arguments | None:
    """The same arguments with `count` synthetic rows in each leaf. None where a leaf with rows is no tensor.

    Floats are normal; integers are 0 or 1, which every embedding and every set of classes has; booleans are random.
    """
    generator = torch.Generator().manual_seed(0)
    leaves: list[Any] = []
    for leaf, dim in arguments.pairs():
        if dim is None:
            leaves.append(leaf)
            continue
        if not isinstance(leaf, Tensor):
            return None
        shape = [count if d == dim else size for d, size in enumerate(leaf.shape)]
        real = leaf.is_floating_point() or leaf.is_complex()
        drawn = torch.randn(shape, generator=generator) if real else torch.randint(2, shape, generator=generator)
        leaves.append(drawn.to(leaf.device, leaf.dtype))
    return arguments.with_leaves(leaves, count)
