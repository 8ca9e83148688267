"""The forms of per-example gradients under values that cancel, overflow or vanish: a norm is always a bound."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gradients.reference import arbitrary, assert_forms, matrix_factor, power_of, spectrum_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adadp.gradients.collection import Gradients
from adadp.gradients.forms import per_example
from adadp.gradients.forms import products as product_forms
from adadp.gradients.forms.dense import Dense, Recomputed, Sandwiched, merged
from adadp.gradients.forms.factors import Factor, LowRank
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Bias, Products
from adadp.gradients.kernels.reference import CANCELLED
from adadp.gradients.rounding import norms
from adadp.shapes import Kronecker

WAYS = {  # tokens, columns, rows that make each way the cheapest, and what dense gradients may take
    "stored": (16, 8, 8, None),
    "gram": (4, 64, 64, 1),
    "again": (64, 16, 16, 1),
}


def assert_bounds(form: PerExample) -> None:
    """No example adds more to a sum than its norm says."""
    bounds = form.squared_norms().sqrt()
    for example in range(form.count):
        alone = torch.zeros(form.count)
        alone[example] = 1
        if bounds[example] < 1e37:  # beyond, the gradient itself is not finite in float32
            added = form.weighted_sum(alone, alone != 0).double().norm()
            assert added <= bounds[example] * (1 + 1e-9) + 1e-37  # below, float32 has few digits left
        if bounds[example].isfinite():
            clipped = form.weighted_sum(alone / bounds[example].clamp_min(1e-2), alone != 0).double().norm()
            assert clipped <= 1 + 1e-5


def products(way: str, monkeypatch: pytest.MonkeyPatch, inputs: Tensor, outputs: Tensor) -> Products:
    limit = WAYS[way][3]
    if limit is not None:
        for module in (per_example, product_forms):
            monkeypatch.setattr(module, "DENSE_BYTES", limit)
    form = Products(inputs, outputs)
    assert form._way == way
    return form


def sizes(way: str) -> tuple[int, int, int]:
    return WAYS[way][:3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, columns, rows = sizes(way)
    inputs, outputs = torch.randn(4, tokens, columns, dtype=dtype), torch.randn(4, tokens, rows, dtype=dtype)
    form = products(way, monkeypatch, inputs, outputs)
    assert (form.dense(slice(0, 4)).double().flatten(1).norm(dim=1) <= form.squared_norms().sqrt()).all()
    assert_forms({"w": form}, {"w": outputs.mT @ inputs}, 1e-9 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_cancel(monkeypatch: pytest.MonkeyPatch, way: str, size: float) -> None:
    """The same input with output gradients +w and -w, plus small ones. In float32 a rest of w remains in the sum."""
    torch.manual_seed(0)
    tokens, columns, rows = sizes(way)
    inputs, outputs = torch.randn(4, tokens, columns), 1e-3 * torch.randn(4, tokens, rows)
    inputs[:, 1::2] = inputs[:, ::2]
    large = size * torch.randn(4, tokens // 2, rows)
    outputs[:, ::2] += large
    outputs[:, 1::2] -= large
    form = products(way, monkeypatch, inputs, outputs)
    assert_bounds(form)
    rest = (outputs.double().mT @ inputs.double()).flatten(1).norm(dim=1)
    reach = (inputs.double().norm(dim=2) * outputs.double().norm(dim=2)).sum(1)
    bounds = form.squared_norms().sqrt()
    most = torch.maximum(rest + 1e-4 * reach, (1 + 1e-3) * CANCELLED * reach)
    assert bool((bounds <= most).all()), "the bound is far too large"
    assert bool((bounds >= CANCELLED * reach * (1 - 1e-6)).all()), "rounding would be most of what is added"


@pytest.mark.parametrize("tokens", [64, 512])
def test_a_sum_that_rounds_up_what_its_norm_lost(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Terms of half a last bit: a product of the whole loses them all, one of a little more than half doubles them."""
    for module in (per_example, product_forms):
        monkeypatch.setattr(module, "DENSE_BYTES", 1)
    inputs, outputs = torch.ones(2, tokens, 2), torch.full((2, tokens, 2), 0.9995 * 2.0**-24)
    outputs[:, 0] = 1
    form = Products(inputs, outputs)
    assert form._way == "again"
    weights = torch.tensor([0.5005, 0.0])
    added = form.weighted_sum(weights, weights != 0).double().norm()
    assert added <= 0.5005 * form.squared_norms()[0].sqrt() * (1 + 2.0**-20)


