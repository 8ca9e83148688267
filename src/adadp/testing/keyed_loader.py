"""A loader of a world: its lots, the randomness in its items and in its collate function are drawn by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from adadp.accounting.events import Event
from adadp.randomness import Randomness
from adadp.sampling.schemes import Poisson, Sampling
from adadp.testing.changed_dataset import READS
from adadp.testing.keyed_draws import RowOwners, generators_kept, seed_everything, seed_of, uniform

if TYPE_CHECKING:
    from adadp.testing.world import WatchedRun, World


class KeyedLots(Sampling):
    """Lots keyed by their number and the examples' indices, so that both worlds draw the same other examples.

    Poisson: the second world's lots have the example in addition. Fixed size: the example's index is in the lots of
    both worlds, and the item there differs.
    """

    def __init__(self, world: World, run: WatchedRun, sampling: Sampling) -> None:
        super().__init__(sampling.examples, sampling.lot)
        self._world, self._run, self._sampling = world, run, sampling
        self.name, self.neighbours, self.reasons = sampling.name, sampling.neighbours, sampling.reasons

    @property
    def capacity(self) -> int:
        return self._sampling.capacity

    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        world, run = self._world, self._run
        coins = uniform(seed_of(world.key, run.number, "coins", lot), (self.examples,))
        holds = world.holds(lot)
        if isinstance(self._sampling, Poisson):
            chosen = coins < self._sampling.rate
            chosen[run.always] = True
            chosen[run.places] = False
            self._fill_pieces(chosen, lot)
            chosen[run.places] = holds and world.inside
            drawn = np.flatnonzero(chosen)
        else:
            coins[run.always] -= 1
            coins[run.places] = coins[run.places] - 1 if holds else coins[run.places] + 1
            drawn = np.argsort(coins)[: self.lot]
            drawn = drawn[np.argsort(uniform(seed_of(world.key, run.number, "order", lot), (self.examples,))[drawn])]
        run.sizes[lot] = len(drawn)
        self.current = lot
        return torch.as_tensor(drawn)

    def _fill_pieces(self, chosen: np.ndarray[Any, np.dtype[np.bool_]], lot: int) -> None:
        """In every third lot let the others fill whole microbatches, so that the example needs one more."""
        size = self._run.loader.max_physical_batch_size
        if size and lot % 3 == 1:
            others = np.flatnonzero(chosen)
            chosen[others[len(others) - len(others) % size :]] = len(others) < size

    def event(self, noise_multiplier: float) -> Event:
        return self._sampling.event(noise_multiplier)


class KeyedItems(Dataset[Any]):
    """The items that a loader reads, with augmentation keyed by lot and index."""

    def __init__(self, world: World, run: WatchedRun, dataset: Any) -> None:
        self._world, self._run, self._dataset = world, run, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        world, draws = self._world, self._world.draws
        rows, draws.rows = draws.rows, None
        with generators_kept():
            seed_everything(world.key, self._run.number, "item", _lot(self._run), index)
            READS.clear()
            try:
                return index, self._dataset[index]
            finally:
                for read in READS:
                    self._run.readers.setdefault(read, set()).add(index)
                draws.rows = rows


class KeyedCollate:
    """The loop's own collate function, with what it draws for a row keyed by the row's example."""

    def __init__(self, world: World, run: WatchedRun, collate: Callable[[Any], Any]) -> None:
        self._world, self._run, self._collate = world, run, collate

    def __call__(self, fetched: list[tuple[int, Any]]) -> Any:
        world, draws, lot = self._world, self._world.draws, _lot(self._run)
        indices = tuple(index for index, _ in fetched)
        rows, draws.rows = draws.rows, RowOwners(indices, (self._run.number, -1 - lot))
        items = [item for _, item in fetched]
        with generators_kept():
            seed_everything(world.key, self._run.number, "collate", lot)
            try:
                batch = self._collate(list(items))
            finally:
                draws.rows = rows
        world.orders[indices] = _order(indices, items, batch)
        return batch


def _lot(run: WatchedRun) -> int:
    """The lot that is being fetched."""
    return int(getattr(run.loader.sampling, "current", 0))


def _order(indices: tuple[int, ...], items: Sequence[Any], batch: Any) -> tuple[int, ...]:
    """The index of the example in each row, since collate may have sorted rows. Unsorted where it cannot be known."""
    columns = [
        leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(indices)
    ]
    parts = [[leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)] for item in items]
    for column in columns:
        for part in range(min((len(each) for each in parts), default=0)):
            wanted = [each[part] for each in parts]
            if any(leaf.ndim != column.ndim - 1 or leaf.dtype != column.dtype for leaf in wanted):
                continue
            if all(_starts(row, leaf) for row, leaf in zip(column, wanted, strict=True)):
                return indices
            free, found = list(range(len(indices))), []
            for row in column:
                # The longest that fits: a short example may be the beginning of a longer one.
                fits = [place for place in free if _starts(row, wanted[place])]
                if not fits:
                    break
                best = max(fits, key=lambda place: wanted[place].numel())
                free.remove(best)
                found.append(indices[best])
            if len(found) == len(indices):
                return tuple(found)
    return indices


def _starts(row: Tensor, leaf: Tensor) -> bool:
    """Whether a row of a batch, which may be padded, begins with this tensor of an item."""
    if any(size > room for size, room in zip(leaf.shape, row.shape, strict=True)):
        return False
    return torch.equal(row[tuple(slice(size) for size in leaf.shape)], leaf)


__all__ = ["KeyedCollate", "KeyedItems", "KeyedLots"]
