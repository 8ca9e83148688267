"""The user's dataset with some items replaced: what the training function is given in each world."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from adadp.errors import ConfigurationError

READS: list[int] = []
"""Indices of items that were read, in order. `KeyedItems` empties it before each item that a loader reads."""


@dataclass(frozen=True)
class Change:
    """What differs from the user's dataset: `items` by index, and `all_others`, if not None, at every other index."""

    items: Mapping[int, Any] = field(default_factory=dict)
    all_others: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.items.get(index, self.all_others)


class ChangedDataset(Dataset[Any]):
    """A dataset of any class with a change. Attributes (classes, transforms) are those of the original."""

    def __init__(self, dataset: Any, change: Change) -> None:
        self._dataset, self._change = dataset, change

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[int(index)]
        READS.append(place)
        item = self._change[place]
        # A copy: a loop that works in place must not change the item of the other world.
        return self._dataset[place] if item is None else copy.deepcopy(item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Tensors(TensorDataset):
    """A TensorDataset that notes which rows are read."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        if isinstance(index, int):
            READS.append(range(len(self))[index])
        return tuple(tensor[index] for tensor in self.tensors)


class _List(list[Any]):
    """A list that notes which items are read."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            READS.append(range(len(self))[index])
        return super().__getitem__(index)


def with_changes(dataset: Any, change: Change) -> Any:
    """`dataset` with the change: again a TensorDataset or a list where it is one."""
    if type(dataset) is TensorDataset:
        return _Tensors(*(_replaced(tensor, column, change) for column, tensor in enumerate(dataset.tensors)))
    if isinstance(dataset, list):
        return _List(copy.deepcopy(item if change[i] is None else change[i]) for i, item in enumerate(dataset))
    return ChangedDataset(dataset, change)


def _replaced(tensor: Tensor, column: int, change: Change) -> Tensor:
    changed = tensor.clone()
    if change.all_others is not None:
        changed[:] = change.all_others[column]
    for index, item in change.items.items():
        row = torch.as_tensor(item[column])
        if row.shape != tensor.shape[1:]:
            raise ConfigurationError(
                f"an example's part {column} has shape {list(row.shape)}, those of this TensorDataset have "
                f"{list(tensor.shape[1:])}: give the function a dataset whose items may differ in size"
            )
        changed[index] = row
    return changed


def items_of(dataset: Any, count: int) -> list[int]:
    """For each index of a loader's `dataset`: which of the `count` items given to the function it is.

    `Subset`s are followed. Any other wrapper is assumed to keep item i at index i.
    """
    if isinstance(dataset, Subset):
        inside = items_of(dataset.dataset, count)
        return [inside[int(index)] for index in dataset.indices if int(index) < len(inside)]
    return list(range(min(count, len(dataset))))


def places_of(dataset: Any, target: int) -> list[int]:
    """The indices in a loader's `dataset` of the item `target` that the function was given."""
    if isinstance(dataset, Subset):
        inside = set(places_of(dataset.dataset, target))
        return [place for place, index in enumerate(dataset.indices) if int(index) in inside]
    return [target] if target < len(dataset) else []


__all__ = ["READS", "Change", "ChangedDataset", "items_of", "places_of", "with_changes"]