def test_tokens_that_cancel_leave_what_others_add_as_it_is() -> None:
    """A float32 sum that is 1e5 on the way to nothing keeps no digit below 1e-2 of what was in it before.

    Every one of `count` examples makes one row of the sum that coarse, within its own bound. What one example more adds
    is then rounded to whole steps, up in all rows alike.
    """
    count, columns, large = 62, 64, 1e7
    inputs, outputs = torch.zeros(2 + count, 2, columns), torch.zeros(2 + count, 2, count)
    inputs[2:] = 1
    outputs[2:, 0] = large * torch.eye(count)
    outputs[2:, 1] = -outputs[2:, 0]

    def total(examples: list[int]) -> Tensor:
        form = Products(inputs[examples], outputs[examples], planned=128)
        assert form._way == "gram"
        weights = (1 / form.squared_norms().sqrt()).clamp(max=1.0)
        return form.weighted_sum(weights, None).double()

    others = list(range(2, 2 + count))
    step, width = 2.0**-7, (count * columns) ** 0.5  # of float32 at what they are on the way
    steps = 0.9999 / (step * width)
    inputs[:2, 0], outputs[0, 0], outputs[1, 0] = 1, step * (0.5 - steps % 1 / 2), step * steps
    difference = total([0, 1, *others]) - total([0, *others])
    assert difference.norm() <= 1 + 1e-5


