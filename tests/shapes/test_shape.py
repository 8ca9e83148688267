"""adadp.shapes.shape: second moments, their powers, and what is done to gradients with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients.reference import power_of, spectrum_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adadp import Diagonal, Kronecker
from adadp.errors import ConfigurationError
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.factors import LowRank
from adadp.gradients.forms.products import Products
from adadp.shapes import Shape
from adadp.shapes.shape import Statistics
from adadp.shapes.spectrum import _by_cholesky

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
        spectrum = spectrum_of(100 * matrix, 0.1, None)
        assert float(spectrum.values.mean()) == pytest.approx(1.1)
        assert float(spectrum.values.min()) >= 0.1
    low = spectrum_of(100 * moments(7), 0.1, 2)
    assert float((low.values.sum() + 5 * low.rest) / 7) == pytest.approx(1.1)
    assert spectrum_of(torch.zeros(3, 3), 0.1, None).values.tolist() == pytest.approx([0.1] * 3)
    assert (spectrum_of(-moments(3), 0.1, None).values > 0).all()


def test_low_rank_is_the_full_factor_where_the_rest_is_alike() -> None:
    basis = torch.linalg.qr(normal(8, 8))[0]
    matrix = basis @ torch.diag(torch.tensor([50.0, 20.0] + [1.0] * 6, dtype=torch.float64)) @ basis.T
    spectrum = None
    for _ in range(4):  # it goes on from where it last ended
        spectrum = spectrum_of(matrix, 0.1, 2, spectrum)
    full = power_of(spectrum_of(matrix, 0.1, None), -0.25)
    vectors, low = normal(3, 8), power_of(spectrum, -0.25)
    torch.testing.assert_close(low.apply(vectors), full.apply(vectors), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(low.matrix(8, vectors), full.matrix(8, vectors), rtol=1e-6, atol=1e-8)


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
    power = power_of(spectrum_of(vectors, 0.1, 2, thin=True), -0.5)
    assert power.apply(normal(3, 20)).isfinite().all()


def many(dtype: torch.dtype) -> dict[str, Statistics]:
    """Parameters of equal and of other sizes, with matrices, vectors and diagonals for them."""

    def vectors(count: int, size: int) -> Tensor:
        return (normal(count, size) * 0.8 ** torch.arange(size)).to(dtype)

    def matrix(size: int) -> Tensor:
        made = vectors(3 * size, size)
        return made.T @ made

    found: dict[str, Statistics] = {
        f"matrix {i}": {"rows": matrix(9 + i % 2), "columns": matrix(9 + i % 2)} for i in range(5)
    }
    found |= {f"thin {i}": {"rows vectors": vectors(6 + i, 9), "columns": matrix(3)} for i in range(3)}
    found |= {f"wide {i}": {"rows": matrix(4), "columns": vectors(1, 30)[0].square()} for i in range(3)}
    found |= {f"vector {i}": {"rows": vectors(1, 4 + i % 2)[0].square()} for i in range(4)}
    return found


BAD = {"nan": math.nan, "infinite": math.inf, "huge": 3e38, "zero": 0.0}


def assert_alike(one: Kronecker, other: Kronecker, name: str, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for exponent in (-0.25, 0.5):
        for mine, theirs in zip(one._pair(name, exponent), other._pair(name, exponent), strict=True):
            assert type(mine) is type(theirs)
            assert mine.spread == pytest.approx(theirs.spread, rel=1e-4)
            if hasattr(mine, "skew"):
                assert mine.skew < 1e-5
            size = next((len(vars(mine)[key]) for key in ("values", "basis") if key in vars(mine)), 1)
            like = torch.zeros((), dtype=dtype)
            torch.testing.assert_close(mine.matrix(size, like), theirs.matrix(size, like), **close)


@pytest.mark.parametrize("stacked", [2**24, 50])
@pytest.mark.parametrize("bad", [None, *BAD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_learnt_together_are_those_learnt_alone(
    dtype: torch.dtype, bad: str | None, stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adadp.shapes.spectrum._STACKED", stacked)
    together, alone = Kronecker(0.25, rank=2, widest=20), Kronecker(0.25, rank=2, widest=20)
    for lot in range(3):  # the later ones start from the bases of those before, and make the powers anew
        found = many(dtype)
        if bad is not None and lot:
            for name in ("matrix 1", "thin 1", "wide 0", "vector 2"):
                for value in found[name].values():
                    value.view(-1)[:: 1 if lot > 1 else 3] = BAD[bad]
        together.learn_all(found)
        for name, statistics in found.items():
            alone.learn(name, statistics)
        for name in found:
            assert_alike(together, alone, name, dtype)


@pytest.mark.parametrize("bad", BAD)
def test_a_parameter_that_diverged_changes_no_bit_of_another(bad: str) -> None:
    shapes = Kronecker(0.25, rank=2, widest=20), Kronecker(0.25, rank=2, widest=20)
    diverged = {"matrix 1", "thin 1", "wide 0", "vector 2"}
    for _ in range(2):
        found = many(torch.float32)
        shapes[0].learn_all(found)
        for name in diverged:
            for value in found[name].values():
                value.fill_(BAD[bad])
        shapes[1].learn_all(found)
        for name in found:
            for one, other in zip(*(shape._pair(name, -0.25) for shape in shapes), strict=True):
                parts = [(vars(one)[key], vars(other)[key]) for key in vars(one)]
                if name not in diverged:
                    assert all(torch.equal(*map(torch.as_tensor, both)) for both in parts)
                assert all(torch.as_tensor(part).isfinite().all() for _, part in parts)


def test_diagonals_learnt_together_are_those_learnt_alone() -> None:
    together, alone = Diagonal(0.5, damping=0.1), Diagonal(0.5, damping=0.1)
    for factor in (1.0, math.nan):
        found = {str(size): {"square": normal(*size)} for size in ((3, 4), (3, 4), (7,), (), (2, 3, 4))}
        found["(7,)"]["square"] *= factor
        together.learn_all(found)
        for name, statistics in found.items():
            alone.learn(name, statistics)
        for name, statistics in found.items():
            for exponent in (-0.5, 0.25):
                one = torch.ones_like(statistics["square"])
                mine, theirs = (shape.apply(name, one, exponent) for shape in (together, alone))
                assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
                assert mine.isfinite().all() == (math.isfinite(factor) or name != "(7,)")
    together.learn_all({})


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counted[str(operation).split(".")[1]] += 1
        return operation(*args, **(kwargs or {}))


def test_a_refresh_reads_once_and_factorises_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Kronecker(0.25, rank=2, widest=20)
    shape.learn_all(many(torch.float32))
    for name in many(torch.float32):
        for exponent in (-0.25, 0.25):
            shape._pair(name, exponent)
    read: list[Tensor] = []
    listed: Callable[[Tensor], Any] = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (read.append(self), listed(self))[1])
    monkeypatch.setattr("adadp.shapes.spectrum._all_below", lambda *_: True)  # asked on a CPU only
    found = many(torch.float32)
    with _Operations() as operations:
        shape.learn_all(found)
    assert len(read) == 1
    assert operations.counted["_local_scalar_dense"] == 0
    assert operations.counted["linalg_qr"] == 3 * 3  # matrices of 9 and of 10, vectors of 9
    assert operations.counted["_linalg_eigh"] == 3 + 2  # and matrices of 3 and of 4


def test_what_was_learnt_together_is_each_in_memory_of_its_own() -> None:
    """Recordings copy new numbers into the old places."""
    shape = Kronecker(0.25, rank=2, widest=20)
    for _ in range(2):
        shape.learn_all(many(torch.float32))
        for name in many(torch.float32):
            shape._pair(name, -0.25)
    kept = [*shape._rows.values(), *shape._columns.values(), *(f for pair in shape._powers.values() for f in pair)]
    tensors = {id(part): part for one in kept for part in vars(one).values() if isinstance(part, Tensor)}
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(places) == len(tensors) > 100
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpus_way_to_orthonormal_columns(dtype: torch.dtype) -> None:
    """Whatever they are: of few directions, of none, tiny, huge, opposite to what is added, not finite."""
    size, rank = 200, 32
    before = torch.linalg.qr(normal(size, rank))[0]
    few = normal(size, 3) @ normal(3, rank)
    last = torch.cat([before[:, :1], -(2.0**-20) * math.sqrt(1 + 31 * 2.0**-40) * before[:, 1:]], 1)
    matrices = {
        "any": normal(size, rank),
        "steep": normal(size, rank) * 0.1 ** torch.arange(rank),
        "few": few,
        "one": few[:, :1].expand(-1, rank),
        "none": 0 * few,
        "tiny": 1e-30 * few,
        "huge": 1e30 * few,
        "opposite": -before,
        "no factor": last,
        "not finite": few * math.nan,
    }
    columns = torch.stack(list(matrices.values())).to(dtype)
    made = _by_cholesky(columns, before.to(dtype).expand(len(columns), -1, -1)).double()
    rounding = 1e-12 if dtype == torch.float64 else 1e-6
    assert (made.mT @ made - torch.eye(rank)).abs().max() < rounding
    for name, one, span in zip(matrices, made, columns.double(), strict=True):
        if name == "not finite":
            torch.testing.assert_close(one, before.to(dtype).double(), rtol=0, atol=rounding)
        else:  # nothing of weight is outside of the new span
            outside = span - one @ (one.T @ span)
            assert outside.norm() <= 1e-4 * span.norm(), name


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("count", [3, 20, 400])
def test_a_gpus_way_finds_the_same_directions(count: int, thin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = normal(count, 90) * 0.9 ** torch.arange(90)
    given = vectors if thin else vectors.T @ vectors

    def learnt() -> LowRank:
        spectrum = None
        for _ in range(3):
            spectrum = spectrum_of(given, 0.1, 16, spectrum, thin=thin)
        factor = power_of(spectrum, -0.25)
        assert isinstance(factor, LowRank)
        return factor

    wanted = learnt()
    monkeypatch.setattr("adadp.shapes.spectrum._orthonormal", _by_cholesky)
    found = learnt()
    assert found.skew < 1e-12
    assert found.spread == pytest.approx(wanted.spread, rel=1e-4)
    torch.testing.assert_close(found.matrix(90, given), wanted.matrix(90, given), rtol=1e-4, atol=1e-4)
