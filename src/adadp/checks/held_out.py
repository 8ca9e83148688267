"""Whether data to evaluate on holds examples that are trained on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils.data import Subset


def shares_examples(trained_on: Any, other: Any) -> bool:
    """Whether both are one dataset, or Subsets of one with an index in common. Copies are not recognised."""
    (first, one), (second, two) = _rows(trained_on), _rows(other)
    if first is None or first is not second:
        return False
    return one is None or two is None or not set(one).isdisjoint(two)


def _rows(dataset: Any) -> tuple[Any, Collection[int] | None]:
    """The dataset below Subsets, and which of its items they choose; None for all."""
    rows: Collection[int] | None = None
    while isinstance(dataset, Subset):
        indices = dataset.indices
        rows = indices if rows is None else [indices[place] for place in rows]
        dataset = dataset.dataset
    return dataset, None if rows is None else [int(place) for place in rows]
