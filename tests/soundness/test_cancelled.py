"""Terms of a product that cancel: what rounding leaves of them must not get the weight of a gradient.

Every second example is zero and adds nothing. The first one of these is taken away: the release must not move. What
cancels before an example's gradient reaches a layer, or in a sum over tokens that is no product (a bias), is rounded
anew by a mean over one example less: the guarantee assumes that this changes nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from adadp import Automatic, Clipping, Diagonal, Ellipsoid, Flat, Kronecker, PerLayer, Released
from adadp.gradients import collection
from adadp.gradients.collection import Gradients
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.factors import IDENTITY, DiagonalFactor, LowRank
from adadp.gradients.forms.products import Products
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.gradients.layers.embedding import Rows, Tied
from adadp.shapes.spectrum import Moments, powers, spectra
from soundness.stand import Stand, World, _source


def opposite(*shape: int, exact: bool = True) -> Tensor:
    """What tokens are multiplied by, [tokens, ...]: it adds up to nothing, in pairs or (not `exact`) all together."""
    generator = torch.Generator().manual_seed(0)
    if exact:
        half = torch.randn(shape[0] // 2, *shape[1:], generator=generator)
        return torch.cat([half, -half])
    most = torch.randn(shape[0] - 1, *shape[1:], generator=generator)
    return torch.cat([most, -most.sum(0, keepdim=True)])


class Read(nn.Module):
    """A layer whose outputs are added up with signs that cancel."""

    def __init__(self, layer: nn.Module, read: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("read", read)

    def made(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        total = (self.made(x) * self.read).flatten(1).sum(1)
        return torch.stack([total, 0 * total], 1)


class Twice(Read):
    def made(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(0 * x)


class TiedTable(Read):
    """Multiplied and looked up; the look-ups add nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 5, bias=False), opposite(16, 5))
        self.embed = nn.Embedding(5, 7)
        self.layer.weight = self.embed.weight

    def made(self, x: Tensor) -> Tensor:
        return self.layer(x + 0 * self.embed(torch.zeros(len(x), 1, dtype=torch.long)))


def halves(channels: int, high: int, width: int) -> Tensor:
    part = torch.randn(channels, high, width, generator=torch.Generator().manual_seed(7))
    return torch.cat([part, part], 2)


def conv_read(rows: int, high: int, width: int) -> Tensor:
    return opposite(2 * width, rows, high).permute(1, 2, 0).contiguous()


TOKENS = torch.randn(8, 7, generator=torch.Generator().manual_seed(7)).repeat(2, 1)
MODELS = {
    "convolution": (lambda: Read(nn.Conv2d(2, 3, (3, 1), bias=False), conv_read(3, 3, 5)), halves(2, 5, 5)),
    "grouped convolution": (
        lambda: Read(nn.Conv2d(15, 3, (3, 1), bias=False, groups=3), conv_read(3, 5, 7)), halves(15, 7, 7)
    ),
    "convolution, twice": (lambda: Twice(nn.Conv2d(2, 3, (3, 1), bias=False), conv_read(3, 3, 5)), halves(2, 5, 5)),
    "tied": (TiedTable, TOKENS),
    "tokens": (lambda: Read(nn.Linear(7, 5, bias=False), opposite(16, 5)), TOKENS),
}  # fmt: skip


def clipping(name: str, world: World, dtype: torch.dtype) -> Clipping:
    probe = _source("probe", world, dtype)
    return {
        "flat": Flat(0.8), "per layer": PerLayer(0.8), "automatic": Automatic(0.8),
        "diagonal": Ellipsoid(0.8, shape=Diagonal(), source=probe),
        "rows and columns": Ellipsoid(0.8, shape=Kronecker(rank=0), source=probe),
        "kronecker": Ellipsoid(0.8, shape=Kronecker(), source=probe),
        "kronecker, released": Ellipsoid(0.8, shape=Kronecker(), source=Released()),
    }[name]  # fmt: skip


CLIPPINGS = (
    "flat", "per layer", "automatic", "diagonal", "rows and columns", "kronecker", "kronecker, released"
)  # fmt: skip


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("model", MODELS)
def test_an_example_of_zeros_moves_nothing(model: str, name: str) -> None:
    make, tokens = MODELS[model]
    world = World(make, tuple(tokens.shape))
    stand = Stand(world, lambda w, d: clipping(name, w, d), torch.float32, sigma=1.0, lots=3)
    inputs, weights = torch.zeros(64, *tokens.shape), torch.zeros(64)
    inputs[1::2], weights[1::2] = tokens, 1e8
    whole = stand.bound(inputs, weights)
    fewer = stand.bound(inputs[1:].clone(), weights[1:].clone())
    assert stand.distance(whole, fewer) <= 1e-3


