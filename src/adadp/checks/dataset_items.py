"""Items of a dataset, for trials of a collate function: fetched, copied, made longer and shorter."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.checks.containers import Parts, take_apart


def fetched(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The items at these indices, fetched as a DataLoader fetches them."""
    several = getattr(dataset, "__getitems__", None)
    if callable(several):
        return list(several(list(indices)))
    return [dataset[index] for index in indices]


def copied(items: Sequence[Any]) -> list[Any]:
    """Items that a collate function may write into."""
    try:
        return copy.deepcopy(list(items))
    except Exception:  # something in them cannot be copied: the collate function gets it as from the loader
        return list(items)


def length(item: Any) -> int:
    """The length of an item's longest sequence."""
    return max((len(leaf) for leaf in _sequences(item).leaves if _is_long(leaf)), default=0)


def lengthened(item: Any) -> Iterator[Any]:
    """The item with its sequences of one length doubled, the longest length first; then with each text doubled."""
    return _resized(item, _repeated)


def halved(item: Any) -> Iterator[Any]:
    """The same with sequences cut to half their length."""
    return _resized(item, lambda leaf: leaf[: max(1, len(leaf) // 2)])


def _resized(item: Any, change: Any) -> Iterator[Any]:
    parts = _sequences(item)
    lengths = sorted({len(leaf) for leaf in parts.leaves if _is_long(leaf) and not isinstance(leaf, str)}, reverse=True)
    groups = [[_is_long(v) and not isinstance(v, str) and len(v) == size for v in parts.leaves] for size in lengths]
    groups += [
        [i == place for i in range(len(parts.leaves))] for place, v in enumerate(parts.leaves) if isinstance(v, str)
    ]
    for group in groups[:4]:
        yield parts.rebuilt([change(v) if chosen else v for v, chosen in zip(parts.leaves, group, strict=True)])


def _repeated(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.cat([leaf, leaf])
    if isinstance(leaf, np.ndarray):
        return np.concatenate([leaf, leaf])
    return f"{leaf} {leaf}" if isinstance(leaf, str) else leaf + leaf


def _is_long(leaf: Any) -> bool:
    return (not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim > 0) and len(leaf) > 1


def _sequences(item: Any) -> Parts:
    """An item taken apart into tensors, arrays, texts and lists of numbers."""
    return take_apart(item, leaf=lambda v: isinstance(v, str) or is_numbers(v))


def is_numbers(value: Any) -> bool:
    """Whether a list holds numbers, or lists of numbers."""
    if type(value) is not list or not value:
        return False
    return all(isinstance(v, numbers.Number) or is_numbers(v) for v in value)
