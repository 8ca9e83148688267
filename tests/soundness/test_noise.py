"""The noise that a step adds: its mean, its variance in every coordinate, and that nothing ties its parts together."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from adadp import Ellipsoid, Flat, Kronecker, Released
from adadp.clipping.base import settings_of
from adadp.mechanism.sums import NoisedSums
from adadp.randomness import Randomness
from adadp.sampling.lot import Lot, State
from soundness.stand import CLIPPINGS, WORLDS, Stand

DRAWS = 300
ALPHA = 1e-6  # a right sampler fails once in a million at another seed; a wrong one by ten percent always does


def standardised(stand: Stand, monkeypatch: pytest.MonkeyPatch, draws: int = DRAWS) -> np.ndarray:
    """[draws, coordinates] of (release - sum) / stddev, where the noise is independent, shape held still."""
    rows: list[Tensor] = []
    inputs, weights = stand.examples(3)
    still = {name: value.clone() for name, value in stand.bound(inputs, weights).items()}
    stddev = stand.clipping.stddev(stand.sigma)

    def keep(noisy: dict[str, Tensor], noise: dict[str, float | Tensor]) -> dict[str, Tensor]:
        parts = []
        for name, value in noisy.items():
            scale = torch.as_tensor(stddev[name], dtype=torch.float64).expand(value.shape)
            torch.testing.assert_close(torch.as_tensor(noise[name]).double().expand(value.shape), scale)
            difference = (value - still[name]).double()
            assert (difference[scale == 0] == 0).all()
            parts.append((difference / scale)[scale > 0])
        rows.append(torch.cat(parts))
        return {}

    monkeypatch.setattr(stand.clipping, "release", keep)
    for _ in range(draws):
        stand.step.release(Lot(0, State.FILLED, sums=dict(still), settings=settings_of(stand.clipping)))
    return torch.stack(rows).numpy()


def complaints(noise: np.ndarray) -> list[str]:
    """What is wrong with draws that should be independent standard normals."""
    draws, coordinates = noise.shape
    found = []
    if stats.kstest(noise.ravel(), "norm").pvalue < ALPHA:
        found.append("distribution")
    if abs(noise.mean()) * math.sqrt(noise.size) > stats.norm.isf(ALPHA / 2):
        found.append("mean")
    total = (noise**2).sum()
    if min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size)) < ALPHA:
        found.append("variance")
    squares = (noise**2).sum(0)  # chi-square of `draws` degrees in every coordinate
    tails = np.minimum(stats.chi2.cdf(squares, draws), stats.chi2.sf(squares, draws))
    if tails.min() < ALPHA / coordinates:
        found.append("variance of a coordinate")
    pairs = noise.T @ noise / math.sqrt(draws)
    off = pairs[~np.eye(coordinates, dtype=bool)]
    if off.size and np.abs(off).max() > stats.norm.isf(ALPHA / off.size / 2):
        found.append("independence of coordinates")
    steps = (noise[1:] * noise[:-1]).sum() / math.sqrt(noise[1:].size)
    if abs(steps) > stats.norm.isf(ALPHA / 2):
        found.append("independence of steps")
    return found


@pytest.mark.parametrize("name", CLIPPINGS)
def test_noise_is_as_declared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(WORLDS["mlp"], CLIPPINGS[name], sigma=1.3, seed=11)
    assert complaints(standardised(stand, monkeypatch)) == []


@pytest.mark.parametrize("name", ["flat", "ellipsoid, full, paid", "local, released, on"])
def test_secure_noise_is_as_declared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(WORLDS["mlp"], CLIPPINGS[name], torch.float32, randomness=Randomness(secure=True))
    assert complaints(standardised(stand, monkeypatch)) == []


def test_complaints_have_teeth() -> None:
    right = Randomness(3).normal(torch.zeros(DRAWS, 30, dtype=torch.float64)).numpy()
    assert complaints(right) == []
    assert "variance" in complaints(1.1 * right)
    assert "variance" in complaints(right / 1.1)
    assert "mean" in complaints(right + 0.1)
    one = right.copy()
    one[:, 4] *= 1.5
    assert "variance of a coordinate" in complaints(one)
    tied = right.copy()
    tied[:, 4] = 0.6 * right[:, 4] + 0.8 * right[:, 5]
    assert "independence of coordinates" in complaints(tied)
    assert "independence of steps" in complaints(np.repeat(right[: DRAWS // 2], 2, axis=0))
    assert "distribution" in complaints(np.sign(right))


def test_noise_is_isotropic_before_the_last_change_of_basis_and_shaped_after() -> None:
    shape = Kronecker(0.25, 0.5, rank=None)
    stand = Stand(WORLDS["linear"], lambda world, dtype: Ellipsoid(0.8, shape=shape, source=Released(every=10**6)))
    moments = torch.randn(3, 6, dtype=torch.float64)
    shape.learn("weight", {"rows": moments[:2] @ moments[:2].T, "columns": moments @ moments.T})
    rows, columns = shape._pair("weight", -0.5)
    left, right = rows.matrix(2, moments), columns.matrix(3, moments)
    inputs, weights = stand.examples(1)
    released = [stand.lot(inputs, 0 * weights)["weight"].flatten() for _ in range(1500)]
    draws = torch.stack(released) * 4 / (stand.sigma * 0.8)
    found, wanted = draws.T @ draws / len(draws), torch.kron(left @ left, right @ right)
    error = (wanted.diagonal().outer(wanted.diagonal()) + wanted.square()).sqrt() / math.sqrt(len(draws))
    assert ((found - wanted).abs() <= 5 * error).all()
    assert not ((found - torch.eye(6)).abs() <= 5 * error).all()  # what no change of basis would give


def test_noise_of_a_bfloat16_model_is_float32() -> None:
    stand = Stand(WORLDS["mlp"], lambda world, dtype: Flat(1.0), torch.bfloat16)
    inputs, weights = stand.examples(3)
    released = stand.lot(inputs, weights)
    assert {value.dtype for value in released.values()} == {torch.float32}
    values = torch.cat([value.flatten() for value in released.values()])
    assert (values != values.to(torch.bfloat16).float()).float().mean() > 0.9


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_lot_in_pieces_is_the_lot(name: str) -> None:
    whole, pieces = (Stand(WORLDS["tokens"], CLIPPINGS[name], seed=4) for _ in range(2))
    inputs, weights = whole.examples(5)
    for _ in range(2):  # the second time with the shape that the first one left
        one, other = whole.lot(inputs, weights), pieces.lot(inputs, weights, 2, 1, 2)
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-6, atol=1e-6)


def test_pieces_differ_where_they_should() -> None:
    whole, other = (Stand(WORLDS["tokens"], CLIPPINGS["flat"], seed=4) for _ in range(2))
    inputs, weights = whole.examples(5)
    one, two = whole.lot(inputs, weights), other.lot(inputs[:4], weights[:4], 2, 2)
    assert any((one[key] - two[key]).abs().max() > 1e-3 for key in one)


# ---- what clippings say of the noise in their release ---------------------------------------------------------------


def unit_noises(stand: Stand) -> Iterator[NoisedSums]:
    """Noised sums that are zero but for one coordinate of one parameter, which is its standard deviation."""
    stddev = stand.clipping.stddev(stand.sigma)
    zeros = {
        key: torch.zeros_like(stand.clipping.parameters[key]) if key in stand.clipping.parameters else value * 0.0
        for key, value in stand.bound(*stand.examples(2)).items()
    }
    for name in stand.clipping.parameters:
        scale = torch.as_tensor(stddev[name], dtype=torch.float64).expand(zeros[name].shape)
        for place in range(zeros[name].numel()):
            one = torch.zeros_like(zeros[name]).flatten()
            one[place] = scale.flatten()[place]
            yield NoisedSums({**zeros, name: one.view_as(zeros[name])})


# A `Public` source holds an iterator, which cannot be copied; it has no part in a release.
@pytest.mark.parametrize("name", [name for name in CLIPPINGS if "public" not in name])
def test_noise_of_release_is_the_noise_that_a_release_carries(name: str) -> None:
    stand = Stand(WORLDS["mlp"], CLIPPINGS[name], sigma=1.3, seed=5)
    stddev = stand.clipping.stddev(stand.sigma)
    said = stand.clipping.noise_of_release(stand.sigma)
    variance = {key: torch.zeros(value.shape).double() for key, value in stand.clipping.parameters.items()}
    for noisy in unit_noises(stand):  # a release is linear in its noise, so variances add up
        for key, value in copy.deepcopy(stand.clipping).release(noisy, stddev).items():
            variance[key] += value.detach().double().square()
    assert said.keys() == variance.keys()
    for key, value in variance.items():
        expected = torch.as_tensor(said[key]).detach().double().expand(value.shape)
        torch.testing.assert_close(value.sqrt(), expected, rtol=1e-6, atol=1e-12, msg=f"{name}: {key}")


@pytest.mark.parametrize("shape", ["diagonal", "full", "low rank", "rows and columns", "partly wide"])
def test_noise_of_gradient_is_carried_back_by_the_shape(shape: str) -> None:
    stand = Stand(WORLDS["mlp"], CLIPPINGS[f"ellipsoid, {shape}, probe"], sigma=1.3, seed=5)
    clipping = stand.clipping
    said = clipping.noise_of_gradient(stand.sigma)
    for key, parameter in clipping.parameters.items():
        total = torch.zeros(parameter.shape).double()
        for place in range(parameter.numel()):
            one = torch.zeros(parameter.numel(), dtype=torch.float64)
            one[place] = float(clipping.stddev(stand.sigma)[key])
            total += clipping.shape.apply(key, one.view(parameter.shape), clipping.shape.before).detach().square()
        torch.testing.assert_close(total.sqrt(), said[key].detach(), rtol=1e-6, atol=1e-12)
