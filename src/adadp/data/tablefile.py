"""Columns from .csv, .parquet and .npz files."""

from __future__ import annotations

import csv
import datetime
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adadp.data.table import Column
from adadp.data.unpacking import check_unpacked, parquet_size
from adadp.dates import day_of, day_of_time
from adadp.errors import CorruptDataError, DataError
from adadp.extras import require

_LONGEST_HEADER = 2**20  # characters of the first line that are looked at for the delimiter
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Cells, in lower case, that say that nothing is there."""


class Columns(dict[str, Column]):
    """Columns by name, with the kind of each in `kinds` (`columns.KINDS`)."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}

    def add(self, name: str, values: Column, kind: str) -> None:
        """Add a column after those that are there."""
        self[name], self.kinds[name] = values, kind


def read_columns(path: Path, kinds: Mapping[str, str] | None = None, *, decimal_comma: bool = False) -> Columns:
    """Read the columns of a file, by its suffix.

    Args:
        path: a .csv, .parquet or .npz file.
        kinds: column -> the kind that it is declared to be (`columns.KINDS`). Columns that the file does not have are
            passed over.
        decimal_comma: numbers in a .csv are written 1.234,5.

    Returns:
        The columns. The kind of one that is not declared is what a .parquet or .npz file says; in a .csv it is "number"
        if all cells are numbers or missing, and "category" if none is a number. Anything between is refused, since one
        mistyped cell would otherwise change what a column means.

    Raises:
        DataError: the file cannot be read, or cells do not fit the declared kind.

    """
    readers: dict[str, Callable[[Path, Mapping[str, str], bool], Columns]] = {
        ".csv": _csv,
        ".parquet": _parquet,
        ".npz": _npz,
    }
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: a data file ends in {', '.join(readers)}; or give a folder of images by class")
    return readers[path.suffix.lower()](path, kinds or {}, decimal_comma)


def flattened(source: Path, found: Columns) -> Columns:
    """Columns of shape (n,), numbers as float64: one of shape (n, d) becomes d, with their numbers behind its name."""
    flat = Columns()
    for name, array in found.items():
        if array.ndim > 2:
            raise DataError(
                f"{source}: {name!r} has shape {array.shape}; images must be the only array besides the label"
            )
        parts = {name: array} if array.ndim == 1 else {f"{name}{i}": array[:, i] for i in range(array.shape[1])}
        for key, part in parts.items():
            flat.add(key, part.astype(np.float64) if part.dtype.kind in "fiu" else part, found.kinds[name])
    return flat


