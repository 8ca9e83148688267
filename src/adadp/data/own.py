"""Users' own data: a file or a folder to training data and held-out data."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adadp.data import labels as label_column
from adadp.data.columns import Declared, declare
from adadp.data.dataset import Dataset, as_images
from adadp.data.doubts import of_columns as column_doubts
from adadp.data.doubts import of_labels as label_doubts
from adadp.data.imagefolder import read_images
from adadp.data.table import Column, Table
from adadp.data.tablefile import Columns, flattened, read_columns
from adadp.errors import DataError, DataNotFoundError
from adadp.persons import keys_of

HELD_OUT_NOTE = (
    "figures on held-out private rows are computed without noise: they are not covered by the guarantee, and not for "
    "publication"
)


@dataclass(frozen=True)
class HeldOut:
    """Training data and held-out data. `seed` repeats the split; it is no secret, unless it was derived from one."""

    train: Dataset | Table
    test: Dataset | Table
    seed: int | None
    note: str = HELD_OUT_NOTE

    @property
    def count(self) -> int:
        """How many rows there are in both, or persons: how many rows persons have is in no number that is published."""
        if self.train.persons is None:
            return len(self.train) + len(self.test)
        held = () if self.test.persons is None else keys_of(self.test.persons)
        return len({*keys_of(self.train.persons), *held})


def read(
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    classes: Sequence[object] | None = None,
    number: Iterable[str] = (),
    category: Iterable[str] = (),
    text: Iterable[str] = (),
    date: Iterable[str] = (),
    ignore: Iterable[str] = (),
    target: tuple[float, float] | None = None,
    decimal_comma: bool = False,
    missing: bool = False,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
    drop_other_labels: bool = False,
    person: str | None = None,
) -> Dataset | Table:
    """Read a folder of images by class, or a .npz, .csv or .parquet file with a column `label`.

    An .npz of numbers (n, d) or of columns (n,) is a table; one with uint8 images (n, height, width[, channels]) is a
    `Dataset`.

    Args:
        path: the file or folder.
        label: the column to be predicted ("label" unless given).
        classes: declares the classes; else those that occur count as public. A row with another label, or with none, is
            refused, and the message names it.
        number, category, text, date, ignore: declare what columns hold (`columns.declare`). What is not declared is
            read off the cells, which then counts as public.
        target: the label is a number, and this its lowest and highest value, declared; other values are clipped.
        decimal_comma: numbers in a .csv are written 1.234,5.
        missing: allow missing numbers and dates; otherwise one is refused.
        size: images are resized to it, (height, width).
        grey: images are made grey.
        drop_other_labels: leave out rows of other classes than the declared, without a word about them.
        person: the column that says whose a row is, if it is there; it is no feature.

    Raises:
        DataError: what is there cannot be used; the message names the file, the column and the row.

    """
    if drop_other_labels and classes is None:
        raise DataError("drop_other_labels goes with classes: declare those whose rows are kept")
    if target is not None and classes is not None:
        raise DataError("give either classes, or the range of a number to predict, not both")
    declared = declare(number=number, category=category, text=text, date=date, ignore=ignore)
    source = Path(path)
    if not source.exists():
        raise DataNotFoundError(f"{source} does not exist")
    if source.is_dir():
        return read_images(source, classes=classes, size=size, grey=grey, drop_other_labels=drop_other_labels)
    chosen = label if label is not None else "label"
    columns = read_columns(source, _kinds(declared, chosen, classes, target, person), decimal_comma=decimal_comma)
    unknown = [name for name in declared.names if name not in columns]
    if unknown:
        raise DataError(f"{source} has no column {unknown[0]!r}; it has {', '.join(columns)}")
    if chosen not in columns:
        raise DataError(f"{source} has no label column {chosen!r}; it has {', '.join(columns)}")
    values = columns.pop(chosen)
    if values.ndim != 1:
        raise DataError(f"{source}: the labels {chosen!r} must have shape (n,), not {values.shape}")
    for name in declared.ignored:
        columns.pop(name, None)
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != len(values):
            raise DataError(f"{source}: {name!r} has shape {column.shape}, but there are {len(values)} labels")
    if not columns:
        raise DataError(f"{source} has no column besides the label")
    numbers, names, public, doubts = _labels(source, chosen, values, columns, classes, target, drop_other_labels)
    persons = columns.pop(person, None) if person is not None and person != chosen else None
    if len(columns) == 1 and next(iter(columns.values())).ndim > 2:
        if target is not None:
            raise DataError(f"{source} holds images: a number is predicted from tables only")
        pixels = next(iter(columns.values()))
        images = _images(source, pixels, numbers, names)
        return replace(images, public=(public, "the size of the images"), persons=persons)
    flat = flattened(source, columns)
    _refuse_gaps(source, flat, missing)
    return Table(
        source.stem,
        dict(flat),
        numbers,
        names,
        (public, _public_columns(flat, declared)),
        flat.kinds,
        declared,
        target,
        (*doubts, *column_doubts(flat, flat.kinds, declared.names)),
        persons,
    )


def _kinds(
    declared: Declared,
    label: str,
    classes: Sequence[object] | None,
    target: tuple[float, float] | None,
    person: str | None,
) -> dict[str, str]:
    """The kinds as which columns are read: what was declared of them, the label's and the persons'."""
    for name, what in (
        (label, "the label: declare its classes, or the range of a number"),
        (person, "whose a row is"),
    ):
        if name in declared.names:
            raise DataError(f"column {name!r} is declared as a feature, and is {what}")
    kinds = {**declared.kinds, **dict.fromkeys(declared.ignored, "text")}  # what is ignored is not refused either
    if target is not None:
        kinds[label] = "number"
    elif classes is not None:  # what type its column has would depend on a single cell
        kinds[label] = "category"
    if person is not None:
        kinds[person] = "category"
    return kinds


def _labels(
    source: Path,
    label: str,
    values: Column,
    columns: Columns,
    classes: Sequence[object] | None,
    target: tuple[float, float] | None,
    drop_other_labels: bool,
) -> tuple[torch.Tensor, tuple[str, ...], str, list[str]]:
    """Labels as numbers, the names of the classes, what is public about them, and what looks wrong about them.

    Rows of classes that are left out by a declared rule are taken out of `columns`, too.
    """
    where = f"{source}, column {label!r}"
    if target is not None:
        public = f"the range of {label!r}, which is predicted: {target[0]:g} to {target[1]:g}, declared"
        return label_column.scaled(values, where, target), (), public, []
    numbers, names = label_column.encode(values, where, classes, drop=drop_other_labels)
    numbers = _keep_listed(columns, numbers)
    if not len(numbers):
        raise DataError(f"{source}: no row of the column {label!r} has one of the classes ({', '.join(names)})")
    doubts = [] if classes is not None else label_doubts(label, names, len(numbers))
    return numbers, names, label_column.public_names(names, classes is not None, drop_other_labels), doubts


def _refuse_gaps(source: Path, columns: Columns, missing: bool) -> None:
    """Raise DataError where a number is infinite, or missing without being allowed to."""
    for name, column in columns.items():
        if column.dtype.kind == "f" and not missing and np.isnan(column).any():
            row = int(np.isnan(column).argmax()) + 1
            raise DataError(
                f"{source}: column {name!r} holds NaN or a missing number (row {row}). Remove such rows, or "
                "allow missing numbers with missing="
            )
        if column.dtype.kind == "f" and np.isinf(column).any():
            raise DataError(f"{source}: column {name!r} holds an infinite number")


def _keep_listed(columns: Columns, numbers: torch.Tensor) -> torch.Tensor:
    """Take the rows of classes that are not listed out of the columns, in place, and return the other rows' numbers."""
    kept = numbers != label_column.UNLISTED
    if kept.all():
        return numbers
    for name in columns:
        columns[name] = columns[name][kept.numpy()]
    return numbers[kept]


