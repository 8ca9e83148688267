"""adadp.mechanism.optimizer and adadp.mechanism.step: what the loop may do, and what comes of doing it wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loop import cross_entropy, data, epoch, mlp, private, released, step, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adadp import Flat, Grouped, PerLayer, PrivacyEngine
from adadp.errors import ConfigurationError, PrivacyError, TrainingLoopError, UnsupportedModuleError

QUIET = 1e-9  # noise so small that what is released can be read off

# ---- what is released -----------------------------------------------------


def reference(model: nn.Module, inputs: Tensor, targets: Tensor, bound: float, lot: float) -> Tensor:
    """The clipped gradients of the examples one by one, summed and divided by the expected lot."""
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    total = torch.zeros(sum(p.numel() for p in plain.parameters()))
    for x, y in zip(inputs, targets, strict=True):
        plain.zero_grad()
        cross_entropy(plain(x.unsqueeze(0)), y.unsqueeze(0)).backward()
        gradient = released(plain)
        total += gradient * min(1.0, bound / float(gradient.norm()))
    return total / lot


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_the_denominator_is_the_expected_lot(reduction: str, physical: int | None, scale: float) -> None:
    settings = {"loss_reduction": reduction, "max_physical_batch_size": physical, "loss_scale": scale}
    _, model, optimizer, loader = private(
        engine=PrivacyEngine(seed=1), noise_multiplier=QUIET, max_grad_norm=0.3, lr=0.0, **settings
    )
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    lots: dict[int, list[tuple[Tensor, Tensor]]] = {}
    sizes = set()
    for inputs, targets in loader:
        if loader.current.real:
            lots.setdefault(loader.current.lot, []).append((inputs, targets))
        step(model, optimizer, (inputs, targets), lambda *a: scale * criterion(*a))
        if loader.current.last and loader.current.real:
            whole = [torch.cat(parts) for parts in zip(*lots[loader.current.lot], strict=True)]
            sizes.add(len(whole[0]))
            torch.testing.assert_close(released(model), reference(model, *whole, 0.3, 6.0), rtol=1e-4, atol=1e-6)
    assert len(sizes) > 1  # lots of several sizes, one denominator
    assert optimizer.expected_batch_size == 6
    assert optimizer.noise_multiplier == QUIET


def test_a_bound_that_is_lowered_within_a_lot_is_refused() -> None:
    """What was bounded by the old one would get the noise of the new one."""
    clipping = Flat(10.0)
    _, model, optimizer, loader = private(clipping=clipping, sampling="fixed", max_physical_batch_size=2)
    batches = iter(loader)
    step(model, optimizer, next(batches))
    clipping.max_grad_norm = 0.1
    with pytest.raises(TrainingLoopError, match="within a lot"):
        step(model, optimizer, next(batches))
    for batch in loader:  # between lots it may change
        step(model, optimizer, batch)
        if loader.current.last:
            clipping.max_grad_norm *= 0.5
    assert clipping.max_grad_norm < 0.1


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_regulariser_on_the_weights_is_added_as_it_is(scale: float) -> None:
    found = []
    for strength in (0.0, 0.7):
        engine = PrivacyEngine(seed=2)
        _, model, optimizer, loader = private(
            engine=engine,
            loss_scale=scale,
            penalty=lambda net, by=strength: (
                by * (sum(p.square().sum() for p in net.parameters()) + net[0].weight.abs().sum())
            ),
        )
        inputs, targets = next(iter(loader))
        optimizer.zero_grad()
        (scale * cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        assert "penalty= is a function of the weights alone" in str(engine.guarantee(1e-5))
        found.append(released(model))
    plain = mlp()
    (0.7 * (sum(p.square().sum() for p in plain.parameters()) + plain[0].weight.abs().sum())).backward()
    torch.testing.assert_close(found[1] - found[0], released(plain), rtol=1e-4, atol=1e-5)


def test_a_penalty_is_added_once_for_each_lot_however_many_parts_it_has() -> None:
    found = []
    for size in (None, 2):
        _, model, optimizer, loader = private(
            engine=PrivacyEngine(seed=2),
            lr=0.0,
            sampling="fixed",
            max_physical_batch_size=size,
            penalty=lambda net: 100 * net[0].weight.square().sum(),
        )
        for batch in loader:
            step(model, optimizer, batch)
            if optimizer.stepped:
                break
        found.append(released(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_term_on_the_weights_that_was_not_declared_is_refused() -> None:
    _, model, optimizer, loader = private()
    before = weights(model)
    inputs, targets = next(iter(loader))
    (cross_entropy(model(inputs), targets) + model[0].weight.square().sum()).backward()
    with pytest.raises(TrainingLoopError, match="penalty="):
        optimizer.step()
    assert torch.equal(before, weights(model))


def test_parameters_that_were_not_used_get_noise_too() -> None:
    model = mlp()
    model.register_parameter("idle", nn.Parameter(torch.zeros(5)))
    _, model, optimizer, loader = private(model)
    step(model, optimizer, next(iter(loader)))
    assert model.idle.grad.abs().min() > 0


def test_a_batch_that_was_not_differentiated_is_not_stepped_on() -> None:
    """A guard against NaN that leaves the backward pass out skips a lot because of what is in it, noise or not."""
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    step(model, optimizer, next(batches))
    next(batches)
    with pytest.raises(TrainingLoopError, match="without a backward pass"):
        optimizer.step()
    assert engine.guarantee(1e-5).epsilon is None


@pytest.mark.parametrize("by", ["rows", "scalar"])
def test_zero_grad_between_the_passes_is_the_order_of_many_tutorials(by: str) -> None:
    found = []
    for late in (False, True):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=2), noise_multiplier=1e-6, lr=0.0)
        inputs, targets = next(iter(loader))
        if not late:
            optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        if late:
            optimizer.zero_grad()
        optimizer.backward(losses) if by == "rows" else losses.mean().backward()
        optimizer.step()
        found.append(released(model))
    torch.testing.assert_close(*found)
    assert found[0].norm() > 1e-3


def test_freezing_between_steps() -> None:
    for clipping in ("flat", "per_layer", "ellipsoid", "local", Grouped({"0.*": Flat(0.5), "*": PerLayer(1.0)})):
        _, model, optimizer, loader = private(clipping=clipping, noise_multiplier=1.0)
        batches = iter(loader)
        step(model, optimizer, next(batches))
        model[0].requires_grad_(False)
        before = weights(model[0])
        step(model, optimizer, next(batches))
        assert torch.equal(before, weights(model[0]))
        assert model[0].weight.grad is None
        model[0].requires_grad_(True)
        step(model, optimizer, next(batches))
        assert not torch.equal(before, weights(model[0]))


def test_noise_follows_the_number_of_groups_that_are_released() -> None:
    clipping = Grouped({"0.*": Flat(1.0), "*": Flat(1.0)})
    _, model, optimizer, loader = private(clipping=clipping, lr=0.0)
    batches = iter(loader)
    step(model, optimizer, next(batches))
    assert clipping.stddev(1.0)["0.weight"] == pytest.approx(math.sqrt(2))
    model[0].requires_grad_(False)
    step(model, optimizer, next(batches))
    assert clipping.stddev(1.0) == pytest.approx({"2.weight": 1.0, "2.bias": 1.0})


# ---- ways past the engine -----------------------------------------------------


def test_a_gradient_from_before_is_forgotten() -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    _, model, optimizer, loader = private(model, noise_multiplier=QUIET)
    inputs, targets = next(iter(loader))
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert released(model).norm() < 10


def test_forward_past_the_hooks_is_refused() -> None:
    _, model, optimizer, loader = private(nn.Linear(3, 2))
    inputs, targets = next(iter(loader))
    before = weights(model)
    cross_entropy(model.forward(inputs), targets).backward()
    with pytest.raises(TrainingLoopError, match=r"model.forward\(x\)"):
        optimizer.step()
    assert torch.equal(before, weights(model))


def test_a_detached_module_is_not_stepped_on() -> None:
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    step(model, optimizer, next(batches))
    engine.detach(model)
    inputs, targets = next(batches)
    before = weights(model)
    cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TrainingLoopError):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TrainingLoopError, match=r"engine.detach"):
        optimizer.step()
    assert torch.equal(before, weights(model))


class Forgetful(torch.autograd.Function):
    """x W^T, whose gradient for W no operation of torch shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


