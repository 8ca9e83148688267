"""A user's own table: columns of numbers and text, and a class for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Table:
    """Rows with class labels, in raw units: `adadp.preprocessing.TablePreprocessor` turns them into numbers.

    columns : name -> array of shape (n,): float64 or bool for numbers and flags, object for text.
    labels : int64, shape (n,), 0..len(classes)-1.
    public : what counts as public about it, in sentences for the reader of a guarantee.
    """

    name: str
    columns: Mapping[str, Column]
    labels: Tensor
    classes: tuple[str, ...]
    public: tuple[str, ...] = ("the class names", "the names and the types of the columns")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> Table:
        """Return the rows at `index` (a boolean mask or positions, shape (m,))."""
        positions = index.numpy()
        columns = {name: values[positions] for name, values in self.columns.items()}
        return Table(self.name, columns, self.labels[index], self.classes, self.public)
