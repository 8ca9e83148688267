"""Users' own data: a file or a folder to training data and held-out data."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adadp.data import labels as label_column
from adadp.data.dataset import Dataset, as_images
from adadp.data.imagefolder import read_images
from adadp.data.table import Column, Table
from adadp.data.tablefile import flattened, read_columns
from adadp.errors import DataError, DataNotFoundError

HELD_OUT_NOTE = "accuracy on held-out private rows is computed without noise and is not covered by the guarantee"


@dataclass(frozen=True)
class HeldOut:
    """Training data and held-out data. `seed` repeats the split; it is no secret, unless it was derived from one."""

    train: Dataset | Table
    test: Dataset | Table
    seed: int | None
    note: str = HELD_OUT_NOTE


def read(
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    classes: Sequence[object] | None = None,
    text: Collection[str] = (),
    missing: bool = False,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
    drop_other_labels: bool = False,
) -> Dataset | Table:
    """Read a folder of images by class, or a .npz, .csv or .parquet file with a column `label`.

    An .npz of numbers (n, d) or of columns (n,) is a table; one with uint8 images (n, height, width[,
    channels]) is a `Dataset`. `text` names columns to take as text. `missing=True` allows missing numbers
    (they become the column's noisy mean); otherwise a NaN is refused. `classes` declares the classes; else
    those that occur count as public. A row with another label, or with none, is refused, and the message names
    it; `drop_other_labels` declares that such rows are left out instead, without a word about them.
    """
    if drop_other_labels and classes is None:
        raise DataError("drop_other_labels goes with classes: declare those whose rows are kept")
    source = Path(path)
    if not source.exists():
        raise DataNotFoundError(f"{source} does not exist")
    if source.is_dir():
        return read_images(source, classes=classes, size=size, grey=grey, drop_other_labels=drop_other_labels)
    chosen = label if label is not None else "label"
    # Beside declared classes a label is text: what type its column has would depend on a single cell.
    columns = read_columns(source, text, () if classes is None else (chosen,))
    if chosen not in columns:
        raise DataError(f"{source} has no label column {chosen!r}; it has {', '.join(columns)}")
    values = columns.pop(chosen)
    if values.ndim != 1:
        raise DataError(f"{source}: the labels {chosen!r} must have shape (n,), not {values.shape}")
    numbers, names = label_column.encode(values, f"{source}, column {chosen!r}", classes, drop=drop_other_labels)
    public = label_column.public_names(names, classes is not None, drop_other_labels)
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != len(values):
            raise DataError(f"{source}: {name!r} has shape {column.shape}, but there are {len(values)} labels")
    if not columns:
        raise DataError(f"{source} has no column besides the label")
    kept = numbers != label_column.UNLISTED
    if not kept.all():
        numbers = numbers[kept]
        columns = {name: column[kept.numpy()] for name, column in columns.items()}
    if not len(numbers):
        raise DataError(f"{source}: no row of the column {chosen!r} has one of the classes ({', '.join(names)})")
    if len(columns) == 1 and next(iter(columns.values())).ndim > 2:
        pixels = next(iter(columns.values()))
        return replace(_images(source, pixels, numbers, names), public=(public, "the size of the images"))
    flat = flattened(source, columns)
    for name, column in flat.items():
        if column.dtype.kind == "f" and not missing and np.isnan(column).any():
            row = int(np.isnan(column).argmax()) + 1
            raise DataError(
                f"{source}: column {name!r} holds NaN or a missing number (row {row}). Remove such rows, or allow "
                "missing numbers"
            )
        if column.dtype.kind == "f" and np.isinf(column).any():
            raise DataError(f"{source}: column {name!r} holds an infinite number")
    return Table(source.stem, flat, numbers, names, (public, "the names and the types of the columns"))


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
    other row across the split and the split costs nothing. `options` are those of `read`.
    """
    if test is not None and test_fraction is not None:
        raise DataError("give either test or test_fraction, not both")
    whole = read(path, **options)
    if test is not None:
        other = read(test, **{**options, "classes": whole.classes})
        _alike(whole, other, test)
        return HeldOut(whole, other, None)
    fraction = 0.2 if test_fraction is None else test_fraction
    if not 0 < fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, not {fraction!r}")
    seed = secrets.randbits(63) if seed is None else seed
    held = torch.from_numpy(np.random.default_rng(seed).random(len(whole)) < fraction)
    train, rest = whole.subset(~held), whole.subset(held)
    if len(train) == 0 or len(rest) == 0:
        raise DataError(f"{os.fspath(path)} has {len(whole)} rows: too few to hold out {fraction:g} of them")
    return HeldOut(train, rest, seed)


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
