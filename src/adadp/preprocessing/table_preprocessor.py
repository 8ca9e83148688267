"""A mixed table to rows of numbers, within the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.accounting.events import Gaussian
from adadp.dates import SEASONS, seasons
from adadp.errors import ConfigurationError
from adadp.preprocessing.encoding import DeclaredOneHot, HashedOneHot
from adadp.preprocessing.free_text import FreeText
from adadp.preprocessing.release import Charges, neighbours_differ
from adadp.preprocessing.scaler import DPStandardScaler

Column = np.ndarray[Any, np.dtype[Any]]

TEXT_LENGTH = 4.0
"""Length of the vector of a text beside numbers of deviation 1: as much as sixteen of them."""


class TablePreprocessor(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Numbers are standardised, categories one-hot encoded, dates and free text turned into numbers.

    Takes a mapping from column names to arrays of shape (n,) (`Table.columns`, or a data frame). Arrays of numbers are
    numeric, of booleans are 0 and 1, of strings or objects are categories, unless `text` or `dates` names them.

    Formal guarantee: that of `DPStandardScaler` on the numbers and dates without declared ranges (`events_`; none if
    there are none). Everything else costs nothing: ranges, categories, hashes and word vectors are declared or public.
    Names, order and types of the columns count as public.

    Parameters
    ----------
    noise_multiplier : of all that is charged.
    categories : values of the columns to one-hot encode, declared by the user: {column: [value, ...]}.
    buckets : how many buckets each other column of categories is hashed into.
    ranges : lowest and highest value of columns of numbers and dates, declared by the user: {column: (low, high)}.
        They are mapped to [-sqrt(3), sqrt(3)], where uniform values have deviation 1; others are clipped.
    text : columns of free text (`FreeText`).
    dates : columns of dates, in days (`adadp.dates`): a number, and where they stand in year, week and day.
    missing : add a column for each number and date that is 1 where it is missing.
    vectors : of `FreeText`.
    clip : bound on standardised numbers, in deviations.
    random_state : None for the system's entropy; an int for tests and papers. It is not saved.

    Edge cases: missing cells (NaN, None, empty) become 0, which for a number is the noisy mean; columns that were not
    there when fitting are ignored; columns that are gone are refused.
    """

    def __init__(
        self,
        noise_multiplier: float = 10.0,
        *,
        categories: Mapping[str, Sequence[object]] | None = None,
        buckets: int = 32,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        text: Sequence[str] = (),
        dates: Sequence[str] = (),
        missing: bool = False,
        vectors: str = "auto",
        clip: float = 5.0,
        random_state: int | None = None,
    ) -> None:
        self.noise_multiplier = noise_multiplier
        self.categories = categories
        self.buckets = buckets
        self.ranges = ranges
        self.text = text
        self.dates = dates
        self.missing = missing
        self.vectors = vectors
        self.clip = clip
        self.random_state = random_state

    def kinds(self, columns: Mapping[str, Column]) -> dict[str, str]:
        """How each column is treated, by declarations and the types of the arrays alone, never by values.

        One of "number" (standardised privately), "ranged" (a number of a declared range), "flag", "declared" and
        "hashed" (categories), "text".
        """
        declared, ranges = dict(self.categories or {}), dict(self.ranges or {})
        for name in (*declared, *ranges, *self.text, *self.dates):
            if name not in columns:
                raise ConfigurationError(f"column {name!r} is declared, and the table does not have it")
        kinds = {}
        for name, values in columns.items():
            if name in self.text:
                kinds[name] = "text"
            elif name in declared:
                kinds[name] = "declared"
            else:
                kinds[name] = {"number": "number", "flag": "flag", "category": "hashed"}[kind_of(values)]
            if name in ranges:
                if kinds[name] != "number":
                    raise ConfigurationError(f"a range is declared for column {name!r}, which does not hold numbers")
                kinds[name] = "ranged"
        return kinds

    def planned_events(self, columns: Mapping[str, Column]) -> tuple[Gaussian, ...]:
        """Return what `fit` will charge. Only names and types of the columns are looked at."""
        if "number" not in self.kinds(columns).values():
            return ()
        return DPStandardScaler(self.noise_multiplier).planned_events()

    def width(self, columns: Mapping[str, Column]) -> int:
        """Number of features that a row will have. Only names and types of the columns are looked at."""
        kinds, declared = self.kinds(columns), dict(self.categories or {})
        numbers = [name for name, kind in kinds.items() if kind in ("number", "ranged")]
        found = len(numbers) * (2 if self.missing else 1) + 6 * len(self.dates)
        for name, kind in kinds.items():
            found += {"flag": 1, "hashed": self.buckets, "declared": len(declared.get(name, ()))}.get(kind, 0)
        texts = [name for name, kind in kinds.items() if kind == "text"]
        return found + (FreeText(self.vectors).fit(_cells(columns, texts)).size_ * len(texts) if texts else 0)

    def fit(self, X: Any, y: object = None, *, ledger: Charges | None = None, persons: Any = None) -> Self:  # noqa: N803
        """Learn the scales of the numeric columns. `ledger` is charged before each release.

        `persons`: one id for each row. Neighbours then differ in all rows of one person.
        """
        del y
        columns = as_columns(X)
        declared, ranges = dict(self.categories or {}), dict(self.ranges or {})
        for name, values in declared.items():
            if isinstance(values, str):
                raise ConfigurationError(
                    f"categories[{name!r}] must list the values, not {values!r}: a vocabulary taken from the data "
                    "would show who is in it"
                )
        kinds = self.kinds(columns)
        self.numeric_ = [name for name, kind in kinds.items() if kind == "number"]
        self.ranged_ = [name for name, kind in kinds.items() if kind == "ranged"]
        self.flags_ = [name for name, kind in kinds.items() if kind == "flag"]
        self.dates_ = [name for name in columns if name in self.dates]
        self.declared_ = [name for name, kind in kinds.items() if kind == "declared"]
        self.categories_ = [name for name, kind in kinds.items() if kind == "hashed"]
        self.text_ = [name for name, kind in kinds.items() if kind == "text"]
        self.n_features_in_ = len(columns)
        self.events_: tuple[Gaussian, ...] = ()
        assumptions = [neighbours_differ(persons), "names, order and types of the columns are public"]
        self.one_hot_ = DeclaredOneHot([list(declared[name]) for name in self.declared_])
        self.one_hot_.fit(_cells(columns, self.declared_))
        self.hashed_ = HashedOneHot(self.buckets).fit(_cells(columns, self.categories_))
        self.free_text_: FreeText | None = None
        if self.text_:
            self.free_text_ = FreeText(self.vectors).fit(_cells(columns, self.text_))
        self.range_middle_ = np.array([sum(ranges[name]) / 2 for name in self.ranged_])
        self.range_scale_ = np.array([(ranges[name][1] - ranges[name][0]) / math.sqrt(12) for name in self.ranged_])
        self.scaler_: DPStandardScaler | None = None
        if self.numeric_:
            self.scaler_ = DPStandardScaler(self.noise_multiplier, clip=self.clip, random_state=self.random_state)
            self.scaler_.fit(_numbers(columns, self.numeric_), ledger=ledger, persons=persons)
            self.events_ = self.scaler_.events_
            assumptions = ["names of the columns are public", *self.scaler_.assumptions_]
        if self.ranged_:
            assumptions.append(
                "ranges of columns were declared without looking at the data: " + ", ".join(self.ranged_)
            )
        self.assumptions_ = tuple(assumptions)
        return self

    def transform(self, X: Any) -> npt.NDArray[np.float32]:  # noqa: N803
        """Rows of shape (n, features), float32, finite. Each row is mapped by itself."""
        check_is_fitted(self)
        columns = as_columns(X)
        wanted = (*self.numeric_, *self.ranged_, *self.flags_, *self.declared_, *self.categories_, *self.text_)
        for name in wanted:
            if name not in columns:
                raise ConfigurationError(f"the table has no column {name!r}, which the preprocessing was fitted with")
        blocks: list[npt.NDArray[Any]] = []
        if self.scaler_ is not None:
            blocks.append(self.scaler_.transform(_numbers(columns, self.numeric_)))
        if self.ranged_:
            scaled = (_numbers(columns, self.ranged_) - self.range_middle_) / self.range_scale_
            blocks.append(np.clip(scaled, -math.sqrt(3), math.sqrt(3)))
        if self.missing and (self.numeric_ or self.ranged_):
            blocks.append(np.isnan(_numbers(columns, [*self.numeric_, *self.ranged_])).astype(np.float64))
        if self.flags_:
            blocks.append(np.clip(_numbers(columns, self.flags_), 0.0, 1.0))
        blocks += [seasons(_numbers(columns, [name])[:, 0]) for name in self.dates_]
        blocks.append(self.one_hot_.transform(_cells(columns, self.declared_)))
        blocks.append(self.hashed_.transform(_cells(columns, self.categories_)))
        if self.free_text_ is not None:
            blocks.append(self.free_text_.transform(_cells(columns, self.text_)) * TEXT_LENGTH)
        made: npt.NDArray[np.float32] = np.nan_to_num(np.concatenate(blocks, axis=1), nan=0.0).astype(np.float32)
        return made

    def get_feature_names_out(self, input_features: object = None) -> Column:
        """Return the names of the outputs, in order."""
        del input_features
        check_is_fitted(self)
        names = [*self.numeric_, *self.ranged_]
        if self.missing:
            names += [f"{name} is missing" for name in names]
        names += self.flags_
        for name in self.dates_:
            names += [f"{name} {part}" for part in SEASONS]
        for name, values in zip(self.declared_, self.one_hot_.categories, strict=True):
            names += [f"{name}={value}" for value in values]
        names += [f"{name}#{bucket}" for name in self.categories_ for bucket in range(self.buckets)]
        if self.free_text_ is not None:
            names += [f"{name}~{place}" for name in self.text_ for place in range(self.free_text_.size_)]
        return np.asarray(names, dtype=object)

    def upgrade(self) -> None:
        """Complete what an older version wrote: it had no ranges, dates and free text, and called categories text."""
        if hasattr(self, "categories_"):
            return
        self.categories_, self.text_, self.free_text_ = self.text_, [], None
        self.ranged_, self.dates_ = [], []
        self.range_middle_ = self.range_scale_ = np.zeros(0)


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
    """Type of a column by its dtype alone, never by its values: "number", "flag" or "category"."""
    return {"f": "number", "i": "number", "u": "number", "b": "flag"}.get(values.dtype.kind, "category")


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