def _public_columns(columns: Columns, declared: Declared) -> str:
    """What is public about the columns, as a sentence for the reader of a guarantee."""
    said = [name for name in columns if name in declared.kinds]
    if len(said) == len(columns):
        return "the names and the types of the columns, declared"
    if not said:
        return "the names and the types of the columns"
    return f"the names and the types of the columns (declared: {', '.join(said)}; the others as they occur in the data)"


def read_held_out(
    path: str | os.PathLike[str],
    *,
    test: str | os.PathLike[str] | None = None,
    test_fraction: float | None = None,
    seed: int | None = None,
    **options: Any,
) -> HeldOut:
    """Read training and held-out data: from two places, or from one with a fraction held out (default 0.2).

    Each row is held out by its own coin, of probability `test_fraction`, so that a row whose place is empty moves no
    other row across the split and the split costs nothing. With `person` each person has a coin, which follows from the
    seed and the id alone. `options` are those of `read`.
    """
    if test is not None and test_fraction is not None:
        raise DataError("give either test or test_fraction, not both")
    whole = read(path, **options)
    if options.get("person") is not None and whole.persons is None:
        raise DataError(f"{os.fspath(path)} has no column {options['person']!r} that says whose a row is")
    if test is not None:
        other = read(test, **{**options, "classes": whole.classes or None})
        _alike(whole, other, test)
        return HeldOut(whole, other, None)
    fraction = 0.2 if test_fraction is None else test_fraction
    if not 0 < fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, not {fraction!r}")
    seed = secrets.randbits(63) if seed is None else seed
    held = torch.from_numpy(_coins(whole, seed) < fraction)
    train, rest = whole.subset(~held), whole.subset(held)
    if len(train) == 0 or len(rest) == 0:
        raise DataError(f"{os.fspath(path)} has {len(whole)} rows: too few to hold out {fraction:g} of them")
    return HeldOut(train, rest, seed)