@pytest.mark.parametrize(("rows", "columns", "tokens", "way"), [(5, 7, 16, "stored"), (33, 17, 9, "gram")])
def test_what_an_example_adds_does_not_depend_on_where_it_lies(rows: int, columns: int, tokens: int, way: str) -> None:
    """Products are added in an order that addresses decide: of tokens that cancel, nothing is left but that order."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = torch.zeros(32, tokens, columns), torch.zeros(32, tokens, rows)
    half = tokens // 2
    inputs[1::2, :half] = torch.randn(half, columns, generator=generator)
    outputs[1::2, :half] = 1e8 * torch.randn(half, rows, generator=generator)
    inputs[:, half : 2 * half], outputs[:, half : 2 * half] = inputs[:, :half], -outputs[:, :half]

    def total(first: int) -> Tensor:
        form = Products(inputs[first:].clone(), outputs[first:].clone(), planned=64)
        assert form._way == way
        weights = (1 / form.squared_norms().sqrt()).clamp(max=1.0)
        return form.weighted_sum(weights, None).double()

    assert (total(0) - total(1)).norm() <= 1e-3  # the one that is taken away adds nothing


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_gram_norms_in_float32_are_bounds_and_close(data: st.DataObject) -> None:
    """Of tokens of all sizes, that cancel or do not, next to examples that must be done again in float64."""
    seed, tokens, columns, rows = (data.draw(st.integers(*span)) for span in ((0, 2**31), (2, 40), (1, 30), (1, 30)))
    generator = torch.Generator().manual_seed(seed)

    def drawn(width: int) -> Tensor:
        size = data.draw(st.sampled_from([1e-30, 1e-12, 1.0, 1e6, 1e15]))
        spread = data.draw(st.sampled_from([0.0, 1.0, 6.0, 20.0]))
        sizes = torch.exp(spread * torch.randn(3, tokens, 1, generator=generator)) * size
        return (torch.randn(3, tokens, width, generator=generator) * sizes).clamp(-1e30, 1e30)

    inputs, outputs = drawn(columns), drawn(rows)
    if data.draw(st.booleans()):  # an example whose halves all but cancel
        half = tokens // 2
        inputs[1, :half], outputs[1, :half] = inputs[1, half : 2 * half], -outputs[1, half : 2 * half] * (1 + 1e-5)
    form = Products(inputs, outputs)
    assert form._short_grams
    exact = (outputs.double().mT @ inputs.double()).flatten(1).norm(dim=1)
    found = form.gram_norms().sqrt()
    assert (found >= exact * (1 - 1e-12)).all()
    reach = (outputs.double().norm(dim=2) * inputs.double().norm(dim=2)).sum(1)
    assert (found <= exact * 1.009 + 1e-6 * reach).all()


def test_gram_norms_are_measured_in_float64_where_float32_would_not_do() -> None:
    assert Products(torch.zeros(1, 100, 600), torch.zeros(1, 100, 600))._short_grams
    assert not Products(torch.zeros(1, 200, 600), torch.zeros(1, 200, 600))._short_grams
    assert not Products(torch.zeros(1, 2, 3).double(), torch.zeros(1, 2, 3).double())._short_grams


@pytest.mark.parametrize("sizes", [(0, 4, 64, 64), (0, 64, 16, 16), (0, 1, 5, 6), (2, 0, 64, 64), (2, 4, 0, 64)])
def test_nothing_at_all(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int]) -> None:
    count, tokens, columns, rows = sizes
    for limit in (1, per_example.DENSE_BYTES):
        for module in (per_example, product_forms):
            monkeypatch.setattr(module, "DENSE_BYTES", limit)
        form = Products(torch.zeros(count, tokens, columns), torch.zeros(count, tokens, rows))
        assert form.squared_norms().tolist() == [0.0] * count
        assert form.finite().tolist() == [True] * count
        everybody = torch.ones(count, dtype=torch.bool)
        for total in (
            form.weighted_sum(torch.ones(count), everybody),
            form.clamped_sum(torch.ones(rows, columns), 1.0, everybody),
            form.square_sum(everybody),
        ):
            assert total.shape == (rows, columns)
            assert not total.any()


@pytest.mark.parametrize("way", [*WAYS, "vectors"])
def test_huge_and_tiny_values(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    torch.manual_seed(0)
    tokens, columns, rows = (1, 8, 8) if way == "vectors" else sizes(way)
    for size in (1e30, 1e-30, 1e18, 1e-44):
        inputs, outputs = torch.randn(3, tokens, columns) / size, torch.randn(3, tokens, rows) * size
        if not inputs.isfinite().all() or not outputs.isfinite().all():
            continue
        form = Products(inputs, outputs) if way == "vectors" else products(way, monkeypatch, inputs, outputs)
        assert_bounds(form)
        assert bool(form.squared_norms().isfinite().all())
        scale = torch.rand(rows, columns) + 0.5
        assert_bounds(form.scaled(scale))
        assert_bounds(form.scaled(scale * 1e-20).scaled(scale * 1e20))


@pytest.mark.parametrize("way", [*WAYS, "vectors"])
def test_bad_examples_stay_alone(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    torch.manual_seed(0)
    tokens, columns, rows = (1, 8, 8) if way == "vectors" else sizes(way)
    inputs, outputs = torch.randn(4, tokens, columns), torch.randn(4, tokens, rows)
    inputs[1, 0, 0] = float("nan")
    outputs[2, 0, 0] = float("inf")
    form = Products(inputs, outputs) if way == "vectors" else products(way, monkeypatch, inputs, outputs)
    keep = form.squared_norms().isfinite()
    assert keep.tolist() == [True, False, False, True]
    truth = (outputs.mT @ inputs)[keep].sum(0)
    torch.testing.assert_close(form.weighted_sum(keep.float(), keep), truth, rtol=1e-4, atol=1e-4)
    everybody = torch.ones(4, dtype=torch.bool)
    assert form.clamped_sum(torch.ones(rows, columns), 1.0, everybody).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bound_holds_for_arbitrary_values(data: st.DataObject) -> None:
    count, tokens, columns, rows = (data.draw(st.integers(1, 4)) for _ in range(4))
    tensor = partial(arbitrary, data)
    form = Products(tensor(count, tokens, columns), tensor(count, tokens, rows))
    assert_bounds(form)
    assert_bounds(form.scaled(tensor(rows, columns)))
    left, right = matrix_factor(tensor(rows, rows)), matrix_factor(tensor(columns, columns))
    for planned in (1, 1024):
        planned_form = Products(form.inputs, form.outputs, planned=planned)
        assert_bounds(planned_form.sandwiched(left, right))


def test_long_norms_do_not_drift() -> None:
    """A float32 sum of 4e7 equal squares stops growing."""
    long = torch.full((1, 40_000_000), 1.2345)
    truth = 1.2345 * 40_000_000**0.5
    assert truth * (1 - 1e-7) <= norms(long).item() <= truth * (1 + 1e-4)


def test_gradients_that_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    truth = torch.randn(5, 4, 3, dtype=torch.float64)
    for module in (per_example, product_forms):
        monkeypatch.setattr(module, "DENSE_BYTES", 100)
    assert_forms({"w": Recomputed(lambda examples: truth[examples], 5, (4, 3))}, {"w": truth}, 1e-9)
    both = merged([Dense(truth), Products(truth, torch.ones(5, 4, 4, dtype=torch.float64))])
    assert isinstance(both, Recomputed)
    assert_forms({"w": both}, {"w": truth + torch.ones(5, 4, 4, dtype=torch.float64).mT @ truth}, 1e-9)


def test_order_of_questions_does_not_matter() -> None:
    """A sum that was asked for before the norm is the one the norm bounds."""
    torch.manual_seed(0)
    inputs, outputs = torch.randn(2, 16, 8), 1e5 * torch.randn(2, 16, 8)
    inputs[:, 1::2], outputs[:, 1::2] = inputs[:, ::2], -outputs[:, ::2]
    form = Products(inputs, outputs)
    added = form.weighted_sum(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
    assert added.double().norm() <= form.squared_norms()[0].sqrt() * (1 + 1e-9)


def test_the_way_of_computing_is_chosen_by_a_public_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example more must not change how the others' norms are taken, near the size where the way changes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 60, 6, generator=generator)
    outputs = torch.randn(8, 60, 7, generator=generator)
    for module in (per_example, product_forms):  # seven examples fit, eight do not
        monkeypatch.setattr(module, "DENSE_BYTES", 7 * 6 * 7 * 4)
    all_of_them = Products(inputs, outputs, planned=8).squared_norms()
    one_less = Products(inputs[:-1], outputs[:-1], planned=8).squared_norms()
    assert torch.equal(all_of_them[:-1], one_less)
    # Without a public count the way does change here: the test would not see a difference that is not there.
    apart = Products(inputs[:-1], outputs[:-1]).squared_norms()
    assert not torch.equal(all_of_them[:-1], apart)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_huge_factor_of_a_zero_gradient_poisons_nobody(tokens: int) -> None:
    """3e38 times its weight is infinite, and infinity times the zero it meets is NaN in everybody's sum."""
    inputs, outputs = torch.ones(3, tokens, 2), torch.ones(3, tokens, 4)
    inputs[1], outputs[1] = 3e38, 0.0
    for form in (
        Products(inputs, outputs),
        Products(inputs, outputs).scaled(torch.full((4, 2), 2.0)),
        Products(outputs, inputs),
    ):
        lengths = form.squared_norms()
        keep = lengths.isfinite()
        assert keep[0]
        assert keep[2]
        weights = torch.where(keep, 3.0, 0.0)
        assert form.weighted_sum(weights, keep).isfinite().all()


