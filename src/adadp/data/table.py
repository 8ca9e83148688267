"""A user's own table: columns of numbers, flags, categories, dates and text, and what is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from adadp.data.columns import Declared

Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Table:
    """Rows with labels, in raw units: `adadp.preprocessing.TablePreprocessor` turns them into numbers.

    Attributes:
        name: of the data.
        columns: name -> array of shape (n,): float64 for numbers and dates (in days, `adadp.dates`), bool for flags,
            object for categories and text.
        labels: int64, shape (n,), 0..len(classes)-1; or, where there are no classes, the number to be predicted as
            float32 in [-1, 1] (`target`).
        classes: their names; empty where a number is predicted.
        public: what counts as public about it, in sentences for the reader of a guarantee.
        kinds: column -> its kind (`data.columns.KINDS`). Left out: by the type of the array.
        declared: what the user said of the columns beforehand.
        target: lowest and highest value of the number to be predicted, declared; None for classes.
        doubts: what looks wrong about columns or labels. It is read off private rows, for the user's eyes alone.
        persons: whose each row is, shape (n,); None where each row is a unit of privacy of its own.

    """

    name: str
    columns: Mapping[str, Column]
    labels: Tensor
    classes: tuple[str, ...]
    public: tuple[str, ...] = ("the class names", "the names and the types of the columns")
    kinds: Mapping[str, str] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared)
    target: tuple[float, float] | None = None
    doubts: tuple[str, ...] = ()
    persons: Column | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            by_type = {"b": "flag", "f": "number", "i": "number", "u": "number"}
            kinds = {name: by_type.get(values.dtype.kind, "category") for name, values in self.columns.items()}
            object.__setattr__(self, "kinds", kinds)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> Table:
        """Return the rows at `index` (a boolean mask or positions, shape (m,))."""
        positions = index.numpy()
        columns = {name: values[positions] for name, values in self.columns.items()}
        persons = None if self.persons is None else self.persons[positions]
        return replace(self, columns=columns, labels=self.labels[index], persons=persons)

    def in_units(self, scaled: Tensor) -> Tensor:
        """Numbers in [-1, 1], as `labels` holds them, in the target's own unit."""
        if self.target is None:
            raise ValueError(f"{self.name} has classes, not a number to predict")
        low, high = self.target
        return (low + high) / 2 + scaled.double() * ((high - low) / 2)
