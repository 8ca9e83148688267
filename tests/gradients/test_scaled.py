"""Gradients multiplied elementwise that are measured and summed without being made: what GPUs do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adadp.gradients.forms.factors import IDENTITY, DiagonalFactor, Full
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.forms.scaled import Scaled
from adadp.gradients.layers.convolution import Convolution, Geometry


def sequences() -> tuple[PerExample, Scaled, Tensor]:
    torch.manual_seed(0)
    form = Products(torch.randn(6, 5, 7), torch.randn(6, 5, 4))
    scale = torch.rand(4, 7) * 3
    return form, Scaled(form, scale, lambda: form._scaled_norms(scale), form._weighted_product), scale


def images() -> tuple[PerExample, Scaled, Tensor]:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size((4, 3, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    form = Convolution(torch.randn(6, 3, 8, 8), torch.randn(6, 4, 8, 8), geometry)
    scale = torch.rand(4, 3, 3, 3) * 3
    return form, Scaled(form, scale, lambda: form._measured(scale), form.weighted_sum), scale


@pytest.mark.parametrize("make", [sequences, images])
def test_norms_bound_what_is_summed(make: object) -> None:
    form, scaled, scale = make()  # type: ignore[operator]
    dense = form.dense(slice(0, 6)) * scale
    torch.testing.assert_close(scaled.dense(slice(0, 6)), dense)
    exact = dense.double().flatten(1).norm(dim=1)
    found = scaled.squared_norms().sqrt()
    assert (found >= exact).all()
    assert (found <= exact * (1 + 2e-4)).all()  # additions of two sums are allowed for
    weights = torch.rand(6)
    total = scaled.weighted_sum(weights, weights > 0)
    expected = torch.einsum("n,n...->...", weights, dense)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    twice = scaled.scaled(scale)
    torch.testing.assert_close(twice.dense(slice(0, 6)), dense * scale)


def test_the_norms_of_the_unscaled_are_those_of_scale_one() -> None:
    form, _, _ = images()
    assert isinstance(form, Convolution)
    torch.testing.assert_close(form._measured(None), form.squared_norms(), rtol=1e-4, atol=0.0)


def test_what_only_multiplies_elementwise_is_known() -> None:
    down, across = DiagonalFactor(torch.rand(4)), DiagonalFactor(torch.rand(7))
    gradient = torch.randn(4, 7)
    for left, right in ((down, across), (IDENTITY, across), (down, IDENTITY)):
        scale = left.times_columns(right, 4, 7)
        assert scale is not None
        torch.testing.assert_close(gradient * scale, left.apply_left(right.apply(gradient)))
    assert IDENTITY.times_columns(IDENTITY, 4, 7) is None
    assert Full(torch.eye(4), torch.tensor(2.0), 1.0).times_columns(across, 4, 7) is None
