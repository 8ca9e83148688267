"""Lots that a loop gives up after it has worked on them, and settings that it changes meanwhile: said, or refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from loop import epoch, private, step
from torch import nn

from adadp import Automatic, Ellipsoid, Flat, Grouped, Local, PrivacyEngine, Raw
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Neighbours, PoissonGaussian, RenyiBlock, event_from_json, event_to_json
from adadp.accounting.filter import RenyiFilter
from adadp.errors import AccountingError, ConfigurationError, TrainingLoopError


def forward_and_backward(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def test_a_lot_left_between_its_pieces_is_said() -> None:
    engine, model, optimizer, loader = private(sampling="fixed", max_physical_batch_size=2)
    epoch(model, optimizer, loader)
    step(model, optimizer, next(iter(loader)))
    assert not optimizer.stepped
    epoch(model, optimizer, loader)
    assert any("left an iterator" in note for note in engine.guarantee(1e-5).notes)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_lot_left_after_training_on_it_takes_the_number_away_and_a_look_does_not(gradients: bool) -> None:
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    with torch.set_grad_enabled(gradients):
        model(next(iter(loader))[0])
    epoch(model, optimizer, loader)
    found = engine.guarantee(1e-5)
    assert (found.epsilon is None) == gradients
    assert gradients or any("left an iterator" in note for note in found.notes)


def test_an_interruption_by_the_user_is_like_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    forward_and_backward(model, optimizer, next(iter(loader)))
    monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)  # as an interactive session has it then
    epoch(model, optimizer, loader)
    assert engine.guarantee(1e-5).epsilon is not None


def test_an_error_between_adding_and_releasing_is_no_way_to_skip_a_lot() -> None:
    def penalty(module: nn.Module) -> torch.Tensor:
        if fails:
            raise ValueError("now")
        return sum(p.square().sum() for p in module.parameters())  # type: ignore[return-value]

    fails = False
    _, model, optimizer, loader = private(penalty=penalty)
    batches = iter(loader)
    step(model, optimizer, next(batches))
    fails = True
    with pytest.raises(ValueError, match="now"):
        step(model, optimizer, next(batches))
    with pytest.raises(TrainingLoopError, match="was not called for it"):
        next(batches)


@pytest.mark.parametrize("before", [True, False])
def test_freezing_everything_is_no_way_to_skip_a_lot(before: bool) -> None:
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    inputs, targets = next(iter(loader))
    optimizer.zero_grad()
    if before:
        model.requires_grad_(False)
        model(inputs)
    else:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        model.requires_grad_(False)
    with pytest.raises(TrainingLoopError, match="one example decides whether all others count"):
        optimizer.step()
    assert engine.guarantee(1e-5).epsilon is None


def test_freezing_some_while_a_batch_is_out_is_untried() -> None:
    engine, model, optimizer, loader = private()
    model[0].requires_grad_(False)
    epoch(model, optimizer, loader)
    assert not any("froze" in text for text in engine.guarantee(1e-5).untried)
    batch = next(iter(loader))
    model[0].requires_grad_(True)
    step(model, optimizer, batch)
    assert any("froze" in text for text in engine.guarantee(1e-5).untried)


def test_a_run_given_up_after_its_lots_were_seen_is_untried_in_the_next() -> None:
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    next(batches)
    with pytest.raises(TrainingLoopError):
        next(batches)
    engine.detach(model)
    _, model, optimizer, loader = private(model, engine)
    epoch(model, optimizer, loader)
    assert any("an earlier run of this engine handed out lots" in text for text in engine.guarantee(1e-5).untried)


def test_a_model_that_was_refused_and_mended_is_not_held_against_the_next() -> None:
    class Mixing(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs - inputs.mean(0))

    engine, model, optimizer, loader = private(nn.Sequential(Mixing(3, 2)))
    with pytest.raises(Exception, match="mixes"):
        step(model, optimizer, next(iter(loader)))
    engine, model, optimizer, loader = private(engine=engine)
    epoch(model, optimizer, loader)
    assert not any("an earlier run" in text for text in engine.guarantee(1e-5).untried)


def test_what_fails_half_way_leaves_an_ordinary_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        private(model, step_class=fails)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    model(torch.randn(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("bound", [np.float32(0.5), np.float64(0.5), 1])
def test_bounds_are_python_numbers_whenever_they_are_set(bound: Any) -> None:
    clipping = Flat(bound)
    clipping.max_grad_norm = bound
    assert type(clipping.max_grad_norm) is float


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), torch.tensor(1.0), True])
def test_wrong_bounds_are_refused_whenever_they_are_set(bound: Any) -> None:
    for clipping, name in ((Flat(), "max_grad_norm"), (Automatic(), "gamma"), (Local(), "beta")):
        with pytest.raises(ConfigurationError, match=name):
            setattr(clipping, name, bound)


def test_a_bound_changed_between_bounding_and_noise_is_refused() -> None:
    clipping = Grouped({"*": Flat(1.0)})

    def penalty(module: nn.Module) -> torch.Tensor:
        clipping.groups["*"].max_grad_norm = 1e-3
        return 0 * next(module.parameters()).sum()

    _, model, optimizer, loader = private(clipping=clipping, penalty=penalty)
    with pytest.raises(TrainingLoopError, match="changed within a lot"):
        step(model, optimizer, next(iter(loader)))


def test_a_source_that_sees_gradients_without_saying_so_has_no_number() -> None:
    class Silent(Raw):
        reasons = ()

    assert "sees every example's gradient" in Ellipsoid(source=Silent()).reasons[0]
    engine, model, optimizer, loader = private(engine=PrivacyEngine(), clipping=Ellipsoid(source=Silent()))
    epoch(model, optimizer, loader)
    assert engine.guarantee(1e-5).epsilon is None


def test_a_filters_block_is_about_one_relation() -> None:
    block = RenyiFilter.for_releases(PoissonGaussian(1.0, 0.1), 10, 1e-5).event
    assert event_from_json(event_to_json(block)) == block
    assert event_from_json({"kind": "renyi-block", "order": 8.0, "divergence": 0.3}) == RenyiBlock(8.0, 0.3)
    accountant = get_accountant("rdp")
    assert accountant.epsilon([(block, 1)], 1e-5).epsilon > 0
    with pytest.raises(AccountingError, match="add-or-remove-one"):
        accountant.epsilon([(block, 1)], 1e-5, Neighbours.REPLACE_ONE)
