"""The trial of a collate function: row i of its batch may depend on item i only, except for padding.

Items are replaced, left out, made longer and shorter, and the rows of the others are compared. Every call gets the same
random numbers; leaves that depend on them are compared only where both calls draw alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from adadp.checks.containers import Parts, chosen, dimension, take_apart
from adadp.checks.dataset_items import copied, fetched, halved, length, lengthened
from adadp.checks.result_comparison import padded_alike
from adadp.checks.seeds import seeded
from adadp.errors import ConfigurationError

MIXES = (
    "the collate function mixes examples: what it makes of one item changes with the others (mixup, packing several "
    "items into one row, items that are dropped or cut to the shortest). Let it make one row of each item, padded at "
    "most, and do the rest inside the dataset, item by item."
)
MOVES = (
    "the collate function gives rows in another order than their items (it sorts them, for instance). With unit= or "
    "augmentations=, rows that belong together are told by their places: one person's rows would count for several. "
    "Keep the order of the items; pack_padded_sequence needs no sorting with enforce_sorted=False"
)
_UNTRIED = (
    "the collate function could not be tried on a few items, replaced, left out and made longer: it is not known "
    "whether it makes each row of one item alone"
)
_RANDOM = "the collate function draws random numbers: what they decide was tried with items of the same length alone"
_WHOLE = "the collate function gives values of the whole batch, which may change with any of its items"

#: With how many seeds to look for leaves that depend on random numbers: a rare masking of tokens needs many.
_REDRAWS = 24
#: On how many items to look for rows that are moved.
_MOVED = 16


@dataclass(frozen=True)
class Recollated:
    """The batch that a collate function makes of a few items, and of the same with one item (`changed`) longer."""

    base: Parts
    longer: Parts | None
    changed: int
    random: tuple[bool, ...]  # which leaves depend on random numbers
    rows: int


class CollateWatch:
    """Tries a run's collate function, once for each stage of the schedule. Notes go to `untried`.

    With `ordered`, rows must also come in the order of their items.
    """

    def __init__(
        self,
        collate: Callable[..., Any] | None,
        dataset: Any,
        public_items: list[Any] | None,
        dimensions: Sequence[int],
        untried: dict[str, str],
        ordered: bool = False,
    ) -> None:
        self._ordered = ordered
        self._collate = None if collate is default_collate or dataset is None else collate
        self._dataset, self._public_items = dataset, public_items
        self._dimensions, self._untried = dimensions, untried
        self._last: tuple[int, Recollated | None] | None = None  # the stage of the last trial, and its result
        self._refused: str | None = None

    def recollated(self, indices: Sequence[int], stage: int) -> Recollated | None:
        """The result of the trial of this stage, on public items or those at `indices`. None without a result."""
        if self._refused is not None:
            raise ConfigurationError(self._refused)
        distinct = list(dict.fromkeys(indices))[: _MOVED if self._ordered else 5]  # views are one index several times
        if self._collate is None or len(distinct) < 2:
            return None
        if self._last is None or self._last[0] < stage:
            try:
                with seeded(0):
                    known = self._public_items
                    items = fetched(self._dataset, distinct) if known is None else known[:_MOVED]
                if self._ordered:
                    refuse_moved(self._collate, items, self._dimensions, self._untried)
                trial = CollateTrial(self._collate, items[:5], self._dimensions)
                self._last = stage, trial.recollated()
            except ConfigurationError as error:
                self._refused = str(error)
                raise
            self._untried |= trial.untried
        return self._last[1]


def refuse_moved(
    collate: Callable[..., Any], items: Sequence[Any], dimensions: Sequence[int], untried: dict[str, str]
) -> None:
    """Raise where rows do not come in the order of their items, which are turned round, also with one made longer."""

    def made(some: Sequence[Any], seed: int = 0) -> Parts:
        with seeded(seed):
            return take_apart(collate(copied(some)), len(some))

    last = len(items) - 1
    longer = [[*items[:place], item, *items[place + 1 :]] for place in (0, last) for item in lengthened(items[place])]
    for number, given in enumerate((list(items), *longer)):
        try:
            one, other = made(given), made(given[::-1])
            pairs = list(zip(one.leaves, other.leaves, strict=True))
        except Exception:  # longer items may not be taken
            untried |= {} if number else {"collate": _UNTRIED}
            continue
        for place, (leaf, turned) in enumerate(pairs):
            dim = dimension(leaf, len(given), dimensions)
            if dim is None or _same_rows(leaf, turned, dim, range(last, -1, -1)):
                continue
            redrawn = (made(given, seed).leaves[place] for seed in range(1, _REDRAWS))
            if all(_same_rows(leaf, again, dim, range(last + 1)) for again in redrawn):  # it is not chance
                raise ConfigurationError(MOVES)


def _same_rows(leaf: Any, other: Any, dim: int, places: Sequence[int]) -> bool:
    """Whether row i of `leaf` is row `places[i]` of the other."""
    if _rows(other, dim) != len(places):
        return False
    return all(_alike(_row(leaf, dim, row), _row(other, dim, place)) for row, place in enumerate(places))


class CollateTrial:
    """One trial of a collate function, on a few items of a lot."""

    def __init__(self, collate: Callable[..., Any], items: Sequence[Any], dimensions: Sequence[int]) -> None:
        spare = len(items) > 2
        self._collate, self._dimensions = collate, dimensions
        self._items, self._spare = (list(items[:-1]), items[-1]) if spare else (list(items), items[0])
        self.untried: dict[str, str] = {}
        self._order: list[int] | None = None  # in the last comparison: where each row is now, if rows moved

    def recollated(self) -> Recollated | None:
        """Raise where the function mixes items. None where it could not be tried; `untried` then says so."""
        try:
            base, again, *redrawn = (self._made(self._items, seed) for seed in (0, *range(_REDRAWS)))
        except Exception:
            self.untried["collate"] = _UNTRIED
            return None
        self._dims = [dimension(leaf, len(self._items), self._dimensions) for leaf in base.leaves]
        if base.unknown or not all(_same_form(base, other) for other in (again, *redrawn)):
            self.untried["collate"] = _UNTRIED
            return None
        if all(dim is None for dim in self._dims):
            raise ConfigurationError(MIXES)
        everywhere = list(range(len(self._items)))
        # Differs although the seed is the same: drawn from a generator of its own, which is not seeded here.
        self._unseeded = [not self._leaf_alike(place, base, again, everywhere) for place in range(len(base.leaves))]
        self._random = [
            not all(self._leaf_alike(place, base, other, everywhere) for other in (again, *redrawn))
            for place in range(len(base.leaves))
        ]
        self._replace(base)
        longer, changed = self._lengthen(base)
        self._shorten(base)
        return Recollated(base, longer, changed, tuple(self._random), len(self._items))

    def _made(self, items: Sequence[Any], seed: int = 0) -> Parts:
        with seeded(seed):
            return take_apart(self._collate(copied(items)), len(items))

    def _replace(self, base: Parts) -> None:
        last, rest = len(self._items) - 1, self._items
        changes = [([*rest[:-1], self._spare], list(range(last)), seed) for seed in (0, 2, 3)]
        changes.append(([self._spare, *rest[1:]], list(range(1, last + 1)), 0))
        if last > 1:
            changes.append((rest[1:], list(range(1, last + 1)), 0))
        for number, (items, kept, seed) in enumerate(changes):
            try:
                before = base if seed == 0 else self._made(self._items, seed)
                made = self._made(items, seed)
            except Exception:
                self.untried["collate"] = _UNTRIED
                continue
            # After a changed item, numbers that are drawn item by item are others: only the last item may change.
            self._refuse(before, made, kept, drawn_alike=number < 3, missing=len(rest) - len(items))

    def _lengthen(self, base: Parts) -> tuple[Parts | None, int]:
        """The batch with its longest item made longer, if the function takes such items."""
        lengths = [length(item) for item in self._items]
        place = lengths.index(max(lengths))
        kept = [row for row in range(len(self._items)) if row != place]
        for made in self._with_item(base, place, lengthened(self._items[place])):
            if any(_shape(one) != _shape(other) for one, other in zip(base.leaves, made.leaves, strict=True)):
                self._refuse(base, made, kept, drawn_alike=False)
                if self._order is not None:  # the rows in the order that the unchanged batch has
                    leaves = zip(made.leaves, self._dims, strict=True)
                    made = replace(made, leaves=[chosen(leaf, dim, self._order) for leaf, dim in leaves])
                return made, place
        return None, place

    def _with_item(self, base: Parts, place: int, items: Iterator[Any]) -> Iterator[Parts]:
        """The batches with each of these items in one place, where the function takes it and returns the same form."""
        for item in items:
            try:
                made = self._made([*self._items[:place], item, *self._items[place + 1 :]])
            except Exception:
                continue
            if _same_form(base, made):
                yield made

    def _shorten(self, base: Parts) -> None:
        """Raise where making one item shorter, which is not the longest, cuts off something of the others."""
        lengths = [length(item) for item in self._items]
        place = lengths.index(min(lengths))
        if lengths.count(max(lengths)) == 1 and lengths[place] == max(lengths):
            return
        kept = [row for row in range(len(self._items)) if row != place]
        made = next(self._with_item(base, place, halved(self._items[place])), None)
        if made is None:
            return
        self._refuse(base, made, kept, drawn_alike=False)
        for one, other, dim in zip(base.leaves, made.leaves, self._dims, strict=True):
            if dim is not None and any(a > b for a, b in zip(_shape(one), _shape(other), strict=False)):
                raise ConfigurationError(MIXES)

    def _refuse(self, base: Parts, made: Parts, kept: Sequence[int], drawn_alike: bool, missing: int = 0) -> None:
        self._order = None
        if not _same_form(base, made):
            self.untried["collate"] = _UNTRIED
            return
        compared = []
        for place, (one, other, dim) in enumerate(zip(base.leaves, made.leaves, self._dims, strict=True)):
            if dim is None:
                if _shape(one) == _shape(other) and not _alike(one, other):
                    self.untried["collate"] = _WHOLE
                continue
            if self._unseeded[place]:
                self.untried["random collate"] = _RANDOM
                continue
            if self._random[place] and (not drawn_alike or _row_shape(one, dim) != _row_shape(other, dim)):
                if _row_shape(one, dim) != _row_shape(other, dim):
                    self.untried["random collate"] = _RANDOM
                continue
            compared.append(place)
        if all(self._leaf_alike(place, base, made, kept, missing) for place in compared):
            return
        # A function may sort its rows, by length for instance: then each is found in another place.
        self._order = self._found_elsewhere(base, made, compared, len(kept))
        if self._order is None:
            raise ConfigurationError(MIXES)

    def _found_elsewhere(self, base: Parts, made: Parts, places: Sequence[int], enough: int) -> list[int] | None:
        """For each row of `base` the equal row of `made`, or one left over; None if fewer than `enough` are equal."""
        dims = [self._dims[place] for place in places]
        before, after = ([parts.leaves[place] for place in places] for parts in (base, made))
        counts = {_rows(leaf, dim) for leaf, dim in zip(after, dims, strict=True) if dim is not None}
        if len(counts) != 1:
            return None
        free = list(range(counts.pop()))
        order: list[int | None] = []
        for row in range(len(self._items)):

            def same(other: int, row: int = row) -> bool:
                return all(
                    dim is None or _alike(_row(one, dim, row), _row(two, dim, other))
                    for one, two, dim in zip(before, after, dims, strict=True)
                )

            found = next((other for other in free if same(other)), None)
            order.append(found)
            if found is not None:
                free.remove(found)
        if sum(found is not None for found in order) < enough:
            return None
        return [found if found is not None else (free.pop(0) if free else 0) for found in order]

    def _leaf_alike(self, place: int, base: Parts, made: Parts, kept: Sequence[int], missing: int = 0) -> bool:
        one, other, dim = base.leaves[place], made.leaves[place], self._dims[place]
        if dim is None:
            return _shape(one) == _shape(other) and _alike(one, other)
        if max(kept) >= min(_rows(one, dim), _rows(other, dim) + missing):
            return False
        return all(_alike(_row(one, dim, row), _row(other, dim, row - missing)) for row in kept)


def _same_form(one: Parts, other: Parts) -> bool:
    return one.names == other.names and len(one.leaves) == len(other.leaves)


def _row(leaf: Any, dim: int, row: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.select(dim, row)
    return leaf[row] if isinstance(leaf, list) else leaf.take(row, dim)


def _rows(leaf: Any, dim: int) -> int:
    return len(leaf) if isinstance(leaf, list) else int(leaf.shape[dim])


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, Tensor | np.ndarray) else ()


def _row_shape(leaf: Any, dim: int) -> tuple[int, ...]:
    shape = _shape(leaf)
    return shape[:dim] + shape[dim + 1 :]


def _alike(one: Any, other: Any) -> bool:
    """Whether two rows are equal except for padding."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype.kind not in "bifu" or other.dtype.kind not in "bifu":
            return bool(np.array_equal(one, other))
        one, other = torch.from_numpy(one), torch.from_numpy(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and padded_alike(one, other, 1e-5, 0.0)
    try:
        return bool(one == other)
    except Exception:
        return True  # such objects cannot be compared
