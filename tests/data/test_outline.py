"""Outlines: the form of data, of which no value can be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adadp.data import DataError, Dataset, Table, load, outline
from adadp.data.catalogue import CATALOGUE
from adadp.data.columns import declare
from adadp.errors import ConfigurationError


def test_the_digits_are_as_they_are_outlined() -> None:
    form = outline.of_name("digits")
    for found, expected in ((load("digits"), form.train), (load("digits", "test"), form.test)):
        assert isinstance(expected, Dataset)
        assert (len(found), found.input_shape, found.classes, found.maximum) == (
            len(expected), expected.input_shape, expected.classes, expected.maximum
        )  # fmt: skip


SLOW = ("cifar10", "cifar100")  # to decode


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(CATALOGUE)]
)
def test_data_sets_are_as_they_are_outlined(name: str, real_data: str) -> None:
    form = outline.of_name(name)
    for split, expected in (("train", form.train), ("test", form.test)):
        try:
            found = load(name, split, data_dir=real_data)  # type: ignore[arg-type]
        except DataError as error:
            pytest.skip(str(error).splitlines()[0])
        assert isinstance(expected, Dataset)
        assert (len(found), found.input_shape, found.classes) == (
            len(expected), expected.input_shape, expected.classes
        )  # fmt: skip


def test_no_value_can_be_read() -> None:
    train = outline.of_name("mnist").train
    assert isinstance(train, Dataset)
    for read in (lambda: train.labels[0].item(), lambda: train.inputs().sum().item(), lambda: train.images.numpy()):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            read()


def test_a_table_has_the_columns_that_were_declared() -> None:
    columns = declare(number=["age=0..120", "bmi"], category=["size=S,M", "town"], text=["notes"], date=["seen"])
    pair = outline.of_form("people", outline.Form(1000, classes=("no", "yes"), columns=columns, held_out=0.25))
    assert (len(pair.train), len(pair.test)) == (750, 250)
    made = outline.made_up(pair.train, 40, torch.Generator().manual_seed(0))
    assert isinstance(made, Table)
    assert list(made.columns) == ["age", "bmi", "size", "town", "notes", "seen"]
    assert all(len(values) == 40 for values in made.columns.values())
    assert ((made.columns["age"] >= 0) & (made.columns["age"] <= 120)).all()
    assert set(made.columns["size"]) == {"S", "M"}
    assert made.columns["bmi"].dtype == np.float64
    assert set(made.labels.tolist()) == {0, 1}


def test_persons_and_numbers_to_predict() -> None:
    form = outline.Form(100, target=(0.0, 50.0), shape=(3,), persons=True, held_out=0.0)
    train = outline.of_form("visits", form).train
    assert train.persons is not None
    made = outline.made_up(train, 20, torch.Generator().manual_seed(0))
    assert made.labels.dtype == torch.float32
    assert float(made.labels.abs().max()) <= 1
    assert made.persons is not None
    assert len(set(made.persons.tolist())) == 20


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 1}, "examples"),
        ({"rows": 10, "classes": ("a", "b")}, "not opened"),
        ({"rows": 10, "shape": (3,)}, "classes"),
        ({"rows": 10, "classes": ("a", "b"), "shape": (3, 8)}, "channels"),
        ({"rows": 10, "classes": ("a", "b"), "shape": (3,), "held_out": 1.0}, "test_fraction"),
    ],
)
def test_what_is_not_declared_is_asked_for(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        outline.Form(**wrong)  # type: ignore[arg-type]


def test_shapes_in_words() -> None:
    assert outline.parse_shape("3x32x16") == (3, 32, 16)
    assert outline.parse_shape("40") == (40,)
    with pytest.raises(ConfigurationError, match="3x32x32"):
        outline.parse_shape("32x32")
