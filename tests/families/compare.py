"""Per-example gradients of the engine beside those of a loop in ordinary PyTorch over one example at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from families.tasks import Batch, Task
from torch import Tensor, nn

from adadp.gradients.capture.capture import Capture

Gradients = dict[str, Tensor]


def row(batch: Batch, place: int) -> Batch:
    return {name: value[place : place + 1] for name, value in batch.items()}


def trainable(model: nn.Module) -> Gradients:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def by_loop(model: nn.Module, task: Task, batch: Batch, alone: Callable[[Batch], Batch] = dict) -> Gradients:
    """By ordinary autograd on each example, [n, ...]; zero where a parameter gets none."""
    parameters = trainable(model)
    rows = []
    for place in range(len(batch["labels"])):
        loss = task.losses(model, alone(row(batch, place))).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values(), strict=True)])
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def by_capture(model: nn.Module, task: Task, batch: Batch) -> Gradients:
    """By one backward pass of the watched model; only parameters that got a gradient are there."""
    count = len(batch["labels"])
    capture = Capture(model)
    try:
        capture.work_on(object(), count)
        task.losses(model, batch).sum().backward()
        ordinary = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert not ordinary, f"summed over all examples, a gradient reached {ordinary}"
        return {name: form.dense(slice(0, count)) for name, form in capture.take(count).items()}
    finally:
        capture.detach()


def assert_same(found: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Relative to the largest entry of the parameter's gradients, or a hundredth of the largest of all."""
    largest = max(float(value.abs().max()) for value in expected.values())
    assert set(found) <= set(expected)
    for name, truth in expected.items():
        own = float(truth.abs().max())
        if name not in found:
            assert own == 0, f"{name} has no gradient, and should have one of size {own:.3g}"
            continue
        assert found[name].shape == truth.shape, name
        error = float((found[name].double() - truth.double()).abs().max())
        limit = tolerance * max(own, largest / 100)
        assert error <= limit, f"{name}: off by {error:.3g}, allowed {limit:.3g} (its largest is {own:.3g})"