def test_a_parameter_whose_use_is_not_seen_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(Forgetful.apply(self.embed(x), self.embed.weight))

    _, model, optimizer, loader = private(Tied())
    before = weights(model)
    with pytest.raises(
        UnsupportedModuleError, match=r"by something that torch's own|Tied: an operation on its parameters"
    ):
        step(model, optimizer, next(iter(loader)))
    assert torch.equal(before, weights(model))


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scalers_are_refused(unscale: bool) -> None:
    _, model, optimizer, loader = private()
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = next(iter(loader))
    penalty = model[0].weight.square().sum()
    scaler.scale(cross_entropy(model(inputs), targets) + penalty).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(TrainingLoopError, match="GradScaler"):
        scaler.step(optimizer)


# ---- loops that are wrong -----------------------------------------------------


def test_a_step_needs_a_lot() -> None:
    _, model, optimizer, _ = private()
    inputs, targets = data()[:6]
    cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TrainingLoopError, match="without a lot"):
        optimizer.step()


def test_one_release_for_a_lot() -> None:
    engine, model, optimizer, loader = private()
    batch = next(iter(loader))
    step(model, optimizer, batch)
    before = weights(model)
    with pytest.raises(TrainingLoopError, match="released already"):
        step(model, optimizer, batch)
    assert torch.equal(before, weights(model))
    assert sum(dict(engine._open().composition()).values()) == 1