def low_rank(columns: int, rank: int) -> Factor:
    """A low-rank factor with axes of very different lengths, as the exponent -1/4 of steep moments gives them."""
    spread = torch.randn(columns, columns) * torch.logspace(2, -2, columns)
    return power_of(spectrum_of(spread.T @ spread, 1e-3, rank), -0.25)


def exact_norms(tensor: Tensor, factor: Factor) -> Tensor:
    matrix = factor.matrix(tensor.shape[-1], torch.zeros((), dtype=torch.float64))
    return (tensor.double() @ matrix).flatten(1).norm(dim=1)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10])
@pytest.mark.parametrize("kind", ["random", "inside the basis", "outside it", "one coordinate", "zero"])
def test_norms_without_the_product_are_bounds_and_close(kind: str, scale: float) -> None:
    """What is taken off rest^2 |x|^2 is nearly all of it for an x inside the basis: no rounding may make it more."""
    torch.manual_seed(0)
    factor = low_rank(300, 32)
    assert isinstance(factor, LowRank)
    tensor = torch.randn(64, 300)
    if kind == "inside the basis":
        tensor = torch.randn(64, 32) @ factor.basis.T
    elif kind == "outside it":
        tensor = tensor - (tensor @ factor.basis) @ factor.basis.T
    elif kind == "one coordinate":
        tensor = torch.eye(300)[:64]
    elif kind == "zero":
        tensor = torch.zeros(64, 300)
    tensor = tensor * scale
    for shaped in (tensor, tensor.view(16, 4, 300)):
        truth, bound = exact_norms(shaped, factor), factor.norms(shaped, norms(shaped))
        assert (bound >= truth).all()
        room = 0.02 * float(factor.rest) * norms(shaped) + 1e-30  # of what it would be outside the basis
        assert (bound <= truth * (1 + 1e-5) + room).all()