@pytest.mark.parametrize("kind", ["scaled", "sandwiched"])
def test_a_tied_table_that_is_not_kept(kind: str) -> None:
    inputs, outputs = torch.zeros(32, 16, 7), torch.zeros(32, 16, 5)
    inputs[1::2], outputs[1::2] = TOKENS, 1e8 * opposite(16, 5)

    def total(first: int) -> Tensor:
        rows = Rows(torch.zeros(32 - first, 1, dtype=torch.long), torch.zeros(32 - first, 1, 7), (5, 7), 64)
        form = Tied(rows, Products(inputs[first:].clone(), outputs[first:].clone(), planned=64))
        one = torch.linspace(0.5, 2.0, 5)
        turned = (
            form.scaled(one[:, None].expand(5, 7))
            if kind == "scaled"
            else form.sandwiched(DiagonalFactor(one), IDENTITY)
        )
        return turned.weighted_sum((1 / turned.squared_norms().sqrt()).clamp(max=1.0), None).double()

    assert (total(0) - total(1)).norm() <= 1e-3


def test_moments_of_all_sizes_have_powers() -> None:
    """eigh in float32 does not converge, or answers NaN, on 1e15 beside 1e-10: a diverged model's moments, cleaned."""
    for seed in range(400):
        vectors = 1e-10 * torch.randn(1, 40, generator=torch.Generator().manual_seed(seed))
        vectors[0, seed % 40] = 3e38
        made = powers([(spectra([Moments(vectors, thin=True)], 0.1, None)[0], -0.25)])[0]
        assert bool(made.matrix(40, vectors).isfinite().all())


def test_moments_by_inner_products_do_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(2, 3, 40, generator=generator) * size for size in (1e20, 1e-20))
    form = Products(inputs, outputs)
    assert bool(form.finite().all())
    exact = outputs.double().mT @ inputs.double()
    moments = form.moments(torch.ones(2, dtype=torch.bool), {"rows": "full", "columns": "full"})
    rows, columns = moments.values()
    torch.testing.assert_close(rows.double(), (exact @ exact.mT).sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(columns.double(), (exact.mT @ exact).sum(0), rtol=1e-4, atol=1e-4)
    assert math.isfinite(float(rows.sum()))


def test_side_by_side_none_counts_for_less_than_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Gradients:
        forms = {name: Dense(torch.ones(2, 3), torch.full((2,), 7.0, dtype=torch.float64)) for name in "ab"}
        return Gradients(forms, 2, keep=torch.ones(2, dtype=torch.bool))

    alone = made().norms()
    monkeypatch.setattr(collection, "is_small", lambda form: type(form) is Dense and form.norm_floor is None)
    torch.testing.assert_close(made().norms(), alone)
    assert (alone >= 7).all()


@pytest.mark.parametrize("way", ["along", "sandwiched"])
@pytest.mark.parametrize("top", [1.0, 14.0, 127.0])
def test_directions_that_are_made_larger(top: float, way: str) -> None:
    """What rounding leaves is multiplied by `top`; what it counts for at least, by `rest` alone."""
    geometry = Geometry(torch.Size((6, 5, 1, 2)), (1, 1), (0, 0), (1, 1), 1)
    inputs, outputs = torch.zeros(256, 5, 5, 14), torch.zeros(256, 6, 5, 13)
    inputs[1::2] = halves(5, 5, 7)
    read = conv_read(6, 5, 6)
    outputs[1::2, :, :, :6], outputs[1::2, :, :, 7:] = 1e8 * read[..., :6], 1e8 * read[..., 6:]
    basis = torch.linalg.qr(torch.randn(10, 8, generator=torch.Generator().manual_seed(0)))[0]
    skew = (basis.double().T @ basis.double() - torch.eye(8, dtype=torch.float64)).norm()
    right = LowRank(basis, torch.full((8,), top), torch.tensor(1.0), skew, top)

    def total(first: int) -> Tensor:
        form = Convolution(inputs[first:].clone(), outputs[first:].clone(), geometry, planned=256)
        turned = form.along(right) if way == "along" else form.sandwiched(IDENTITY, right)
        return turned.weighted_sum((1 / turned.squared_norms().sqrt()).clamp(max=1.0), None).double()

    assert (total(0) - total(1)).norm() <= 1e-3
