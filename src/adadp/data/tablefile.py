"""Columns from .csv, .parquet and .npz files."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from adadp.data.table import Column
from adadp.data.unpacking import check_unpacked, parquet_size
from adadp.errors import CorruptDataError, DataError
from adadp.extras import require

_LONGEST_HEADER = 2**20  # characters of the first line that are looked at for the delimiter
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


def read_columns(path: Path, text: Collection[str] = (), labels: Collection[str] = ()) -> dict[str, Column]:
    """Read name -> array from a file, by its suffix. Columns named in `text` are text whatever they hold, and so
    are those named in `labels`, if they are there.

    A column of a .csv is numeric if all of its cells are numbers or missing, and text if none is a number;
    anything between is refused, since one mistyped cell would otherwise change what a column means.
    """
    readers: dict[str, Callable[[Path, Collection[str]], dict[str, Column]]] = {
        ".csv": _csv,
        ".parquet": _parquet,
        ".npz": _npz,
    }
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: a data file ends in {', '.join(readers)}; or give a folder of images by class")
    columns = readers[path.suffix.lower()](path, [*text, *labels])
    unknown = [name for name in text if name not in columns]
    if unknown:
        raise DataError(f"{path} has no column {unknown[0]!r}; it has {', '.join(columns)}")
    return columns


def flattened(source: Path, columns: dict[str, Column]) -> dict[str, Column]:
    """Columns of shape (n,), numbers as float64: one of shape (n, d) becomes d, with their numbers behind its name."""
    flat: dict[str, Column] = {}
    for name, array in columns.items():
        if array.ndim > 2:
            raise DataError(
                f"{source}: {name!r} has shape {array.shape}; images must be the only array besides the label"
            )
        parts = {name: array} if array.ndim == 1 else {f"{name}{i}": array[:, i] for i in range(array.shape[1])}
        for key, part in parts.items():
            flat[key] = part.astype(np.float64) if part.dtype.kind in "fiu" else part
    return flat


def _csv(path: Path, text: Collection[str]) -> dict[str, Column]:
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
    cells = zip(*rows[1:], strict=True)
    return {
        name: _cells(path, name, [cell.strip() for cell in column], name in text)
        for name, column in zip(names, cells, strict=True)
    }


def _cells(path: Path, name: str, cells: list[str], as_text: bool) -> Column:
    if as_text:
        return np.array(cells, dtype=object)
    numbers = [_number(cell) for cell in cells]
    strangers = [row for row, number in enumerate(numbers) if number is None]
    if not strangers:
        return np.array(numbers, dtype=np.float64)
    if len(strangers) == sum(cell.lower() not in _MISSING for cell in cells):
        return np.array(cells, dtype=object)
    raise DataError(
        f"{path}: column {name!r} mixes numbers and text (row {strangers[0] + 1} is not a number). Correct it, or "
        "declare the column as text"
    )


def _number(cell: str) -> float | None:
    if cell.lower() in _MISSING:
        return float("nan")
    try:
        return float(cell)
    except ValueError:
        return None


def _parquet(path: Path, text: Collection[str]) -> dict[str, Column]:
    parquet = require("pyarrow.parquet", "data", "reading parquet files")
    types = require("pyarrow.types", "data", "reading parquet files")
    columns: dict[str, Column] = {}
    try:
        with parquet.ParquetFile(path) as file:  # not read_table, which makes columns of the names of folders
            check_unpacked(path, parquet_size(file.metadata))
            table = file.read()
        for name in table.column_names:
            columns[name] = _parquet_column(path, name, table.column(name), types, name in text)
    except DataError:
        raise
    except Exception as error:  # whatever pyarrow raises
        raise CorruptDataError(f"{path} is damaged or is not a parquet file ({error})") from error
    return columns


def _parquet_column(path: Path, name: str, values: Any, types: Any, as_text: bool) -> Column:
    kind = values.type
    if types.is_dictionary(kind):
        kind, values = kind.value_type, values.cast(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or as_text:
        return np.array(["" if v is None else str(v) for v in values.to_pylist()], dtype=object)
    if types.is_boolean(kind) and values.null_count == 0:
        return np.array(values.to_pylist(), dtype=np.bool_)
    if types.is_temporal(kind):
        raise DataError(f"{path}: column {name!r} is a time ({kind}); make it a number first")
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in values.to_pylist()], dtype=np.float64)
    raise DataError(f"{path}: column {name!r} has type {kind}; numbers, booleans and text can be used")


def _npz(path: Path, text: Collection[str]) -> dict[str, Column]:
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
    for name, array in arrays.items():
        if array.dtype.kind in "US":
            arrays[name] = array.astype(str).astype(object)
        elif array.dtype.kind not in "fiub":
            raise DataError(f"{path}: array {name!r} has type {array.dtype}; numbers, booleans and text can be used")
        elif name in text:
            arrays[name] = array.astype(str).astype(object)
    return arrays
