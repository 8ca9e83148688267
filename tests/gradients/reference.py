"""What every layer is measured against: plain torch, one example at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from adadp.gradients.capture.capture import Capture
from adadp.gradients.forms.factors import Factor, Full
from adadp.gradients.forms.per_example import PerExample
from adadp.shapes.spectrum import Moments, Spectrum, powers, spectra

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def matrix_factor(matrix: Tensor) -> Factor:
    """A factor of a Kronecker shape."""
    return Full(matrix, matrix.double().norm(), float(torch.linalg.cond(matrix)))


def loss_of(output: Any) -> Tensor:
    """A smooth loss, a sum over examples, that gives every output of an example a gradient of its own."""
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            places = torch.arange(leaf[:1].numel(), dtype=leaf.dtype).view(leaf[:1].shape)
            total = total + (leaf * torch.cos(places * 0.7)).sum() + 0.5 * leaf.square().sum()
    return total


def by_func(model: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], Tensor] = loss_of) -> dict[str, Tensor]:
    """Per-example gradients by vmap(grad(functional_call)); every tensor among the inputs is batched."""
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    rest |= dict(model.named_buffers())

    def loss_of_one(parameters: dict[str, Tensor], *one: Any) -> Tensor:
        batch = pytree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, one)
        return loss(functional_call(model, {**parameters, **rest}, batch))

    return vmap(grad(loss_of_one), in_dims=(None, *[0] * len(inputs)), randomness="error")(trainable, *inputs)


def by_loop(
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] = loss_of,
    *,
    take: Callable[[Any, int], Any] = lambda t, i: t[i : i + 1],
    count: int | None = None,
) -> dict[str, Tensor]:
    """Per-example gradients by ordinary autograd on each example alone; `take` picks example i of a tensor."""
    count = len(inputs[0]) if count is None else count
    model = copy.deepcopy(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: list[list[Tensor]] = []
    for example in range(count):
        one = pytree.tree_map(lambda t, i=example: take(t, i) if isinstance(t, Tensor) else t, list(inputs))
        found = torch.autograd.grad(loss(model(*one)), list(trainable.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, trainable.values(), strict=True)])
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(trainable)}


def captured(
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] = loss_of,
    *,
    count: int | None = None,
    **settings: Any,
) -> dict[str, PerExample]:
    """What the capture collects in one backward pass of the same loss."""
    capture = Capture(model, **settings)
    try:
        loss(model(*inputs)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None, f"{name} received an ordinary gradient"
        return capture.take(len(inputs[0]) if count is None else count)
    finally:
        capture.detach()


def close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Relative to the largest entry: rounding scales with it."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return
    error = (found.double() - expected.double()).abs().max()
    limit = tolerance * expected.double().abs().max().clamp_min(1e-12)
    assert bool(error <= limit), f"{what}: off by {float(error):.3g}, allowed {float(limit):.3g}"


def assert_forms(forms: Mapping[str, PerExample], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every question a clipping asks, answered as the dense gradients answer it."""
    assert set(forms) == set(expected)
    generator = torch.Generator().manual_seed(3)
    for name, truth in expected.items():
        form = forms[name]
        count = len(truth)
        assert form.count == count
        assert tuple(form.shape) == tuple(truth.shape[1:])
        keep = torch.ones(count, dtype=torch.bool)
        weights = torch.rand(count, generator=generator, dtype=truth.dtype)
        if count > 1:
            keep[0], weights[0] = False, 0
        assert_one(form, truth, weights, keep, tolerance, name)
        scale = torch.rand(truth.shape[1:], generator=generator, dtype=truth.dtype) + 0.5
        assert_one(form.scaled(scale), truth * scale, weights, keep, tolerance, f"{name} scaled")
        rows, columns = truth.shape[1], truth[:1].numel() // truth.shape[1]
        left = torch.randn(rows, rows, generator=generator, dtype=truth.dtype)
        right = torch.randn(columns, columns, generator=generator, dtype=truth.dtype)
        left, right = left @ left.T, right @ right.T
        both = (left @ truth.reshape(count, rows, columns) @ right).view(truth.shape)
        between = form.sandwiched(matrix_factor(left), matrix_factor(right))
        assert_one(between, both, weights, keep, tolerance, f"{name} sandwiched")
        close(form.square_sum(keep), truth[keep].square().sum(0), tolerance, f"{name} square sum")
        matrices = truth[keep].reshape(-1, rows, columns)
        moments = form.moments(keep, {"rows": "full", "columns": "diagonal"})
        close(moments["rows"], (matrices @ matrices.mT).sum(0), tolerance, f"{name} row moments")
        columns_by_columns = (matrices.mT @ matrices).sum(0)
        close(moments["columns"], columns_by_columns.diagonal(), tolerance, f"{name} diagonal")
        moments = form.moments(keep, {"columns": "full"})
        close(moments["columns"], columns_by_columns, tolerance, f"{name} column moments")
        bound = torch.full_like(scale, 0.3)
        clamped = torch.clamp(truth[keep] * 2.0, -bound, bound).sum(0)
        close(form.clamped_sum(bound, 2.0, keep), clamped, tolerance, f"{name} clamped sum")


def assert_one(form: PerExample, truth: Tensor, weights: Tensor, keep: Tensor, tolerance: float, what: str) -> None:
    count = len(truth)
    close(form.dense(slice(0, count)), truth, tolerance, f"{what}: gradients")
    close(form.squared_norms().sqrt(), truth.double().flatten(1).norm(dim=1), tolerance, f"{what}: norms")
    flat = truth.flatten(1)
    close(form.weighted_sum(weights, keep), (weights @ flat).view(truth.shape[1:]), tolerance, f"{what}: sum")
    for example in range(min(count, 3)):
        alone = torch.zeros_like(weights)
        alone[example] = 1
        added = form.weighted_sum(alone, alone != 0).double().norm()
        assert bool(added <= form.squared_norms()[example].sqrt() * (1 + 1e-9)), f"{what}: norm is no bound"


def assert_matches(
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] = loss_of,
    *,
    loop: bool = False,
    tolerance: float | None = None,
    **settings: Any,
) -> None:
    """The capture's gradients of `model` equal torch's own."""
    expected = (by_loop if loop else by_func)(model, inputs, loss)
    dtype = next(iter(expected.values())).dtype
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    assert_forms(captured(model, inputs, loss, **settings), expected, limit)


def arbitrary(data: st.DataObject, *shape: int) -> Tensor:
    """Values of float32 of any size below 2^60, as hypothesis chooses them."""
    value, number = st.floats(-(2.0**60), 2.0**60, width=32), math.prod(shape)
    return torch.tensor(data.draw(st.lists(value, min_size=number, max_size=number))).view(shape)


def spectrum_of(
    moments: Tensor, damping: float, rank: int | None, previous: Spectrum | None = None, *, thin: bool = False
) -> Spectrum:
    """The spectrum of moments that are learnt alone."""
    return spectra([Moments(moments, thin, None if previous is None else previous.basis)], damping, rank)[0]


def power_of(spectrum: Spectrum, exponent: float) -> Factor:
    """Its power, made alone."""
    return powers([(spectrum, exponent)])[0]
