"""Text to numbers without looking at the data: fixed buckets or declared values.

A vocabulary taken from the data says who is in it: one row can add a word, and no noise hides a column of
zeros. Both encoders map each row by itself and learn nothing, so they cost nothing: `events_` is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.errors import ConfigurationError
from adadp.preprocessing.release import require_columns

Floats = npt.NDArray[np.float64]
Cells = np.ndarray[Any, np.dtype[np.object_]]


def text_of(cell: object) -> str | None:
    """Return a cell as text; None if it is missing (None, NaN or empty). 3.0 and 3 read alike."""
    if cell is None or (isinstance(cell, float | np.floating) and np.isnan(cell)):
        return None
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        cell = int(cell)
    return str(cell) or None


def bucket_of(text: str, column: int, buckets: int) -> int:
    """Bucket 0..buckets-1 of a text: BLAKE2b of the column's number and the text, equal on every machine."""
    digest = hashlib.blake2b(f"{column}\0{text}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


def as_cells(values: Any, who: str) -> Cells:
    """View `values` as cells of shape (n, c)."""
    cells = np.asarray(values, dtype=object)
    if cells.ndim != 2:
        raise ConfigurationError(f"{who} takes cells of shape (n, columns), not {cells.shape}")
    return cells


class HashedOneHot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Text columns (n, c) to (n, c * buckets): 1 in the bucket that the text hashes to; missing cells are all
    0.

    Formal guarantee: no release. The number of buckets is fixed beforehand and the hash is public, so `fit`
    reads nothing but the number of columns. Different words may share a bucket.
    """

    def __init__(self, buckets: int = 32) -> None:
        self.buckets = buckets

    def fit(self, X: Any, y: object = None, *, ledger: object = None) -> Self:  # noqa: N803
        """Note the number of columns. Nothing is learned and nothing is charged."""
        del y, ledger
        if not 1 <= self.buckets <= 2**20:
            raise ConfigurationError(f"buckets must be in 1..{2**20}, not {self.buckets!r}")
        self.n_features_in_ = as_cells(X, "HashedOneHot").shape[1]
        self.events_: tuple[()] = ()
        return self

    def transform(self, X: Any) -> Floats:  # noqa: N803
        """One-hot buckets, float64, shape (n, c * buckets)."""
        check_is_fitted(self)
        cells = as_cells(X, "HashedOneHot")
        require_columns(cells, self.n_features_in_, "HashedOneHot")
        out = np.zeros((len(cells), cells.shape[1] * self.buckets))
        for column in range(cells.shape[1]):
            known: dict[str, int] = {}
            for row, cell in enumerate(cells[:, column]):
                text = text_of(cell)
                if text is None:
                    continue
                if text not in known:
                    known[text] = bucket_of(text, column, self.buckets)
                out[row, column * self.buckets + known[text]] = 1.0
        return out


class DeclaredOneHot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Text columns (n, c) to one column of 0 and 1 for each declared value; other and missing cells are all
    0.

    Formal guarantee: no release. `categories` holds the values of each column, declared by the user
    beforehand.
    """

    def __init__(self, categories: Sequence[Sequence[object]] = ()) -> None:
        self.categories = categories

    def fit(self, X: Any, y: object = None, *, ledger: object = None) -> Self:  # noqa: N803
        """Check the declaration against the number of columns. Nothing is learned and nothing is charged."""
        del y, ledger
        if isinstance(self.categories, str):
            raise ConfigurationError(
                f"DeclaredOneHot takes a list of values for each column, not {self.categories!r}: a vocabulary taken "
                "from the data would show who is in it. Declare the values, or use HashedOneHot"
            )
        cells = as_cells(X, "DeclaredOneHot")
        if len(self.categories) != cells.shape[1]:
            raise ConfigurationError(
                f"DeclaredOneHot has values for {len(self.categories)} columns but the table has {cells.shape[1]}"
            )
        for column, values in enumerate(self.categories):
            texts = [text_of(value) for value in values]
            if isinstance(values, str) or not texts or None in texts or len(set(texts)) != len(texts):
                raise ConfigurationError(
                    f"the declared values of column {column} must be a list of different, non-empty values"
                )
        self.n_features_in_ = cells.shape[1]
        self.events_: tuple[()] = ()
        return self

    def transform(self, X: Any) -> Floats:  # noqa: N803
        """Indicators of the declared values, float64, shape (n, total number of declared values)."""
        check_is_fitted(self)
        cells = as_cells(X, "DeclaredOneHot")
        require_columns(cells, self.n_features_in_, "DeclaredOneHot")
        blocks = []
        for column, values in enumerate(self.categories):
            place = {text_of(value): index for index, value in enumerate(values)}
            block = np.zeros((len(cells), len(place)))
            for row, cell in enumerate(cells[:, column]):
                index = place.get(text_of(cell))
                if index is not None:
                    block[row, index] = 1.0
            blocks.append(block)
        return np.concatenate(blocks, axis=1) if blocks else np.zeros((len(cells), 0))
