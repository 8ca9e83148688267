"""A mixed table to rows of numbers, within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.accounting.events import Gaussian
from adadp.errors import ConfigurationError
from adadp.preprocessing.encoding import DeclaredOneHot, HashedOneHot
from adadp.preprocessing.release import Charges
from adadp.preprocessing.scaler import DPStandardScaler

Column = np.ndarray[Any, np.dtype[Any]]


class TablePreprocessor(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Numbers are standardised privately, declared columns one-hot encoded, other text hashed into buckets.

    Takes a mapping from column names to arrays of shape (n,) (`Table.columns`, or a data frame). Arrays of
    numbers are numeric, of booleans are 0 and 1, of strings or objects are text.

    Formal guarantee: that of `DPStandardScaler` on the numeric columns (`events_`; none if there are none).
    Text costs nothing: no vocabulary is taken from the data. Names, order and types of the columns count as
    public.

    Parameters
    ----------
    noise_multiplier : of all that is charged.
    categories : values of the columns to one-hot encode, declared by the user: {column: [value, ...]}.
    buckets : how many buckets each other text column is hashed into.
    clip : bound on standardised numbers, in deviations.
    random_state : None for the system's entropy; an int for tests and papers. It is not saved.

    Edge cases: missing cells (NaN, None, empty) become 0, which for a number is the noisy mean; columns that
    were not there when fitting are ignored; columns that are gone are refused.
    """

    def __init__(
        self,
        noise_multiplier: float = 10.0,
        *,
        categories: Mapping[str, Sequence[object]] | None = None,
        buckets: int = 32,
        clip: float = 5.0,
        random_state: int | None = None,
    ) -> None:
        self.noise_multiplier = noise_multiplier
        self.categories = categories
        self.buckets = buckets
        self.clip = clip
        self.random_state = random_state

    def fit(self, X: Any, y: object = None, *, ledger: Charges | None = None) -> Self:  # noqa: N803
        """Learn the scales of the numeric columns. `ledger` is charged before each release."""
        del y
        columns = as_columns(X)
        declared = dict(self.categories or {})
        for name, values in declared.items():
            if name not in columns:
                raise ConfigurationError(f"categories names a column {name!r} that the table does not have")
            if isinstance(values, str):
                raise ConfigurationError(
                    f"categories[{name!r}] must list the values, not {values!r}: a vocabulary taken from the data "
                    "would show who is in it"
                )
        kinds = {name: "declared" if name in declared else kind_of(values) for name, values in columns.items()}
        self.numeric_ = [name for name, kind in kinds.items() if kind == "number"]
        self.flags_ = [name for name, kind in kinds.items() if kind == "flag"]
        self.declared_ = [name for name, kind in kinds.items() if kind == "declared"]
        self.text_ = [name for name, kind in kinds.items() if kind == "text"]
        self.n_features_in_ = len(columns)
        self.events_: tuple[Gaussian, ...] = ()
        assumptions = ["neighbours differ in one row", "names, order and types of the columns are public"]
        self.one_hot_ = DeclaredOneHot([list(declared[name]) for name in self.declared_])
        self.one_hot_.fit(_cells(columns, self.declared_))
        self.hashed_ = HashedOneHot(self.buckets).fit(_cells(columns, self.text_))
        self.scaler_: DPStandardScaler | None = None
        if self.numeric_:
            self.scaler_ = DPStandardScaler(self.noise_multiplier, clip=self.clip, random_state=self.random_state)
            self.scaler_.fit(_numbers(columns, self.numeric_), ledger=ledger)
            self.events_ = self.scaler_.events_
            assumptions = ["names of the columns are public", *self.scaler_.assumptions_]
        self.assumptions_ = tuple(assumptions)
        return self

    def transform(self, X: Any) -> npt.NDArray[np.float32]:  # noqa: N803
        """Rows of shape (n, features), float32, finite. Each row is mapped by itself."""
        check_is_fitted(self)
        columns = as_columns(X)
        for name in (*self.numeric_, *self.flags_, *self.declared_, *self.text_):
            if name not in columns:
                raise ConfigurationError(f"the table has no column {name!r}, which the preprocessing was fitted with")
        blocks: list[npt.NDArray[np.float64]] = []
        if self.scaler_ is not None:
            blocks.append(self.scaler_.transform(_numbers(columns, self.numeric_)))
        if self.flags_:
            blocks.append(np.clip(_numbers(columns, self.flags_), 0.0, 1.0))
        blocks.append(self.one_hot_.transform(_cells(columns, self.declared_)))
        blocks.append(self.hashed_.transform(_cells(columns, self.text_)))
        return np.nan_to_num(np.concatenate(blocks, axis=1), nan=0.0).astype(np.float32)

    def get_feature_names_out(self, input_features: object = None) -> Column:
        """Return the names of the outputs, in order."""
        del input_features
        check_is_fitted(self)
        names = [*self.numeric_, *self.flags_]
        for name, values in zip(self.declared_, self.one_hot_.categories, strict=True):
            names += [f"{name}={value}" for value in values]
        names += [f"{name}#{bucket}" for name in self.text_ for bucket in range(self.buckets)]
        return np.asarray(names, dtype=object)


def as_columns(table: Any) -> dict[str, Column]:
    """Name -> array of shape (n,), from a mapping, a Table or a data frame."""
    source = table
    if not isinstance(table, Mapping):
        columns = getattr(table, "columns", None)
        if columns is None:
            raise ConfigurationError("a table is a mapping from column names to arrays; see adadp.data.read")
        source = columns if isinstance(columns, Mapping) else {name: table[name] for name in columns}
    result = {str(name): np.asarray(values) for name, values in source.items()}
    if not result:
        raise ConfigurationError("the table has no columns")
    lengths = {len(values) if values.ndim == 1 else -1 for values in result.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise ConfigurationError("the columns of a table must be one-dimensional and equally long")
    return result


def kind_of(values: Column) -> str:
    """Type of a column by its dtype alone, never by its values: "number", "flag" or "text"."""
    return {"f": "number", "i": "number", "u": "number", "b": "flag"}.get(values.dtype.kind, "text")


def _numbers(columns: Mapping[str, Column], names: Sequence[str]) -> npt.NDArray[np.float64]:
    stacked = []
    for name in names:
        try:
            stacked.append(np.asarray(columns[name], dtype=np.float64))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"column {name!r} was numeric when fitted and now holds text") from error
    return np.stack(stacked, axis=1)


def _cells(columns: Mapping[str, Column], names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.object_]]:
    rows = len(next(iter(columns.values())))
    cells = np.empty((rows, len(names)), dtype=object)
    for index, name in enumerate(names):
        cells[:, index] = columns[name]
    return cells
