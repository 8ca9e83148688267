"""Loops that used to fail without a word: each is refused, or said, where the user can see it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import LedgerNotice, NoGuaranteeWarning, TrainingLoopError, UnsupportedModuleError


def made(engine: PrivacyEngine, **settings: Any) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    ordinary = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.randn(100, 4), torch.randint(0, 2, (100,))), batch_size=10)
    given = {"module": model, "optimizer": ordinary, "data_loader": data}
    if "target_epsilon" in settings:
        return *engine.make_private_with_epsilon(**given, **settings), ordinary
    return *engine.make_private(**given, **{"noise_multiplier": 1.0, **settings}), ordinary


def step(model: nn.Module, optimizer: Any, loader: Any) -> None:
    inputs, labels = next(iter(loader))
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def test_an_ordinary_optimizer_on_a_private_module() -> None:
    engine = PrivacyEngine()
    model, private, loader, ordinary = made(engine)
    for other in (ordinary, torch.optim.Adam(model.parameters())):
        with pytest.raises(TrainingLoopError, match="an ordinary optimizer on a module that is private"):
            step(model, other, loader)
    step(model, private, loader)
    elsewhere = nn.Linear(4, 2)
    step(elsewhere, torch.optim.SGD(elsewhere.parameters(), 0.1), loader)  # nobody else's optimizer
    engine.detach(model)
    before = model.weight.clone()
    cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 1])).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("settings", [{"sampling": "shuffle"}, {"poisson_sampling": False}])
def test_shuffled_lots_are_said_to_have_no_number(settings: dict[str, Any]) -> None:
    with pytest.warns(NoGuaranteeWarning, match="there will be no epsilon with sampling='shuffle'") as said:
        made(PrivacyEngine(), **settings)
    assert said[0].filename == __file__, "the line that asks for it"


@pytest.mark.parametrize("record", [torch.jit.trace, torch.export.export])
def test_a_graph_of_a_private_module(record: Any) -> None:
    engine = PrivacyEngine()
    model, _, _, _ = made(engine)
    example = (torch.randn(3, 4),)
    with pytest.raises(UnsupportedModuleError, match=r"copy\.deepcopy\(module\).*engine\.detach\(module\)"):
        record(model, example)
    record(copy.deepcopy(model), example)
    engine.detach(model)
    record(model, example)


def test_a_target_on_a_partly_spent_ledger_says_so() -> None:
    engine = PrivacyEngine()
    target = {"target_delta": 1e-4, "steps": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error", LedgerNotice)
        model, optimizer, loader, _ = made(engine, target_epsilon=1.0, **target)
    step(model, optimizer, loader)
    engine.close()
    with pytest.warns(
        LedgerNotice, match=r"holds epsilon 0\.99\d* of the target 1\.5 already.*a first run needs"
    ) as said:
        made(engine, target_epsilon=1.5, **target)
    assert said[0].filename == __file__