def test_two_backward_passes_are_one_gradient() -> None:
    together, apart = [], []
    for found, split in ((together, False), (apart, True)):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=1), max_grad_norm=0.2)
        inputs, targets = next(iter(loader))
        outputs = model(inputs)
        parts = [cross_entropy(outputs, targets), 0.3 * outputs.square().sum(1).mean()]
        if split:
            for part in parts:
                part.backward(retain_graph=True)
        else:
            sum(parts).backward()
        optimizer.step()
        found.append(released(model))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_accumulating_over_lots_is_refused() -> None:
    _, model, optimizer, loader = private()
    before = weights(model)
    batches = iter(loader)
    inputs, targets = next(batches)
    cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TrainingLoopError, match="not called for it"):
        next(batches)
    assert torch.equal(before, weights(model))
    late = cross_entropy(model(inputs), targets)
    inputs, targets = next(iter(loader))  # a new iteration: the lot before was left, and its gradients are gone
    cross_entropy(model(inputs), targets).backward()
    late.backward()
    with pytest.raises(TrainingLoopError, match="earlier lot or microbatch"):
        optimizer.step()
    assert torch.equal(before, weights(model))


def test_a_lot_that_lost_a_part_is_not_released() -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=2, sampling="fixed")
    before = weights(model)
    batches = iter(loader)
    step(model, optimizer, next(batches))
    next(batches)  # forgotten, or skipped because of what is in it
    for _ in range(3):
        with pytest.raises(TrainingLoopError, match="not called for it"):
            next(batches)
    assert torch.equal(before, weights(model))
    assert dict(engine._open().composition()) == {}
    assert engine.guarantee(1e-5).epsilon is None


def test_a_part_that_fails_takes_its_lot_along() -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=2, sampling="fixed")
    batches = iter(loader)
    step(model, optimizer, next(batches))
    inputs, targets = next(batches)
    for _ in range(2):
        with pytest.raises(PrivacyError):
            step(model, optimizer, (inputs[:1], targets[:1]))  # a loop that drops an example it does not like
    with pytest.raises(TrainingLoopError, match="came where 0 was due"):
        step(model, optimizer, (inputs, targets))  # the part before is gone
    with pytest.raises(TrainingLoopError, match="not called for it"):
        next(batches)
    assert dict(engine._open().composition()) == {}
    assert engine.guarantee(1e-5).epsilon is None