@pytest.mark.parametrize("form", ["vectors", "stored"])
def test_sandwich_with_a_low_rank_factor(form: str) -> None:
    torch.manual_seed(0)
    left, right = low_rank(70, 32), low_rank(90, 32)
    tokens = 1 if form == "vectors" else 40
    inputs, outputs = torch.randn(5, tokens, 90), torch.randn(5, tokens, 70)
    inputs[1, 0, 3] = float("nan")
    outputs[2] *= 1e30
    inputs[3] *= 1e-20
    products = Products(inputs, outputs, planned=1024)
    made = products if form == "vectors" else Dense(products.dense(slice(0, 5)), planned=1024)
    inside = made.sandwiched(left, right)
    assert isinstance(inside, Sandwiched)
    assert_bounds(inside)
    keep = inside.squared_norms().isfinite()
    assert keep.tolist() == [True, False, True, True, True]
    exact = [factor.matrix(size, torch.zeros((), dtype=torch.float64)) for factor, size in ((left, 70), (right, 90))]
    truth = exact[0] @ (outputs.double().mT @ inputs.double()) @ exact[1]
    measured = inside.squared_norms().sqrt()[keep]
    torch.testing.assert_close(measured, truth.flatten(1).norm(dim=1)[keep], rtol=2e-2, atol=1e-30)
    weights = torch.tensor([1.0, 0.0, 0.0, 0.5, 2.0])
    total = (truth.nan_to_num() * weights.view(-1, 1, 1).double()).sum(0)
    torch.testing.assert_close(inside.weighted_sum(weights, weights != 0).double(), total, rtol=1e-3, atol=1e-3)


def steep(size: int) -> tuple[Tensor, Tensor]:
    """Second moments that are all in eight directions, and those directions."""
    basis = torch.linalg.qr(torch.randn(size, size))[0]
    values = torch.full((size,), 1e-3)
    values[:8] = 1e4
    return (basis * values) @ basis.T, basis[:, :8]


