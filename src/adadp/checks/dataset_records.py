"""What a dataset's structure shows: whether one record occurs in several rows, and what cannot be known."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

_SEVERAL = (
    "one record would be several rows of the dataset ({}), and a guarantee for one row is not one for the record. "
    "Leave each record in once; weigh it in the loss, or train for more epochs."
)
_COMPUTED = (
    "the dataset ({}) computes its items itself: statistics over all rows, records that serve as several rows, or rows "
    "that stand in for others inside it cannot be seen"
)


def problems_of(dataset: Any) -> list[str]:
    """Why rows of this dataset are not distinct records, each with the way out."""
    if isinstance(dataset, StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return [problem for part in parts for problem in problems_of(part)]
    records = _records(dataset)
    if records is None:
        return []
    held, position = records
    pairs = np.stack([held, position])
    if len(np.unique(pairs, axis=1).T) == pairs.shape[1]:
        return []
    what = "a Subset with repeated indices" if isinstance(dataset, Subset) else "a dataset that is held twice"
    return [_SEVERAL.format(what)]


def _records(dataset: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """For each row, an identity of the dataset it comes from and its index there. None without a length."""
    if isinstance(dataset, ConcatDataset):
        parts = [_records(part) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return tuple(np.concatenate([part[side] for part in parts if part is not None]) for side in (0, 1))  # type: ignore[return-value]
    if isinstance(dataset, Subset):
        below = _records(dataset.dataset)
        if below is None:
            return None
        chosen = np.asarray(list(dataset.indices), dtype=np.int64)
        return below[0][chosen], below[1][chosen]
    try:
        count = len(dataset)
    except TypeError:
        return None
    identity = hash(tuple(t.data_ptr() for t in dataset.tensors)) if type(dataset) is TensorDataset else id(dataset)
    return np.full(count, identity, dtype=np.int64), np.arange(count)


def unseen_parts(dataset: Any) -> str | None:
    """What cannot be known of a dataset whose class computes its items; None where items are stored as they are."""
    if isinstance(dataset, Subset):
        return unseen_parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return next((text for part in parts if (text := unseen_parts(part)) is not None), None)
    if type(dataset) in (TensorDataset, list, tuple) or dataset is None:
        return None
    if type(dataset).__module__.split(".")[0] == "adadp":
        return None
    stored = (getattr(dataset, "format", None) or {}).get("type") != "custom"  # no transform makes its items
    if type(dataset).__module__.startswith("datasets.") and stored:  # Hugging Face's
        return None
    return _COMPUTED.format(type(dataset).__name__)
