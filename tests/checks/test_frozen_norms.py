"""A BatchNorm in eval mode normalises by constants: accepted, and refused as soon as it does not any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop import epoch, private, step, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.checks.validation import problems
from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients import Capture


def body(**settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6, **settings), nn.ReLU(inplace=True))
    model(torch.randn(50, 3) * 3 + 1)  # statistics of public data
    if model[1].affine:
        nn.init.uniform_(model[1].weight, 0.5, 1.5)
    return model.eval()


def headed(frozen: bool = True, **settings: Any) -> nn.Sequential:
    return nn.Sequential(body(**settings).requires_grad_(not frozen), nn.Linear(6, 2))


def per_example(model: nn.Module, inputs: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for x in inputs:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(model(x[None]).square().sum(), list(trained.values()))
        found.append(dict(zip(trained, grads, strict=True)))
    return found


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_those_of_each_example_alone(frozen: bool, affine: bool) -> None:
    model = headed(frozen, affine=affine).double()
    assert problems(model) == []
    inputs = torch.randn(5, 3, dtype=torch.float64)
    expected = per_example(model, inputs)
    capture = Capture(model)
    assert capture.notices == []
    model(inputs).square().sum().backward()
    forms = capture.take(5)
    assert set(forms) == set(expected[0])
    for name, form in forms.items():
        torch.testing.assert_close(form.dense(slice(0, 5)), torch.stack([one[name] for one in expected]))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_pretrained_body_trains_and_its_statistics_stay(frozen: bool) -> None:
    model = headed(frozen)
    mean = model[0][1].running_mean.clone()
    engine, model, optimizer, loader = private(model)
    before, norm = weights(model), model[0][1].weight.clone()
    epoch(model, optimizer, loader)
    assert not torch.equal(before, weights(model))
    assert torch.equal(norm, model[0][1].weight) is frozen
    assert torch.equal(mean, model[0][1].running_mean)
    said = engine.guarantee(1e-5).assumptions
    assert any(text.startswith("the running statistics of 0.1 (BatchNorm in eval mode) are public") for text in said)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_training_mode_is_refused_at_every_step_and_eval_mode_goes_on(frozen: bool, affine: bool) -> None:
    engine, model, optimizer, loader = private(headed(frozen, affine=affine))
    before = {}
    for number, batch in enumerate(loader):
        if number != 1:
            step(model, optimizer, batch)
            continue
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.train()  # as loops do at the beginning of an epoch
        with pytest.raises(TrainingLoopError, match=r"0\.1 \(BatchNorm1d\).*training mode.*\.eval\(\) after"):
            step(model, optimizer, batch)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model[0].eval()
        step(model, optimizer, batch)
    assert number == 3
    assert engine.get_epsilon(1e-5) > 0


def test_training_mode_after_the_model_ran_is_refused() -> None:
    """Checkpoints and torch.func run parts of the model again in and after the backward pass."""
    _, model, optimizer, loader = private(headed())
    inputs, targets = next(iter(loader))
    optimizer.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
    model.train()
    with pytest.raises(TrainingLoopError, match=r"0\.1 \(BatchNorm1d\) is in training mode"):
        optimizer.step()


@pytest.mark.parametrize("part", ["running_mean", "running_var"])
def test_statistics_that_are_taken_away_are_refused(part: str) -> None:
    _, model, optimizer, loader = private(headed())
    setattr(model[0][1], part, None)
    with pytest.raises(TrainingLoopError, match=r"0\.1 \(BatchNorm1d\)"):
        step(model, optimizer, next(iter(loader)))


def test_a_call_without_gradients_in_training_mode_is_said() -> None:
    """It takes the batch's statistics into the buffers, and the next call is an ordinary one."""
    engine, model, optimizer, loader = private(headed())
    batches = iter(loader)
    step(model, optimizer, next(batches))
    inputs, targets = next(batches)
    model(inputs)
    model.train()
    with torch.no_grad():
        model(inputs)
    model.eval()
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert any("buffers were changed" in text for text in engine.guarantee(1e-5).untried)


def test_a_switch_inside_forward_is_refused() -> None:
    class Switching(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.head = norm, nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.train()
            out = self.norm(x)
            self.norm.eval()
            return self.head(out)

    for norm in (nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, affine=False).eval()):
        _, model, optimizer, loader = private(Switching(norm))
        with pytest.raises(UnsupportedModuleError):
            step(model, optimizer, next(iter(loader)))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, track_running_stats=False).eval(),
        nn.BatchNorm1d(3, track_running_stats=False, affine=False).eval(),
    ],
)
def test_what_normalises_by_the_batch_is_refused(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.Linear(3, 2))
    with pytest.raises(UnsupportedModuleError, match=r"0 \(BatchNorm1d\).*adadp.fix.*eval"):
        private(model)


def test_the_layer_itself_refuses_training_mode() -> None:
    norm = nn.BatchNorm1d(3).eval()
    with pytest.raises(UnsupportedModuleError, match="eval"):
        Capture(nn.BatchNorm1d(3))
    Capture(norm)
    norm.train()
    with pytest.raises(UnsupportedModuleError, match="eval"):
        norm(torch.randn(4, 3))
