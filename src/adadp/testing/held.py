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


@dataclass(frozen=True)
class Change:
    """What is other than in the user's dataset: `items` by index; and `all_others`, if not None, at every other."""

    items: Mapping[int, Any] = field(default_factory=dict)
    all_others: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.items.get(index, self.all_others)


class Held(Dataset[Any]):
    """A view of a dataset of any kind. What is not an item (classes, transforms) is the dataset's own."""

    def __init__(self, dataset: Any, change: Change) -> None:
        self._dataset, self._change = dataset, change

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[int(index)]
        item = self._change[place]
        # A copy: a loop that works in place must not change what the other world is given.
        return self._dataset[place] if item is None else copy.deepcopy(item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def held(dataset: Any, change: Change) -> Any:
    """`dataset` with the change made: of its own type where that is one of tensors or a list."""
    if type(dataset) is TensorDataset:
        return TensorDataset(*(_replaced(tensor, column, change) for column, tensor in enumerate(dataset.tensors)))
    if isinstance(dataset, list):
        return [copy.deepcopy(item if change[i] is None else change[i]) for i, item in enumerate(dataset)]
    return Held(dataset, change)


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


def places_of(dataset: Any, target: int) -> list[int]:
    """Where item `target` of what the function was given stands in `dataset`, what its loader draws from.

    `Subset`s are followed. Anything else the function wrapped around is taken to keep items in their places.
    """
    if isinstance(dataset, Subset):
        inside = set(places_of(dataset.dataset, target))
        return [place for place, index in enumerate(dataset.indices) if int(index) in inside]
    return [target] if target < len(dataset) else []


__all__ = ["Change", "Held", "held", "places_of"]
