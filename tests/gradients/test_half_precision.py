"""Sequences' products in half precision: what is measured bounds what is summed, whatever the factors hold.

The reference kernels stand in for a GPU's, which `test_cuda.py` has.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gradients.reference import arbitrary
from gradients.test_per_example import assert_bounds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adadp import Diagonal, Ellipsoid, Kronecker
from adadp.gradients.collection import Gradients
from adadp.gradients.forms import half_precision as halves
from adadp.gradients.forms import products
from adadp.gradients.forms.products import Products
from adadp.gradients.layers import embedding
from adadp.gradients.layers.embedding import Rows, Tied
from adadp.shapes import Paid, Shape


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose user allows TF32."""
    monkeypatch.setattr(products, "may_be_halved", lambda outputs, inputs: outputs.shape[1] > 1)
    costs = products.Costs(gram=1e9, short_gram=1e9, again=15, stored=1e9, most_stored=0)
    monkeypatch.setitem(products.COSTS, "cpu", costs)


def form(inputs: Tensor, outputs: Tensor) -> Products:
    made = Products(inputs, outputs)
    assert made._way == "half"
    return made


def exact(made: Products) -> Tensor:
    return made.outputs.double().mT @ made.inputs.double()


def test_norms_and_sums_are_those_of_the_products() -> None:
    torch.manual_seed(0)
    made = form(torch.randn(6, 40, 9), 1e-5 * torch.randn(6, 40, 13))
    truth = exact(made)
    torch.testing.assert_close(made.squared_norms().sqrt(), truth.flatten(1).norm(dim=1), rtol=2e-3, atol=0.0)
    weights = torch.rand(6)
    weighted = (truth * weights.double().view(-1, 1, 1)).sum(0)
    assert (made.weighted_sum(weights, None) - weighted).norm() <= 2e-3 * weighted.norm()
    scale = torch.rand(13, 9)
    scaled = made.scaled(scale)
    torch.testing.assert_close(
        scaled.squared_norms().sqrt(), (truth * scale).flatten(1).norm(dim=1), rtol=2e-3, atol=0.0
    )
    assert (scaled.weighted_sum(weights, None) - weighted * scale).norm() <= 2e-3 * weighted.norm()
    bound, keep = torch.full((13, 9), 1e-5), torch.tensor([True, True, False, True, True, True])
    clamped = (3 * truth[keep]).clamp(-1e-5, 1e-5).sum(0)
    assert (made.clamped_sum(bound, 3.0, keep, moments=True) - clamped).norm() <= 2e-3 * clamped.norm()
    squares = truth[keep].square().sum(0)
    assert (made.square_sum(keep) - squares).norm() <= 2e-3 * squares.norm()


def test_what_is_measured_is_what_is_summed() -> None:
    """Cutting moves the norm by more than the bound allows for, and that does not matter: the sum is cut alike."""
    made = form(torch.full((1, 64, 4), 1 + 2.0**-11 + 2.0**-20), torch.full((1, 64, 4), 1 + 2.0**-11 + 2.0**-20))
    bound, added = made.squared_norms().sqrt(), made.weighted_sum(torch.ones(1), None).double().norm()
    assert added <= bound
    assert bound <= added * (1 + 1e-4)
    assert abs(added / exact(made).norm() - 1) > 5e-4


def _cancelling() -> Products:
    """Cut to the nearest eleven bits, both tokens' inputs are the same; whole, they are not."""
    inputs, outputs = torch.zeros(1, 16, 4), torch.zeros(1, 16, 4)
    inputs[0, 0, 0], inputs[0, 1, 0] = 1 + 2.0**-10 - 2.0**-12, -(1 + 2.0**-10)
    outputs[0, :2, 0] = 1e6
    return form(inputs, outputs)


def test_gradients_that_are_made_are_the_cut_ones() -> None:
    torch.manual_seed(0)
    for made in (_cancelling(), form(torch.randn(3, 40, 5), torch.randn(3, 40, 130))):
        for part in (made, made.scaled(torch.rand(made.shape))):
            lengths = part.dense(slice(0, made.count)).double().flatten(1).norm(dim=1)
            assert (lengths <= part.squared_norms().sqrt()).all()
            alone = part.weighted_sum(torch.ones(made.count), None)
            torch.testing.assert_close(part.dense(slice(0, made.count)).sum(0), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [Diagonal(), Kronecker()])
def test_statistics_that_are_paid_for_stay_within_what_they_claim(shape: Shape) -> None:
    """Weights that bound the cut gradients must meet the squares of these, not of the whole ones."""
    clipping = Ellipsoid(1.0, shape=shape, source=Paid())
    made = _cancelling()
    clipping.parameters = {"w": torch.zeros(4, 4)}
    statistics = clipping._statistics(Gradients({"w": made}, 1, keep=torch.ones(1, dtype=torch.bool)))
    assert torch.cat([value.flatten() for value in statistics.values()]).norm() <= shape.low_sensitivity


