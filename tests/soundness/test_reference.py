"""Bounded sums, for every clipping, against plain torch.func gradients and formulas written down again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from adadp import Automatic, Clipping, Diagonal, Ellipsoid, Flat, Grouped, Kronecker, Local, PerLayer
from adadp.shapes import Shape
from adadp.shapes.shape import THIN
from adadp.shapes.spectrum import powers
from soundness.stand import CLIPPINGS, WORLDS, Stand, losses

Dense = dict[str, Tensor]


def by_func(stand: Stand, inputs: Tensor, weights: Tensor) -> Dense:
    """[n, *shape] for each parameter, by vmap over grad."""
    values = {name: p.detach() for name, p in stand.model.named_parameters()}
    stand.capture.detach()  # the model has to be an ordinary one for functional_call

    def loss(parameters: Dense, x: Tensor, weight: Tensor) -> Tensor:
        return (losses(functional_call(stand.model, parameters, (x.unsqueeze(0),))) * weight).sum()

    return vmap(grad(loss), in_dims=(None, 0, 0))(values, inputs, weights)


def lengths(gradients: Dense) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()


def times(gradients: Dense, factors: Tensor) -> Dense:
    return {name: (g * factors.view(-1, *[1] * (g.ndim - 1))).sum(0) for name, g in gradients.items()}


def powered(moments: Tensor, damping: float, exponent: float) -> Tensor:
    """A factor raised to a power, as a matrix: eigenvalues scaled to mean 1 and damped."""
    values, basis = (moments, torch.eye(len(moments))) if moments.ndim == 1 else torch.linalg.eigh(moments)
    values, basis = values.clamp_min(0), basis.to(moments.dtype)
    return basis @ torch.diag((values / _mean(values) + damping) ** exponent) @ basis.T


def _mean(values: Tensor) -> Tensor:
    return values.mean().clamp_min(torch.finfo(values.dtype).tiny)


def factor(shape: Kronecker, name: str, side: str, moments: Tensor) -> Tensor:
    spectrum = (shape._rows if side == "rows" else shape._columns)[name]
    if spectrum.rest is not None:  # low rank: which directions is another test; here it is what is done with them
        return powers([(spectrum, -shape.before)])[0].matrix(len(moments), moments)
    return powered(moments, shape.damping, -shape.before)


def in_shape(shape: Shape, statistics: dict[str, dict[str, Tensor]], gradients: Dense) -> Dense:
    """S^-before g, from the statistics that the shape was given."""
    result = {}
    for name, g in gradients.items():
        if name not in statistics:
            result[name] = g
        elif isinstance(shape, Diagonal):
            square = statistics[name]["square"].clamp_min(0)
            result[name] = g * (square / _mean(square) + shape.damping) ** -shape.before
        else:
            assert isinstance(shape, Kronecker)
            left = factor(shape, name, "rows", statistics[name]["rows"])
            if g.ndim < 3:
                result[name] = (g.reshape(len(g), -1) @ left).reshape(g.shape)
                continue
            right = factor(shape, name, "columns", statistics[name]["columns"])
            result[name] = (left @ g.flatten(2) @ right).reshape(g.shape)
    return result


def expected(clipping: Clipping, learnt: dict[int, dict[str, dict[str, Tensor]]], gradients: Dense) -> Dense:
    gradients = {name: gradients[name] for name in clipping.parameters}
    if isinstance(clipping, PerLayer) and clipping._radius is not None:
        layers: dict[str, Dense] = {}
        for name, g in gradients.items():
            layers.setdefault(name.rpartition(".")[0], {})[name] = g
        radius = clipping._radius / math.sqrt(len(layers))
        return {k: v for own in layers.values() for k, v in times(own, (radius / lengths(own)).clamp(max=1)).items()}
    if isinstance(clipping, Grouped):
        members = [member for member in clipping.groups.values() if member.parameters]
        return {k: v for member in members for k, v in expected(member, learnt, gradients).items()}
    if isinstance(clipping, Automatic):
        return times(gradients, clipping.max_grad_norm / (lengths(gradients) + clipping.gamma))
    if isinstance(clipping, Local) and clipping.local:
        squares = {name: value["square"].clamp_min(0) for name, value in learnt[id(clipping.shape)].items()}
        bounds = {name: clipping.beta * squares[name].sqrt() for name in gradients}
        return {name: torch.clamp(g, -bounds[name], bounds[name]).sum(0) for name, g in gradients.items()}
    assert isinstance(clipping, Flat)
    if isinstance(clipping, Ellipsoid):
        gradients = in_shape(clipping.shape, learnt[id(clipping.shape)], gradients)
    return times(gradients, (clipping.max_grad_norm / lengths(gradients)).clamp(max=1))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, dict[str, Tensor]]]:
    """The statistics that each shape was last given, by shape and parameter."""
    seen: dict[int, dict[str, dict[str, Tensor]]] = {}
    for kind in (Diagonal, Kronecker):
        plain = kind.learn_all

        def learn_all(self: Shape, given: dict[str, dict[str, Tensor]], plain: object = plain) -> None:
            of_this = seen.setdefault(id(self), {})  # no parameter is in it where none could be learnt
            for name, statistics in given.items():
                of_this[name] = {
                    key.removesuffix(THIN): value.T @ value if key.endswith(THIN) else value.clone()
                    for key, value in statistics.items()
                }
            plain(self, given)

        monkeypatch.setattr(kind, "learn_all", learn_all)
    return seen


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_bounded_sums_are_those_of_plain_gradients(
    name: str, world: str, dtype: torch.dtype, tolerance: float, learnt: dict[int, dict[str, dict[str, Tensor]]]
) -> None:
    stand = Stand(WORLDS[world], CLIPPINGS[name], dtype)
    inputs, weights = stand.examples(5)
    weights = torch.tensor([1.0, 0.01, -3.0, 50.0, 0.2], dtype=dtype)  # some are clipped, some are not
    found = stand.bound(inputs, weights)
    wanted = expected(stand.clipping, learnt, by_func(stand, inputs, weights))
    assert {key for key in found if not key.startswith("shape/")} == set(wanted)
    size = max(float(value.abs().max()) for value in wanted.values())
    for key, value in wanted.items():
        assert (found[key].double() - value.double()).abs().max() <= tolerance * size, key
