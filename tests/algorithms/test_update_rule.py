"""The paper's update rule."""

from __future__ import annotations

import math

import pytest
import torch

from adadp.algorithms.update_rule import Normalised
from adadp.errors import ConfigurationError


def test_it_divides_by_the_root_of_the_running_mean_square() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    rule = Normalised([parameter], lr=0.01, gamma=0.1, epsilon0=1e-8)
    place, mean_square = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([3.0, -0.5], [1.0, 0.0], [-2.0, 4.0]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        rule.step()
        for i, g in enumerate(gradient):
            mean_square[i] = 0.9 * mean_square[i] + 0.1 * g * g
            place[i] -= 0.01 * g / math.sqrt(mean_square[i] + 1e-8)
    assert parameter.detach().tolist() == pytest.approx(place, rel=1e-12)


def test_the_step_does_not_depend_on_the_gradients_unit() -> None:
    ends = []
    for unit in (1.0, 1000.0):
        parameter = torch.nn.Parameter(torch.zeros(3))
        rule = Normalised([parameter], lr=0.1)
        for _ in range(5):
            parameter.grad = unit * torch.tensor([1.0, -2.0, 0.5])
            rule.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends)


def test_a_parameter_without_a_gradient_stays_and_a_closure_is_called() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert Normalised([parameter]).step(lambda: 3.0) == 3.0
    assert parameter.detach().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"gamma": 0.0}, {"gamma": 1.5}, {"epsilon0": -1.0}, {"lr": math.nan}])
def test_numbers_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Normalised([torch.nn.Parameter(torch.ones(1))], **wrong)
