"""Gradients of all parameters at once. Small ones are worked on side by side on a GPU, and here for the test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adadp.gradients import collection
from adadp.gradients.collection import Gradients
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.products import Products

SHAPES = {"a": (3,), "b": (), "c": (2, 2), "d": (5,)}


def gradients(first: float) -> Gradients:
    torch.manual_seed(0)
    forms = {name: Dense(torch.randn(6, *shape)) for name, shape in SHAPES.items()}
    forms["c"].gradients[1, 0, 1] = first
    keep = torch.tensor([True, True, True, True, True, False])
    return Gradients({**forms, "w": Products(torch.randn(6, 3, 4), torch.randn(6, 3, 2))}, 6, scale=0.5, keep=keep)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "is_small", lambda form: type(form) is Dense)


def answers(given: Gradients, left_out: str | None) -> dict[str, dict[str, Tensor]]:
    bounds = {
        name: torch.rand(form.shape, generator=torch.Generator().manual_seed(1))
        for name, form in given.forms.items()
        if name != left_out
    }
    weights = torch.where(given.finite(), torch.linspace(0.1, 1.0, 6), 0.0)
    clamped = given.clamped_sums(bounds, moments=True)
    squares = {name: given.forms[name].square_sum(given.finite()) for name in bounds}
    return {
        "norms": {"": given.norms()}, "finite": {"": given.finite()}, "sums": given.weighted_sums(weights),
        "clamped": clamped, "squares": squares,
    }  # fmt: skip


@pytest.mark.parametrize("first", [1.0, math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("left_out", [None, "a", "w"])
def test_side_by_side_is_one_by_one(monkeypatch: pytest.MonkeyPatch, first: float, left_out: str | None) -> None:
    alone = answers(gradients(first), left_out)
    monkeypatch.setattr(collection, "is_small", lambda form: type(form) is Dense)
    made = gradients(first)
    assert made._small is not None
    assert made._others.keys() == {"w"}
    found = answers(made, left_out)
    for kind, expected in alone.items():
        assert found[kind].keys() == expected.keys()
        for name, value in expected.items():
            assert found[kind][name].shape == value.shape
            close = 1e-4 if kind == "norms" else 1e-6  # these are bounds, taken in two ways
            torch.testing.assert_close(found[kind][name], value, rtol=close, atol=1e-6, equal_nan=True)
    assert bool(found["finite"][""][1]) == math.isfinite(first)


@pytest.mark.usefixtures("together")
def test_norms_side_by_side_bound_what_is_added() -> None:
    made = gradients(1e-30)
    norms = made.norms()
    for example in range(6):
        sums = made.weighted_sums(torch.eye(6)[example])
        length = math.sqrt(sum(value.double().square().sum().item() for value in sums.values()))
        assert length <= norms[example] <= length * 1.01


@pytest.mark.usefixtures("together")
def test_squares_are_at_hand() -> None:
    made = gradients(1.0)
    made.cache_square_sums()
    for name in SHAPES:
        form = made.forms[name]
        assert form._square_sum_cache is not None
        torch.testing.assert_close(form.square_sum(made.finite()), form._square_sum(made.finite()))


def test_nothing_is_side_by_side_on_a_cpu() -> None:
    assert gradients(1.0)._small is None
