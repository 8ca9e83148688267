"""adadp.shape: second moments, their powers, and what is done to gradients with them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adadp import Diagonal, Kronecker
from adadp.errors import ConfigurationError
from adadp.gradients.factors import Spectrum
from adadp.gradients.per_example import Dense
from adadp.gradients.products import Products
from adadp.shape import Shape

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def moments(size: int, decay: float = 0.5) -> Tensor:
    """A matrix whose eigenvalues fall off, in a basis of its own."""
    basis = torch.linalg.qr(normal(size, size))[0]
    return basis @ torch.diag(decay ** torch.arange(size, dtype=torch.float64)) @ basis.T


SHAPES = {
    "diagonal": lambda: Diagonal(0.5, 0.25),
    "full": lambda: Kronecker(0.25, 0.5, rank=None),
    "low rank": lambda: Kronecker(0.25, 0.5, rank=2),
    "rows and columns": lambda: Kronecker(0.25, 0.5, rank=0),
    "one side wide": lambda: Kronecker(0.25, 0.5, rank=2, widest=6),
}


def learnt(shape: Shape, size: tuple[int, ...]) -> Shape:
    shape.learn("p", shape.statistics(Dense(normal(9, *size)), torch.ones(9, dtype=torch.bool)))
    return shape


def test_spectra_have_mean_one_and_are_damped() -> None:
    for matrix in (moments(7), moments(7).diagonal()):
        spectrum = Spectrum(100 * matrix, 0.1, None)
        assert float(spectrum.values.mean()) == pytest.approx(1.1)
        assert float(spectrum.values.min()) >= 0.1
    low = Spectrum(100 * moments(7), 0.1, 2)
    assert float((low.values.sum() + 5 * low.rest) / 7) == pytest.approx(1.1)
    assert Spectrum(torch.zeros(3, 3), 0.1, None).values.tolist() == pytest.approx([0.1] * 3)
    assert (Spectrum(-moments(3), 0.1, None).values > 0).all()


def test_low_rank_is_the_full_factor_where_the_rest_is_alike() -> None:
    basis = torch.linalg.qr(normal(8, 8))[0]
    matrix = basis @ torch.diag(torch.tensor([50.0, 20.0] + [1.0] * 6, dtype=torch.float64)) @ basis.T
    spectrum = None
    for _ in range(4):  # it goes on from where it last ended
        spectrum = Spectrum(matrix, 0.1, 2, spectrum)
    full = Spectrum(matrix, 0.1, None).power(-0.25)
    vectors = normal(3, 8)
    torch.testing.assert_close(spectrum.power(-0.25).apply(vectors), full.apply(vectors), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(spectrum.power(-0.25).matrix(8, vectors), full.matrix(8, vectors), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [(5, 7), (5,), (), (4, 3, 2, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_forms_and_single_gradients_are_treated_alike(name: str, size: tuple[int, ...]) -> None:
    shape = learnt(SHAPES[name](), size)
    stored = normal(3, *size)
    inside = shape.apply_before("p", Dense(stored)).dense(slice(0, 3))
    for one, other in zip(stored, inside, strict=True):
        torch.testing.assert_close(shape.apply("p", one, -shape.before), other)
        torch.testing.assert_close(shape.apply("p", other, shape.before), one, rtol=1e-6, atol=1e-9)
    if len(size) == 2:
        for tokens in (1, 3):
            products = Products(normal(3, tokens, size[1]), normal(3, tokens, size[0]))
            wanted = shape.apply_before("p", Dense(products.dense(slice(0, 3)))).dense(slice(0, 3))
            torch.testing.assert_close(shape.apply_before("p", products).dense(slice(0, 3)), wanted)
    assert shape.apply_before("unknown", Dense(stored)).dense(slice(0, 3)) is not None
    assert torch.equal(shape.apply("unknown", stored[0], -1.0), stored[0])


@pytest.mark.parametrize("size", [(5, 7), (5,), ()])
@pytest.mark.parametrize("name", SHAPES)
def test_the_moments_that_noise_has(name: str, size: tuple[int, ...]) -> None:
    shape = learnt(SHAPES[name](), size)
    total: dict[str, Tensor] = {}
    draws = 3000
    for _ in range(draws):
        for key, value in shape.moments_of(shape.apply("p", 0.3 * normal(*size), shape.before)).items():
            total[key] = total.get(key, 0) + value / draws
    for key, wanted in shape.moments_of_noise("p", torch.zeros(size, dtype=torch.float64), 0.3).items():
        assert total[key].shape == wanted.shape
        assert (total[key] - wanted).abs().max() <= 0.15 * wanted.abs().max()


@pytest.mark.parametrize("size", [(5, 7), (5,), ()])
@pytest.mark.parametrize("name", SHAPES)
def test_low_statistics_of_a_unit_gradient(name: str, size: tuple[int, ...]) -> None:
    shape = SHAPES[name]()
    wanted = {key: value.shape for key, value in shape.low_statistics_like(torch.zeros(size)).items()}
    spike = torch.zeros(max(1, math.prod(size)), dtype=torch.float64)
    spike[0] = 1.0
    for gradient in (normal(*size), spike.view(size)):
        unit = gradient / gradient.norm()
        found = shape.low_statistics(Dense(unit.unsqueeze(0)), torch.ones(1, dtype=torch.float64))
        assert {key: value.shape for key, value in found.items()} == wanted
        length = math.sqrt(sum(float(value.square().sum()) for value in found.values()))
        assert length <= shape.low_sensitivity * (1 + 1e-12)
    if len(size) == 2:
        assert length == pytest.approx(shape.low_sensitivity)  # one coordinate reaches it


@pytest.mark.parametrize(
    "make",
    [
        lambda: Diagonal(math.nan),
        lambda: Diagonal(0.5, math.inf),
        lambda: Kronecker(damping=0.0),
        lambda: Kronecker(damping=-1.0),
        lambda: Kronecker(rank=-1),
    ],
)
def test_settings_that_are_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize("name", ["low rank", "full", "rows and columns", "one side wide", "diagonal"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_thin_statistics_teach_what_the_moments_teach(name: str, tokens: int) -> None:
    """Vectors in place of the sum of their outer products: the same eigenvalues and directions, within rounding."""
    form = Products(normal(20, tokens, 7), normal(20, tokens, 11))
    keep = torch.arange(20) != 3
    shapes = SHAPES[name](), SHAPES[name]()
    for _ in range(3):  # the later ones start from the basis of those before
        shapes[0].learn("w", shapes[0].statistics(form, keep))
        thin = shapes[1].thin_statistics(form, keep)
        shapes[1].learn("w", thin)
    assert ("rows vectors" in thin) == (name == "low rank" and tokens == 1)
    gradient = normal(11, 7)
    full, less = (shape.apply("w", gradient, -0.5) for shape in shapes)
    torch.testing.assert_close(less, full, rtol=1e-9, atol=1e-9)


def test_vectors_that_are_not_finite_are_no_directions() -> None:
    vectors = normal(5, 20)
    vectors[2, 3] = math.nan
    vectors[1, 1] = math.inf
    power = Spectrum(vectors, 0.1, 2, thin=True).power(-0.5)
    assert power.apply(normal(3, 20)).isfinite().all()