@pytest.mark.parametrize("form", ["vectors", "stored"])
@pytest.mark.parametrize("rank", [16, 64], ids=["low rank", "full"])
@pytest.mark.parametrize(("before", "damping"), [(0.25, 0.1), (1.0, 1e-3), (1.0, 1e-12), (2.0, 0.1)])
def test_one_example_more_changes_a_sum_by_one_bound(before: float, damping: float, rank: int, form: str) -> None:
    """Examples that a steep shape makes tiny have huge weights: their sum's rounding must not be multiplied back."""
    torch.manual_seed(0)
    rows, columns = (70, 90) if rank == 16 else (20, 30)
    count = 1024 if form == "vectors" else 64
    (row_moments, row_basis), (column_moments, column_basis) = steep(rows), steep(columns)
    shape = Kronecker(before, damping=damping, rank=rank)
    shape.learn("weight", {"rows": row_moments, "columns": column_moments})
    inputs = (torch.randn(8) + 0.01 * torch.randn(count, 1, 8)) @ column_basis.T
    outputs = (torch.randn(8) + 0.01 * torch.randn(count, 1, 8)) @ row_basis.T

    def bounded(first: int, last: int) -> Tensor:
        made: PerExample = Products(inputs[first:last], outputs[first:last], planned=1024)
        if form == "stored":
            made = Dense(made.dense(slice(0, made.count)), planned=1024)
        inside = shape.apply_before("weight", made)
        assert isinstance(inside, Sandwiched) == (before == 0.25 and (form == "vectors" or rank == 16))
        weights = 1 / inside.squared_norms().sqrt()  # every one of them on its bound
        return inside.weighted_sum(weights, None).double()

    room = 1 + 4e-6 * count  # what a float32 sum of so many unit vectors may be off by itself
    assert (bounded(0, count) - bounded(0, count - 1)).norm() <= room
    assert bounded(0, 1).norm() <= 1 + 2e-6


def test_squares_of_a_steep_scale_vanish() -> None:
    """A scale of 1 beside one of 1e24 has no square in float32, and a gradient of 1e16 there is not small."""
    scale = torch.ones(2, 2)
    scale[0, 0] = 1e24
    inputs, outputs = torch.tensor([[[0.0, 1e8]]]), torch.tensor([[[0.0, 1e8]]])
    assert_bounds(Products(inputs, outputs).scaled(scale))


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), 0.0, 1e-44, 3e38])
@pytest.mark.parametrize("rank", [16, 64], ids=["low rank", "full"])
def test_moments_of_a_model_that_diverged(moment: float, rank: int) -> None:
    """Whatever factors they make: examples are bounded or left out, and the sum is one that noise can be added to."""
    torch.manual_seed(0)
    shape = Kronecker(0.25, damping=0.1, rank=rank)
    shape.learn("weight", {"rows": torch.full((70, 70), moment), "columns": torch.full((90, 90), moment)})
    inside = shape.apply_before("weight", Products(torch.randn(3, 1, 90), torch.randn(3, 1, 70), planned=1024))
    lengths = inside.squared_norms().sqrt()
    keep = lengths.isfinite()
    total = inside.weighted_sum(torch.where(keep, 1 / lengths, 0.0), keep)
    assert total.double().norm() <= keep.sum() + 1e-5


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_cpu_that_may_multiply_in_bfloat16_does_not(precision: str) -> None:
    """Norms allow for float32: what a CPU does with "medium" is cut to eight bits, sums of stored gradients too."""
    seen = []

    class Watched(Dense):
        norm_operands = None  # it is measured by itself

        def squared_norms(self) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().squared_norms()

        def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().weighted_sum(weights, keep)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        gradients = Gradients({"w": Watched(torch.randn(3, 5))}, 3, keep=torch.ones(3, dtype=torch.bool))
        gradients.weighted_sums(gradients.norms())
        assert seen == ["highest", "highest"]
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("value", [0.0123, 0.3333, 1.7])
@pytest.mark.parametrize(("rows", "columns"), [(200_000, 4), (4, 200_000), (3000, 3000)])
def test_long_sums_of_equal_squares_are_bounded(rows: int, columns: int, value: float) -> None:
    """Rounding goes the same way each time where all terms are equal, so a float32 sum drifts with its length."""
    vectors = Products(torch.full((1, 1, columns), 0.37), torch.full((1, 1, rows), value))
    form = vectors.scaled(torch.full((rows, columns), 0.7713))
    added = form.weighted_sum(torch.ones(1, dtype=torch.float64), None).double().norm()
    assert added <= form.squared_norms().sqrt() <= 1.02 * added


