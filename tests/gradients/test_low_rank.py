"""Convolutions (as on a GPU) and tables whose gradients are multiplied by a low-rank factor without being made."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from gradients.test_per_example import assert_bounds
from torch import Tensor

from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.factors import IDENTITY, DiagonalFactor, Factor, Full, LowRank
from adadp.gradients.forms.low_rank import TimesLowRank
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.gradients.layers.embedding import Rows

GEOMETRIES = {
    "plain": (Geometry(torch.Size((6, 3, 3, 3)), (1, 1), (0, 0), (1, 1), 1), (8, 7)),
    "padded": (Geometry(torch.Size((4, 2, 3, 3)), (1, 1), (1, 1), (1, 1), 1), (6, 6)),
    "strided": (Geometry(torch.Size((5, 3, 3, 3)), (2, 2), (1, 1), (1, 1), 1), (9, 8)),
    "dilated": (Geometry(torch.Size((4, 2, 3, 2)), (1, 2), (2, 0), (2, 1), 1), (9, 8)),
    "one by one": (Geometry(torch.Size((4, 12, 1, 1)), (2, 2), (0, 0), (1, 1), 1), (6, 6)),
    "line": (Geometry(torch.Size((4, 5, 3)), (1,), (1,), (1,), 1), (10,)),
    "volume": (Geometry(torch.Size((3, 2, 2, 2, 2)), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1), (4, 4, 3)),
}  # fmt: skip


def convolution(name: str, count: int = 5, dtype: torch.dtype = torch.float32) -> Convolution:
    geometry, size = GEOMETRIES[name]
    torch.manual_seed(0)
    inputs = torch.randn(count, geometry.weight[1], *size, dtype=dtype)
    outputs = geometry.convolved(inputs, torch.randn(geometry.weight, dtype=dtype))
    return Convolution(inputs, torch.randn_like(outputs), geometry)


def factor(size: int, *, rest: float = 1.0, top: tuple[float, ...] = (0.1, 0.4, 3.0), skew: float = 0.0) -> LowRank:
    torch.manual_seed(1)
    basis = torch.linalg.qr(torch.randn(size, len(top)))[0] + skew * torch.randn(size, len(top))
    exact = basis.double()
    apart = (exact.T @ exact - torch.eye(len(top), dtype=torch.float64)).norm()
    values = rest * torch.tensor(top)
    return LowRank(basis, values, torch.tensor(rest), apart, float(max(1.0, *top) / min(1.0, *top)))


def turned(form: Convolution, right: LowRank) -> TimesLowRank:
    made = form.along(right)
    assert isinstance(made, TimesLowRank)
    return made


def exact(form: Convolution, right: LowRank) -> Tensor:
    matrix = right.matrix(form.matrix[1], torch.zeros((), dtype=torch.float64))
    double = Convolution(form.inputs.double(), form.outputs.double(), form.geometry)
    return (double.dense(slice(0, form.count)).reshape(form.count, *form.matrix) @ matrix).view(-1, *form.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_same_as_gradients_that_are_made(name: str, rest: float, dtype: torch.dtype) -> None:
    form = convolution(name, dtype=dtype)
    right = factor(form.matrix[1], rest=rest)
    made, expected = turned(form, right), exact(form, right)
    assert_bounds(made)
    close = {"rtol": 1e-3, "atol": 1e-4 * rest, "check_dtype": False}
    torch.testing.assert_close(made.dense(slice(0, form.count)), expected, **close)
    looseness = made.squared_norms().sqrt() / expected.flatten(1).norm(dim=1)
    assert ((looseness >= 1 - 1e-6) & (looseness < 1.05)).all()
    weights = torch.rand(form.count)
    total = (weights.view(-1, *[1] * len(form.shape)) * expected).sum(0)
    torch.testing.assert_close(made.weighted_sum(weights, None), total, **close)


@pytest.mark.parametrize("skew", [0.0, 1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("top", [(1e-3,), (0.01, 0.02), (50.0, 0.01), (1.0, 1.0)])
def test_directions_that_hold_all_of_a_gradient(top: tuple[float, ...], skew: float) -> None:
    """Little of it is left, and that is where errors are: of the products with the directions, and of the basis."""
    form = convolution("plain", count=4)
    columns = form.matrix[1]
    right = factor(columns, top=top, skew=skew)
    # Inputs that are a direction at every place where the outputs are not zero.
    inputs, outputs = torch.zeros_like(form.inputs), torch.zeros_like(form.outputs)
    inputs[:, :, :3, :3] = right.basis[:, 0].view(3, 3, 3)
    outputs[:, :, 0, 0] = torch.tensor([1.0, 1e3, 1e-3, 1e15]).view(-1, 1)
    assert_bounds(turned(Convolution(inputs, outputs, form.geometry), right))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 3e38, 1e-38, 1e-45])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_one_example_stays_alone(value: float, side: str) -> None:
    form = convolution("padded", count=4)
    right = factor(form.matrix[1])
    alone = turned(form, right)
    norms, weights = alone.squared_norms(), torch.tensor([0.5, 0.0, 1.0, 0.25])
    total = alone.weighted_sum(weights, weights != 0)
    changed = Convolution(form.inputs.clone(), form.outputs.clone(), form.geometry)
    getattr(changed, side)[1] = value
    made = turned(changed, right)
    others = [0, 2, 3]
    assert torch.equal(made.squared_norms()[others], norms[others])
    assert torch.equal(made.weighted_sum(weights, weights != 0), total)
    assert made.squared_norms()[1] == math.inf or math.isfinite(value)
    if made.squared_norms()[1] < 1e70:
        assert_bounds(made)


@pytest.mark.parametrize("seed", range(20))
def test_places_that_cancel(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    form = convolution("padded", count=6)
    scale = 10.0 ** torch.randint(-12, 12, (6, 1, 1, 1), generator=generator)
    outputs = form.outputs * scale
    outputs[..., 1::2] = -outputs[..., ::2] * (1 + 1e-6 * torch.randn(outputs[..., ::2].shape, generator=generator))
    inputs = form.inputs / scale.sqrt()
    inputs[..., 1::2] = inputs[..., ::2]
    assert_bounds(turned(Convolution(inputs, outputs, form.geometry), factor(form.matrix[1], top=(0.05, 2.0, 0.3))))


@pytest.mark.parametrize("on_left", [False, True])
@pytest.mark.parametrize("top", [(0.01, 0.02), (3.0, 0.5)])
def test_what_is_made_may_be_wrong_by_what_it_says(top: tuple[float, ...], on_left: bool) -> None:
    """In the direction in which that adds most to what is left of a gradient that lies in the directions."""
    right = factor(12, top=top)
    gradients = right.basis[:, :1].T.expand(2, 3, 12).clone()
    gradients = gradients.mT.contiguous() if on_left else gradients
    exact = right.basis.T @ gradients if on_left else gradients @ right.basis
    sign = torch.sign(right.top - right.rest)
    for off in (0.0, 0.05, 0.4, -0.05, -0.4):
        moved = exact * (1 + off * (sign[:, None] if on_left else sign))
        found = moved, (moved - exact).double().flatten(1).norm(dim=1)
        assert_bounds(TimesLowRank(Dense(gradients), right, partial(tuple, found), on_left=on_left))


def test_what_comes_after() -> None:
    form = convolution("plain", count=3)
    right = factor(form.matrix[1])
    made, expected = turned(form, right), exact(form, right)
    scale = torch.rand(form.shape)
    torch.testing.assert_close(made.scaled(scale).dense(slice(0, 3)).double(), expected * scale, rtol=1e-3, atol=1e-3)
    both = made.sandwiched(factor(form.matrix[0]), right).dense(slice(0, 3)).reshape(3, *form.matrix).double()
    left, again = factor(form.matrix[0]).matrix(6, expected), right.matrix(form.matrix[1], expected)
    torch.testing.assert_close(both, left @ expected.reshape(3, *form.matrix) @ again, rtol=1e-3, atol=1e-3)


def test_no_examples() -> None:
    form = convolution("plain", count=2)
    none = turned(Convolution(form.inputs[:0], form.outputs[:0], form.geometry), factor(form.matrix[1]))
    assert none.squared_norms().shape == (0,)
    assert not none.weighted_sum(torch.zeros(0), None).any()


def table(count: int = 5, dtype: torch.dtype = torch.float32) -> Rows:
    torch.manual_seed(2)
    ids = torch.randint(40, (count, 9))
    ids[:, 3] = ids[:, 1]  # looked up twice
    return Rows.summed(ids, torch.randn(count, 9, 6, dtype=dtype), (40, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("kind", ["low rank", "diagonal", "identity", "full", "steep"])
def test_tables(kind: str, rest: float, dtype: torch.dtype) -> None:
    form, right = table(dtype=dtype), factor(6, top=(0.5, 2.0))
    lefts: dict[str, Factor] = {
        "low rank": factor(40, rest=rest), "diagonal": DiagonalFactor(rest * torch.rand(40)), "identity": IDENTITY,
        "full": Full(rest * torch.eye(40), torch.tensor(rest * 40**0.5), 1.0),
        "steep": factor(40, rest=rest, top=(1e-9 if dtype == torch.float32 else 1e-15, 1.0)),
    }  # fmt: skip
    left = lefts[kind]
    made = form.sandwiched(left, right)
    kinds = {"low rank": TimesLowRank, "diagonal": Rows, "identity": Rows, "full": Dense, "steep": Dense}
    assert type(made) is kinds[kind]
    like = torch.zeros((), dtype=torch.float64)
    expected = left.matrix(40, like) @ form.dense(slice(0, 5)).double() @ right.matrix(6, like)
    assert_bounds(made)
    close = {"rtol": 1e-3, "atol": 1e-4 * rest, "check_dtype": False}
    torch.testing.assert_close(made.dense(slice(0, 5)), expected, **close)
    torch.testing.assert_close(made.squared_norms().sqrt(), expected.flatten(1).norm(dim=1), **close)
    weights = torch.rand(5)
    torch.testing.assert_close(made.weighted_sum(weights, None), (weights.view(-1, 1, 1) * expected).sum(0), **close)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 3e38, 1e-38, 1e-45])
def test_one_row_of_a_table_stays_alone(value: float) -> None:
    form, left = table(), factor(40)
    weights = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.1])
    alone = form.sandwiched(left, IDENTITY)
    changed = Rows(form.ids, form.rows.clone(), form.shape)
    changed.rows[1, 0] = value
    made = changed.sandwiched(left, IDENTITY)
    others = [0, 2, 3, 4]
    assert torch.equal(made.squared_norms()[others], alone.squared_norms()[others])
    assert torch.equal(made.weighted_sum(weights, weights != 0), alone.weighted_sum(weights, weights != 0))
    assert made.squared_norms()[1] == math.inf or math.isfinite(value)
    if made.squared_norms()[1] < 1e70:
        assert_bounds(made)


@pytest.mark.parametrize("top", [(1e-2,), (0.01, 0.02), (50.0, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("skew", [0.0, 1e-4, 3e-2])
def test_rows_that_lie_in_the_directions(top: tuple[float, ...], skew: float) -> None:
    left = factor(40, top=top, skew=skew)
    ids = torch.arange(40).expand(4, 40)
    rows = left.basis[:, :1].expand(4, 40, 1) * torch.tensor([1.0, 1e3, 1e-3, 1e15]).view(-1, 1, 1)
    made = Rows(ids, rows.clone(), (40, 1)).along(left)
    assert_bounds(made)
