"""One line about a model, and all names on request."""

from __future__ import annotations

import warnings

import pytest
import torch
from loop import private
from torch import Tensor, nn

import adadp
from adadp.errors import ModelNotice


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Shift(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def test_modules_without_a_rule_are_summed_up_once() -> None:
    model = nn.Sequential(Scale(), Shift(), nn.Sequential(Scale()), nn.Linear(3, 2))
    with pytest.warns(ModelNotice) as said:
        engine, model, _, _ = private(model, func_chunk=8)
    assert [str(one.message) for one in said] == [
        "3 modules of 2 kinds have no rule (Scale x2, Shift): torch.func takes their per-example gradients, 8 examples "
        "at a time; adadp.notes(model) has every name"
    ]
    how = "no rule for this kind of module, so torch.func takes its per-example gradients, 8 examples at a time"
    lines = [f"{name}: {how}" for name in ("0 (Scale)", "1 (Shift)", "2.0 (Scale)")]
    assert adadp.notes(model) == lines
    assert adadp.notes(torch.compile(model)) == lines
    engine.detach(model)
    with pytest.warns(ModelNotice):
        private(model, engine, func_chunk=8)
    assert adadp.notes(model) == lines


def test_one_module_and_none() -> None:
    with pytest.warns(ModelNotice, match=r"^1 module has no rule \(Scale\): torch.func takes its .* 32 examples"):
        private(nn.Sequential(Scale(), nn.Linear(3, 2)))
    with pytest.warns(ModelNotice, match=r"^2 modules have no rule \(Scale x2\): torch.func takes their"):
        private(nn.Sequential(Scale(), Scale(), nn.Linear(3, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, model, _, _ = private()
        asked = private(nn.Sequential(Scale(), nn.Linear(3, 2)), through_func=["0"])[1]
    assert adadp.notes(model) == adadp.notes(asked) == []