@pytest.mark.parametrize("value", [0.0123, 0.3333, 1.7])
def test_many_equal_tokens_are_bounded(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Products, "_way", "again")  # measured in one order, summed in another
    form = Products(torch.full((1, 200_000, 2), 0.1), torch.full((1, 200_000, 2), value))
    weights = 0.5 / form.squared_norms().sqrt()
    allowed = 1 + 2 * 200_008 * 2.0**-24  # each of two sums may be off by so many additions' last bits
    assert 0.4999 / allowed < form.weighted_sum(weights, None).double().norm() <= 0.5


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e15])
def test_norms_over_all_forms_bound_what_they_add(monkeypatch: pytest.MonkeyPatch, kernels: str, size: float) -> None:
    """Some are measured together and some by themselves: none may be left out, or be measured too short."""
    monkeypatch.setenv("ADADP_KERNELS", kernels)
    torch.manual_seed(0)
    inputs, outputs = size * torch.randn(6, 1, 300), torch.randn(6, 1, 70) / size
    forms: dict[str, PerExample] = {
        "weight": Products(inputs, outputs), "bias": Dense(outputs[:, 0] * size), "scale": Dense(torch.randn(6)),
        "sequence": Products(torch.randn(6, 9, 20), torch.randn(6, 9, 30)),
        "exact": Dense(torch.randn(6, 4, 5, dtype=torch.float64)),
        "both": Products(torch.randn(6, 1, 3, dtype=torch.float64), torch.randn(6, 1, 4, dtype=torch.float64)),
    }  # fmt: skip
    for names in (list(forms), ["weight"], ["exact"], ["scale", "both"]):
        chosen = {name: forms[name] for name in names}
        found = Gradients(chosen, 6, scale=3.0, keep=torch.ones(6, dtype=torch.bool)).norms()
        dense = [form.dense(slice(0, 6)).double().reshape(6, -1) for form in chosen.values()]
        truth = 3 * torch.cat(dense, 1).norm(dim=1)
        assert found.dtype == torch.float64
        assert (found >= truth * (1 - 1e-7)).all()
        assert (found <= truth * (1 + 1e-4)).all()
        alone = sum(form.squared_norms().double() for form in chosen.values())
        torch.testing.assert_close(found, 3 * torch.as_tensor(alone).sqrt(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 60])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_bias_is_summed_beside_its_weight(columns: int, dropped: bool) -> None:
    """In one product with it where that has room: asked in any order, for other weights, and of what is not finite."""
    torch.manual_seed(0)
    inputs, outputs = torch.randn(7, 1, columns), torch.randn(7, 1, 70)
    weights, keep = torch.rand(7, dtype=torch.float64), None
    if dropped:
        inputs[2], outputs[4], keep = float("nan"), float("inf"), torch.ones(7, dtype=torch.bool)
        keep[2], keep[4], weights[2], weights[4] = False, False, 0.0, 0.0
    kept = [n for n in range(7) if not dropped or n not in (2, 4)]
    exact = (outputs[kept, 0].double().T * weights[kept]) @ inputs[kept, 0].double()
    exact_bias = outputs[kept, 0].double().T @ weights[kept]
    weight = Products(inputs, outputs)
    bias = Bias(weight)

    def right(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    right(bias.weighted_sum(weights, keep), exact_bias)  # before anything is at hand
    right(weight.weighted_sum(weights, keep), exact)
    assert (weight._bias_sum is not None) == (columns % 16 != 0)
    right(bias.weighted_sum(weights, keep), exact_bias)
    assert weight._bias_sum is None
    weight.weighted_sum(weights, keep)
    right(bias.weighted_sum(2 * weights, keep), 2 * exact_bias)  # other weights than those of what was at hand
    weight.weighted_sum(weights, torch.arange(7) < 0)
    right(bias.weighted_sum(weights, keep), exact_bias)  # and other examples
    if not dropped:
        ratio = bias.squared_norms() / outputs[:, 0].double().square().sum(1)
        assert ((ratio >= 1) & (ratio < 1 + 1e-4)).all()


@pytest.mark.parametrize("rest", [0.01, 1.0, 50.0])
def test_low_rank_factors_on_both_sides_of_sequences(rest: float) -> None:
    """What all tokens are multiplied by alike is left to the sum, and counts in the norm."""
    torch.manual_seed(0)

    def factor(size: int) -> LowRank:
        basis, top = torch.linalg.qr(torch.randn(size, 3))[0], rest * torch.tensor([0.5, 2.0, 4.0])
        return LowRank(basis, top, torch.tensor(rest), torch.zeros((), dtype=torch.float64), 8.0)

    left, right = factor(40), factor(30)
    inputs, outputs = torch.randn(4, 6, 30), torch.randn(4, 6, 40)
    form = Products(inputs, outputs).sandwiched(left, right)
    exact = left.matrix(40, inputs) @ (outputs.mT @ inputs) @ right.matrix(30, inputs)
    assert_bounds(form)
    torch.testing.assert_close(form.dense(slice(0, 4)), exact, rtol=1e-4, atol=1e-4 * rest**2)
    torch.testing.assert_close(form.squared_norms().sqrt().float(), exact.flatten(1).norm(dim=1), rtol=1e-2, atol=0.0)
    weights = torch.rand(4)
    total = (weights.view(-1, 1, 1) * exact).sum(0)
    torch.testing.assert_close(form.weighted_sum(weights, None), total, rtol=1e-4, atol=1e-4 * rest**2)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(3, 20, 30), (40, 6, 5), (2, 50, 4), (1, 5, 6)])
@pytest.mark.parametrize("room", [1, 2**26])
def test_moments_of_rows_and_columns(
    monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int, columns: int, room: int
) -> None:
    """From tokens' inner products or from gradients, whichever are less; of kept examples, whatever the others hold."""
    for module in (per_example, product_forms):
        monkeypatch.setattr(module, "DENSE_BYTES", room)
    torch.manual_seed(0)
    inputs, outputs = torch.randn(5, tokens, columns), torch.randn(5, tokens, rows)
    exact = (outputs.double().mT @ inputs.double())[[0, 2, 3, 4]]
    inputs[1], outputs[1, 0] = float("nan"), float("inf")
    keep = torch.tensor([True, False, True, True, True])
    dense = Dense(outputs.mT @ inputs)
    for form in (Products(inputs, outputs), dense):
        together = form.moments(keep, {"rows": "full", "columns": "full"})
        alone = form.moments(keep, {"rows": "full"}) | form.moments(keep, {"columns": "full"})
        for by_row, by_column in (together.values(), alone.values()):
            expected = (exact @ exact.mT).sum(0), (exact.mT @ exact).sum(0)
            torch.testing.assert_close(by_row.double(), expected[0], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(by_column.double(), expected[1], rtol=1e-4, atol=1e-3)
