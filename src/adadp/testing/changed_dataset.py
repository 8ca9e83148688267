"""A dataset with some of its items replaced: what the user's training function is given in each world."""

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
"""Items of the function's dataset that were read, in order; whoever wants to know empties it before."""


@dataclass(frozen=True)
class Change:
    """What is other than in the user's dataset: `items` by index; and `all_others`, if not None, at every other."""

    items: Mapping[int, Any] = field(default_factory=dict)
    all_others: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.items.get(index, self.all_others)


class ChangedDataset(Dataset[Any]):
    """A view of a dataset of any kind. What is not an item (classes, transforms) is the dataset's own."""

    def __init__(self, dataset: Any, change: Change) -> None:
        self._dataset, self._change = dataset, change

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[int(index)]
        READS.append(place)
        item = self._change[place]
        # A copy: a loop that works in place must not change what the other world is given.
        return self._dataset[place] if item is None else copy.deepcopy(item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Tensors(TensorDataset):
    """A TensorDataset that says which of its rows are read."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        if isinstance(index, int):
            READS.append(range(len(self))[index])
        return tuple(tensor[index] for tensor in self.tensors)


class _List(list[Any]):
    """A list that says which of its items are read."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            READS.append(range(len(self))[index])
        return super().__getitem__(index)


def with_changes(dataset: Any, change: Change) -> Any:
    """`dataset` with the change made: of its own type where that is one of tensors or a list."""
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
    """Which of the `count` items that the function was given stands at each place of `dataset`, a loader's.

    `Subset`s are followed. Anything else the function wrapped around is taken to keep items in their places.
    """
    if isinstance(dataset, Subset):
        inside = items_of(dataset.dataset, count)
        return [inside[int(index)] for index in dataset.indices if int(index) < len(inside)]
    return list(range(min(count, len(dataset))))


def places_of(dataset: Any, target: int) -> list[int]:
    """Where item `target` of what the function was given stands in `dataset`, what its loader draws from."""
    if isinstance(dataset, Subset):
        inside = set(places_of(dataset.dataset, target))
        return [place for place, index in enumerate(dataset.indices) if int(index) in inside]
    return [target] if target < len(dataset) else []


__all__ = ["READS", "Change", "ChangedDataset", "items_of", "places_of", "with_changes"]
