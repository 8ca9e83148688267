"""Per-example gradients of the engine beside those of a loop in ordinary PyTorch over one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from families.tasks import Batch, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from adadp.checks.containers import Arguments
from adadp.checks.trial_runs import LossRuns
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


def by_capture(model: nn.Module, task: Task, batch: Batch, called: Any = None) -> Gradients:
    """By one backward pass of the watched model (`called` in its place); only parameters that got one are there."""
    count = len(batch["labels"])
    capture = Capture(model)
    try:
        if count > 1:  # as the engine's trials do
            arguments = Arguments.read((batch,), count, (0,))
            LossRuns(capture, lambda rows: task.losses(model, rows), arguments).learn()
        capture.work_on(object(), count)
        task.losses(model if called is None else called, batch).sum().backward()
        ordinary = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert not ordinary, f"summed over all examples, a gradient reached {ordinary}"
        return {name: form.dense(slice(0, count)) for name, form in capture.take(count).items()}
    finally:
        capture.detach()


def released_and_expected(
    model: nn.Module,
    task: Task,
    bound: float = 0.1,
    before_step: Callable[[], object] = lambda: None,
    called: Callable[[nn.Module], nn.Module] = lambda model: model,
    **settings: Any,
) -> tuple[Gradients, Gradients]:
    """What two private steps release, with next to no noise, and the mean of clipped gradients of a loop. [2, ...]."""
    plain = copy.deepcopy(model)
    examples = [
        {name: value[place] for name, value in batch.items()} for batch in [task.batch(8)] for place in range(8)
    ]
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(trainable(model).values(), lr=0.01), noise_multiplier=1e-9,
        data_loader=DataLoader(examples, batch_size=4), max_grad_norm=bound, sampling="fixed", **settings,
    )  # fmt: skip
    forward, steps = called(model), []
    for batch in loader:
        plain.load_state_dict(model.state_dict())
        own = by_loop(plain, task, batch)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in own.values()]).norm(dim=0)
        factors = (bound / norms).clamp(max=1) / 4
        before_step()
        optimizer.zero_grad()
        optimizer.backward(task.losses(forward, batch))
        optimizer.step()
        for name, parameter in trainable(model).items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            steps.append((name, gradient.clone(), torch.tensordot(factors, own[name], 1)))
    names = dict.fromkeys(name for name, _, _ in steps)
    released = {name: torch.stack([found for own, found, _ in steps if own == name]) for name in names}
    return released, {name: torch.stack([wanted for own, _, wanted in steps if own == name]) for name in names}


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