def _csv(path: Path, kinds: Mapping[str, str], decimal_comma: bool) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline(_LONGEST_HEADER)
            delimiter = max(",;\t", key=first.count)
            file.seek(0)
            # Strict: else a quote that is never closed takes all rows after it into one cell.
            rows = list(csv.reader(file, delimiter=delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise CorruptDataError(f"{path} is not a text file in UTF-8 with comma-separated values ({error})") from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise DataError(f"{path} has no rows: the first line must name the columns")
    names = [name.strip() for name in rows[0]]
    if len(set(names)) != len(names):
        raise DataError(f"{path} names a column twice: {', '.join(n for n in names if names.count(n) > 1)}")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            raise CorruptDataError(f"{path}: row {number} has {len(row)} cells, not {len(names)}")
    found = Columns()
    for name, cells in zip(names, zip(*rows[1:], strict=True), strict=True):
        found.add(name, *_cells(path, name, [cell.strip() for cell in cells], kinds.get(name), decimal_comma))
    return found


def _cells(path: Path, name: str, cells: list[str], kind: str | None, decimal_comma: bool) -> tuple[Column, str]:
    """The cells of one column of a .csv, as its kind, and that kind."""
    if kind in ("category", "text"):
        return np.array(cells, dtype=object), kind
    if kind == "date":
        return _days(path, name, cells), kind
    if kind == "flag":
        return _flags(path, name, cells), kind
    numbers = [_number(cell, decimal_comma) for cell in cells]
    strangers = [row for row, number in enumerate(numbers) if number is None]
    if not strangers:
        return np.array(numbers, dtype=np.float64), "number"
    if kind is None and len(strangers) == sum(cell.lower() not in MISSING for cell in cells):
        return np.array(cells, dtype=object), "category"
    if kind == "number":
        raise DataError(f"{path}: column {name!r} is declared a number, and row {strangers[0] + 1} is none")
    raise DataError(
        f"{path}: column {name!r} mixes numbers and text (row {strangers[0] + 1} is not a number). Correct it, or "
        "declare the column a category"
    )


def _number(cell: str, decimal_comma: bool) -> float | None:
    if cell.lower() in MISSING:
        return float("nan")
    try:
        return float(cell.replace(".", "").replace(",", ".") if decimal_comma else cell)
    except ValueError:
        return None


def _days(path: Path, name: str, cells: Sequence[object]) -> Column:
    days = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        if cell is None or (isinstance(cell, str) and cell.lower() in MISSING):
            continue
        try:
            days[row] = day_of_time(cell) if isinstance(cell, datetime.date) else day_of(str(cell))
        except (ValueError, TypeError, OverflowError):
            raise DataError(
                f"{path}: column {name!r} is declared a date, and row {row + 1} is none that is read (2024-03-01, "
                "2024-03-01T12:30, 1.3.2024)"
            ) from None
    return days


def _flags(path: Path, name: str, cells: Sequence[str]) -> Column:
    words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    for row, cell in enumerate(cells):
        if cell.lower() not in words:
            raise DataError(f"{path}: column {name!r} is declared a flag, and row {row + 1} is not true or false")
    return np.array([words[cell.lower()] for cell in cells], dtype=np.bool_)


def _parquet(path: Path, kinds: Mapping[str, str], decimal_comma: bool) -> Columns:
    del decimal_comma  # numbers are numbers in this format
    parquet = require("pyarrow.parquet", "data", "reading parquet files")
    types = require("pyarrow.types", "data", "reading parquet files")
    found = Columns()
    try:
        with parquet.ParquetFile(path) as file:  # not read_table, which makes columns of the names of folders
            check_unpacked(path, parquet_size(file.metadata))
            table = file.read()
        for name in table.column_names:
            found.add(name, *_parquet_column(path, name, table.column(name), types, kinds.get(name)))
    except DataError:
        raise
    except Exception as error:  # whatever pyarrow raises
        raise CorruptDataError(f"{path} is damaged or is not a parquet file ({error})") from error
    return found


def _parquet_column(path: Path, name: str, values: Any, types: Any, declared: str | None) -> tuple[Column, str]:
    """One column as its kind, and that kind: the declared one, or what the file says."""
    kind = values.type
    if types.is_dictionary(kind):
        kind, values = kind.value_type, values.cast(kind.value_type)
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if declared == "date" or (declared is None and types.is_temporal(kind)):
        if types.is_time(kind) or types.is_duration(kind):
            raise DataError(f"{path}: column {name!r} is a time without a date ({kind}); make it a number first")
        return _days(path, name, values.to_pylist()), "date"
    if types.is_string(kind) or types.is_large_string(kind) or declared in ("category", "text"):
        if declared in ("number", "flag"):
            raise DataError(f"{path}: column {name!r} is declared a {declared}, and holds text")
        return np.array(["" if v is None else str(v) for v in values.to_pylist()], dtype=object), declared or "category"
    if types.is_boolean(kind) and values.null_count == 0 and declared != "number":
        return np.array(values.to_pylist(), dtype=np.bool_), "flag"
    if (numeric or types.is_boolean(kind)) and declared != "flag":
        return np.array([np.nan if v is None else float(v) for v in values.to_pylist()], dtype=np.float64), "number"
    raise DataError(
        f"{path}: column {name!r} has type {kind}, and cannot be a {declared or 'column here'}; numbers, booleans, "
        "dates and text can be used"
    )


def _npz(path: Path, kinds: Mapping[str, str], decimal_comma: bool) -> Columns:
    del decimal_comma
    try:
        with zipfile.ZipFile(path) as members:
            check_unpacked(path, sum(member.file_size for member in members.infolist()))
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Column] = {name: archive[name] for name in archive.files}
        strangers = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
        if strangers:
            raise ValueError(f"{strangers[0]!r} is no array")
    except DataError:
        raise
    except Exception as error:  # zip files and headers of arrays fail in many ways
        raise CorruptDataError(f"{path} is damaged, or holds Python objects, which are not read ({error})") from error
    found = Columns()
    for name, array in arrays.items():
        declared = kinds.get(name)
        if array.dtype.kind == "M" and declared in (None, "date"):
            days = (array - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
            found.add(name, np.asarray(days, dtype=np.float64), "date")
        elif array.dtype.kind in "US":
            if declared in ("number", "flag"):
                raise DataError(f"{path}: array {name!r} is declared a {declared}, and holds text")
            cells = array.astype(str).astype(object)
            if declared == "date":
                found.add(name, _days(path, name, cells.tolist()), "date")
            else:
                found.add(name, cells, declared or "category")
        elif array.dtype.kind not in "fiub":
            raise DataError(
                f"{path}: array {name!r} has type {array.dtype}; numbers, booleans, dates and text are read"
            )
        elif declared in ("category", "text"):
            found.add(name, array.astype(str).astype(object), declared)
        elif declared == "date":
            raise DataError(f"{path}: array {name!r} is declared a date, and holds numbers")
        else:
            found.add(name, array, "flag" if array.dtype.kind == "b" else "number")
    return found