def _coins(whole: Dataset | Table, seed: int) -> np.ndarray[Any, Any]:
    """A number in [0, 1) for each row, the same for all rows of a person."""
    if whole.persons is None:
        return np.random.default_rng(seed).random(len(whole))
    keys = (f"{seed} {key}".encode(errors="surrogatepass") for key in keys_of(whole.persons))
    drawn = (hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.array([int.from_bytes(digest, "big") / 2**64 for digest in drawn])


def _images(source: Path, pixels: Column, labels: torch.Tensor, names: tuple[str, ...]) -> Dataset:
    if pixels.dtype != np.uint8:
        raise DataError(f"{source}: images must be bytes (uint8, 0 to 255), not {pixels.dtype}: no scale is guessed")
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[-1] not in (1, 3)):
        raise DataError(f"{source}: images must have shape (n, height, width[, 1 or 3]), not {pixels.shape}")
    return Dataset(source.stem, as_images(pixels), labels, names)


def _alike(train: Dataset | Table, test: Dataset | Table, where: str | os.PathLike[str]) -> None:
    if isinstance(train, Dataset) and isinstance(test, Dataset):
        if train.input_shape != test.input_shape:
            raise DataError(f"{os.fspath(where)}: images of {test.input_shape}, but training has {train.input_shape}")
    elif isinstance(train, Table) and isinstance(test, Table):
        for name, column in train.columns.items():
            if name not in test.columns:
                raise DataError(f"{os.fspath(where)} has no column {name!r}, which the training data has")
            if (column.dtype == object) != (test.columns[name].dtype == object):
                raise DataError(f"{os.fspath(where)}: column {name!r} is text in one file and numbers in the other")
    else:
        raise DataError(f"{os.fspath(where)}: one is a table and the other holds images")