def test_a_table_that_is_looked_up_too_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are measured whole. A small token beside large ones doubles where it is cut."""
    for module in (products, embedding):
        monkeypatch.setattr(module, "unit_roundoff", lambda tensor: 2.0**-9)
    inputs, outputs = torch.zeros(1, 16, 4), torch.zeros(1, 16, 8)
    inputs[0, 0, 0], outputs[0, 1, 0] = 2.0**50, 2.0**50
    inputs[0, 2, 1] = outputs[0, 2, 1] = 2.0 ** (50 - 38.98)
    rows = Rows(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 4), (8, 4))
    tied = Tied(rows, form(inputs, outputs))
    assert tied.weighted_sum(torch.ones(1), None).double().norm() <= tied.squared_norms().sqrt()


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_tokens_that_cancel(size: float) -> None:
    torch.manual_seed(0)
    inputs, outputs = torch.randn(4, 64, 16), 1e-3 * torch.randn(4, 64, 16)
    inputs[:, 1::2] = inputs[:, ::2]
    large = size * torch.randn(4, 32, 16)
    outputs[:, ::2] += large
    outputs[:, 1::2] -= large
    assert_bounds(form(inputs, outputs))
    assert_bounds(form(inputs, outputs).scaled(torch.rand(16, 16)))


def test_huge_and_tiny_values() -> None:
    torch.manual_seed(0)
    for size in (1e30, 1e-30, 1e18, 1e-44):
        inputs, outputs = torch.randn(3, 64, 8) / size, torch.randn(3, 64, 8) * size
        if inputs.isfinite().all() and outputs.isfinite().all():
            assert_bounds(form(inputs, outputs))
            assert bool(form(inputs, outputs).squared_norms().isfinite().all())
            scale = torch.rand(8, 8) + 0.5
            assert_bounds(form(inputs, outputs).scaled(scale * 1e-20))
            assert_bounds(form(inputs, outputs).scaled(scale * 1e20))
    no_scale = form(torch.randn(2, 64, 3), torch.randn(2, 64, 4)).scaled(torch.zeros(4, 3))
    assert no_scale.squared_norms().tolist() == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bound_holds_for_arbitrary_values(data: st.DataObject) -> None:
    count, tokens, columns, rows = (data.draw(st.integers(*range_)) for range_ in ((1, 3), (2, 4), (1, 4), (1, 4)))
    tensor = partial(arbitrary, data)
    made = form(tensor(count, tokens, columns), tensor(count, tokens, rows))
    assert_bounds(made)
    assert_bounds(made.scaled(tensor(rows, columns)))


def test_bad_examples_stay_alone() -> None:
    torch.manual_seed(0)
    inputs, outputs = torch.randn(5, 40, 6), torch.randn(5, 40, 7)
    others = form(inputs[[0, 4]], outputs[[0, 4]])
    inputs[1, 0, 0], outputs[2, 0, 0], inputs[3] = float("nan"), float("inf"), 3e38
    made = form(inputs, outputs)
    keep = made.squared_norms().isfinite()
    assert keep.tolist() == made.finite().tolist() == [True, False, False, False, True]
    for part in (made._halved, made.scaled(torch.ones(7, 6))):  # asked by themselves, they do not hide it
        assert part.finite().tolist() == keep.tolist()
    torch.testing.assert_close(made.squared_norms()[keep], others.squared_norms(), rtol=1e-6, atol=0.0)
    weights = torch.tensor([0.5, 7.0, 7.0, 7.0, 0.25])
    torch.testing.assert_close(made.weighted_sum(weights, keep), others.weighted_sum(weights[keep], None))
    everybody = torch.ones(5, dtype=torch.bool)
    bound = torch.ones(7, 6)
    torch.testing.assert_close(made.clamped_sum(bound, 1.0, keep), others.clamped_sum(bound, 1.0, everybody[:2]))
    assert made.clamped_sum(bound, 1.0, everybody).isfinite().all()


def test_one_example_changes_no_other() -> None:
    """A common scale for a lot would: the largest example would decide how the others are cut."""
    torch.manual_seed(0)
    inputs, outputs = torch.randn(3, 40, 6), torch.randn(3, 40, 7)
    inputs[2] *= 1e12
    weights = torch.tensor([1.0, 1.0, 0.0])
    with_it, without = form(inputs, outputs), form(inputs[:2], outputs[:2])
    # Cut to their own eleven bits, not to some of the largest's: what differs is how a processor adds.
    torch.testing.assert_close(with_it.squared_norms()[:2], without.squared_norms(), rtol=1e-6, atol=0.0)
    sums = with_it.weighted_sum(weights, None), without.weighted_sum(weights[:2], None)
    torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-5)


def test_only_where_fewer_bits_are_allowed() -> None:
    factors = torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    assert not halves.may_be_halved(*factors), "not on a CPU"


def test_only_what_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "matmul_precision", lambda: "high")

    class OnGPU(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    def factor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnGPU)

    assert halves.may_be_halved(factor(2, 64, 8), factor(2, 64, 8))
    assert not halves.may_be_halved(factor(2, 64, 0), factor(2, 64, 8))
    assert not halves.may_be_halved(factor(2, 15, 8), factor(2, 15, 8))
    assert not halves.may_be_halved(factor(2, 64, 2**16), factor(2, 64, 2**16))
    assert not halves.may_be_halved(factor(2, 64, 8, dtype=torch.float64), factor(2, 64, 8, dtype=torch.float64))