def test_a_batch_that_failed_may_be_run_again() -> None:
    engine, model, optimizer, loader = private(sampling="fixed")
    inputs, targets = next(iter(loader))
    with pytest.raises(PrivacyError):
        step(model, optimizer, (inputs[:1], targets[:1]))
    step(model, optimizer, (inputs, targets))
    assert sum(dict(engine._open().composition()).values()) == 1


def test_breaking_off_inside_a_lot() -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=2, sampling="fixed")
    for batch in loader:
        step(model, optimizer, batch)
        break
    assert dict(engine._open().composition()) == {}
    assert epoch(model, optimizer, loader) == 12
    assert sum(dict(engine._open().composition()).values()) == 4


def test_leaving_every_epoch_after_one_lot() -> None:
    engine, model, optimizer, loader = private()
    for _ in range(3):
        for batch in loader:
            step(model, optimizer, batch)
            break
    assert sum(dict(engine._open().composition()).values()) == 3


# ---- torch.optim as ever -----------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p, lr: torch.optim.Adam(p, lr=lr),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
        lambda p, lr: torch.optim.RMSprop(p, lr=lr),
        lambda p, lr: torch.optim.SGD([{"params": [q], "lr": lr} for q in p]),
    ],
)
def test_any_optimizer_sees_the_private_gradient_only(make: object) -> None:
    _, model, optimizer, loader = private(optimizer=make, engine=PrivacyEngine(seed=3))
    twin = mlp()
    plain = make(twin.parameters(), lr=0.1)
    for batch in loader:
        step(model, optimizer, batch)
        for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        plain.step()
        assert torch.equal(weights(twin), weights(model))


def test_schedulers_closures_and_state() -> None:
    _, model, optimizer, loader = private(optimizer=lambda p, lr: torch.optim.Adam(p, lr=lr))
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for inputs, targets in loader:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**4)
    state = optimizer.state_dict()
    assert state["state"][0]["step"] == 4
    _, _, other, _ = private(optimizer=lambda p, lr: torch.optim.Adam(p, lr=lr))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert other.state[next(iter(other.state))]
    assert "lr" in other.defaults
    assert "Adam" in repr(other.original_optimizer)
    with pytest.raises(ConfigurationError, match="make_private"):
        other.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_gradients_without_zero_grad_add_up_releases_only() -> None:
    _, model, optimizer, loader = private(engine=PrivacyEngine(seed=3), lr=0.0, loss_scale=8.0)
    _, twin, other, more = private(engine=PrivacyEngine(seed=3), lr=0.0, loss_scale=8.0)
    total = 0
    for (inputs, targets), batch in zip(loader, more, strict=True):
        (8 * cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        step(twin, other, batch, lambda *a: 8 * cross_entropy(*a))
        total = total + released(twin)
        torch.testing.assert_close(released(model), total)


def test_evaluation_in_between_changes_nothing() -> None:
    found = []
    for evaluate in (False, True):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=6))
        for batch in loader:
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(data()[:][0])
                model(data()[:][0])  # with a graph, never gone back through
                model.train()
            step(model, optimizer, batch)
        found.append(weights(model))
    assert torch.equal(*found)


def test_sequences_first() -> None:
    class Last(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.inner, self.head = first, nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x if self.first else x.transpose(0, 1)).tanh()
            return self.head(hidden.sum(1 if self.first else 0))

    sequences = torch.utils.data.TensorDataset(torch.randn(24, 5, 3), torch.randint(0, 2, (24,)))
    found = []
    for first in (True, False):
        torch.manual_seed(0)
        settings = {"data_loader": DataLoader(sequences, batch_size=6), "batch_first": first, "max_grad_norm": 0.1}
        _, model, optimizer, loader = private(Last(first), PrivacyEngine(seed=1), **settings)
        epoch(model, optimizer, loader)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
