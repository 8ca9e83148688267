"""The form of data without the data: what is public or was declared, and not one row.

An outline stands where data stands. Its tensors are on torch's "meta" device, which have shapes and no values, and its
columns have no cells: code that looks ahead with it cannot read what it must not know, and whatever tries to raises.
`made_up` fills the form with rows of noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from adadp.data import labels, standard
from adadp.data.catalogue import CATALOGUE
from adadp.data.columns import Declared
from adadp.data.dataset import Dataset
from adadp.data.own import HeldOut
from adadp.data.table import Column, Table
from adadp.errors import ConfigurationError, DataError

_TYPES = {"number": np.float64, "date": np.float64, "flag": np.bool_, "category": np.object_, "text": np.object_}
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")
_DAYS = 20_000  # a made-up date is one of so many days from 1970 on


@dataclass(frozen=True)
class Form:
    """What is declared of data of the user's own.

    Attributes:
        rows: how many there are, held-out ones included; persons, where rows belong to persons.
        classes: names of the classes; empty where a number is predicted.
        target: lowest and highest value of the number to be predicted; None for classes.
        columns: of a table, as they are declared for training.
        shape: of an image, (channels, height, width); or (n,) for a table of n columns of numbers that are not named.
        held_out: the part of the rows that is held out; 0 where held-out rows are in another file.
        persons: rows belong to persons.

    """

    rows: int
    classes: Sequence[object] = ()
    target: tuple[float, float] | None = None
    columns: Declared = field(default_factory=Declared)
    shape: tuple[int, ...] | None = None
    held_out: float = 0.2
    persons: bool = False

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise DataError(f"examples must be 2 or more, not {self.rows:,}")
        if not 0 <= self.held_out < 1:
            raise DataError(f"test_fraction must be between 0 and 1, not {self.held_out!r}")
        if bool(self.classes) == (self.target is not None):
            raise DataError(
                "declare classes= (no,yes), or task= regression and target_range= (0..100), the range of the number"
            )
        if bool(self.columns.kinds) == (self.shape is not None):
            raise DataError(
                "the data is not opened: declare each column that is to be used (number=, category=, text=, date=), or "
                "the shape= of an example: 3x32x32 for images (channels x height x width), 40 for 40 columns of numbers"
            )
        if self.shape is not None and (len(self.shape) not in (1, 3) or min(self.shape) < 1):
            raise DataError(f"shape must be channels x height x width, or a number of columns, not {self.shape}")


def of_name(name: str) -> HeldOut:
    """The outline of a data set that is known by name. No file is looked for.

    Raises:
        DataError: there is none of this name.

    """
    if name == "digits":
        train, test = (_images(name, rows, (1, 8, 8), standard.DIGITS, 16) for rows in standard.DIGITS_ROWS)
        return HeldOut(train, test, None)
    if name not in CATALOGUE:
        raise DataError(f"no data set is called {name!r}; there are {', '.join(standard.NAMES)}")
    entry = CATALOGUE[name]
    train, test = (_images(name, entry.rows[split], entry.image, entry.classes, 255) for split in ("train", "test"))
    return HeldOut(train, test, None)


def of_form(name: str, form: Form) -> HeldOut:
    """The outline of data of the user's own, called `name`.

    How many rows are held out is drawn by coins when the data is read: here it is what is expected.

    Raises:
        DataError: the form is not one that data can have.

    """
    classes = labels.declared(form.classes) if form.classes else ()
    held = round(form.held_out * form.rows)
    parts = [_part(name, rows, classes, form) for rows in (form.rows - held, held)]
    return HeldOut(parts[0], parts[1], None)


def _part(name: str, rows: int, classes: tuple[str, ...], form: Form) -> Dataset | Table:
    persons = np.arange(rows) if form.persons else None
    if form.shape is not None and len(form.shape) == 3:
        if form.target is not None:
            raise DataError("images have classes: a number is predicted from tables only")
        return replace(_images(name, rows, form.shape, classes, 255), persons=persons)
    kinds = dict(form.columns.kinds)
    if form.shape is not None:
        kinds = {f"column {number + 1}": "number" for number in range(form.shape[0])}
    columns: dict[str, Column] = {column: np.empty(0, _TYPES[kind]) for column, kind in kinds.items()}
    predicted = torch.int64 if form.target is None else torch.float32
    return Table(
        name, columns, torch.empty(rows, dtype=predicted, device="meta"), classes,
        kinds=kinds, declared=form.columns, target=form.target, persons=persons,
    )  # fmt: skip


def _images(name: str, rows: int, shape: tuple[int, ...], classes: tuple[str, ...], maximum: int) -> Dataset:
    images = torch.empty((rows, *shape), dtype=torch.uint8, device="meta")
    return Dataset(name, images, torch.empty(rows, dtype=torch.int64, device="meta"), classes, maximum)


def made_up(form: Dataset | Table, rows: int, generator: torch.Generator) -> Dataset | Table:
    """So many rows of random values of this form, one for each person.

    Args:
        form: an outline, or data: its rows are not looked at.
        rows: how many to make.
        generator: of the values, on the CPU.

    """
    persons = None if form.persons is None else np.arange(rows)
    if form.labels.is_floating_point():
        drawn = 2 * torch.rand(rows, generator=generator) - 1
    else:
        drawn = torch.randint(max(1, len(form.classes)), (rows,), generator=generator)
    if isinstance(form, Dataset):
        images = torch.randint(form.maximum + 1, (rows, *form.input_shape), generator=generator, dtype=torch.uint8)
        return replace(form, images=images, labels=drawn, persons=persons)
    columns = {name: _column(name, kind, form.declared, rows, generator) for name, kind in form.kinds.items()}
    return replace(form, columns=columns, labels=drawn, persons=persons)


def _column(name: str, kind: str, declared: Declared, rows: int, generator: torch.Generator) -> Column:
    if kind == "flag":
        return _numpy(torch.rand(rows, generator=generator) < 0.5)
    if kind in ("number", "date"):
        usual = (0.0, float(_DAYS)) if kind == "date" else (-math.sqrt(3), math.sqrt(3))
        low, high = declared.ranges.get(name, usual)
        return _numpy(low + (high - low) * torch.rand(rows, generator=generator, dtype=torch.float64))
    words = declared.values.get(name, _WORDS)
    count = 8 if kind == "text" else 1
    drawn = torch.randint(len(words), (rows, count), generator=generator).tolist()
    return np.array([" ".join(words[place] for place in row) for row in drawn], dtype=object)


def _numpy(values: Tensor) -> Column:
    found: Column = values.numpy()
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """(channels, height, width) from "3x32x32", (columns,) from "40"."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(
            f"shape must look like 3x32x32 (images: channels x height x width) or 40 (columns of numbers), not {text!r}"
        )
    return tuple(int(part) for part in parts)
