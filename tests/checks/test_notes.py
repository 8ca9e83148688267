"""One line about a model, and all names on request."""

from __future__ import annotations

import warnings

import pytest
import torch
from loop import mlp, private
from torch import nn

import adadp
from adadp.checks.notes import say_through_func
from adadp.errors import ModelNotice


def test_modules_without_a_rule_are_summed_up_in_one_line() -> None:
    model, without_rule = mlp(), [("0", "Scale"), ("1", "Shift"), ("2.0", "Scale")]
    with pytest.warns(ModelNotice) as said:
        say_through_func(model, without_rule, 8, stacklevel=1)
    assert [str(one.message) for one in said] == [
        "3 modules of 2 kinds have no rule (Scale x2, Shift): torch.func takes their per-example gradients, 8 examples "
        "at a time; adadp.notes(model) has every name"
    ]
    assert said[0].filename == __file__
    how = "no rule for this kind of module, so torch.func takes its per-example gradients, 8 examples at a time"
    lines = [f"{name}: {how}" for name in ("0 (Scale)", "1 (Shift)", "2.0 (Scale)")]
    assert adadp.notes(model) == lines
    assert adadp.notes(torch.compile(model)) == lines
    with pytest.warns(ModelNotice):  # when it is made private again
        say_through_func(model, without_rule, 8, stacklevel=1)
    assert adadp.notes(model) == lines


@pytest.mark.parametrize(
    ("without_rule", "words"),
    [
        ([("a", "Scale")], r"^1 module has no rule \(Scale\): torch.func takes its .* 32 examples"),
        ([("a", "Scale"), ("b", "Scale")], r"^2 modules have no rule \(Scale x2\): torch.func takes their"),
        ([(str(kind), f"K{kind}") for kind in range(5)], r"^5 modules of 5 kinds .* \(K0, K1, K2 and 2 more\)"),
    ],
)
def test_words(without_rule: list[tuple[str, str]], words: str) -> None:
    with pytest.warns(ModelNotice, match=words):
        say_through_func(mlp(), without_rule, 32, stacklevel=1)


def test_nothing_is_said_where_all_is_known_or_was_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, model, _, _ = private()
        asked = private(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), through_func=["0"])[1]
        say_through_func(model, [], 32, stacklevel=1)
    assert adadp.notes(model) == adadp.notes(asked) == []
