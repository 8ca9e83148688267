"""`fully_shard` (FSDP2) is refused by name; and what torch does that private steps under it could build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from distributed.team import values
from distributed.work import FEATURES, LOT, data, mlp


def sharded() -> Any:
    """Each layer by itself, and the rest."""
    model: Any = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def refused(rank: int, size: int) -> str:
    model = sharded()
    loader = DataLoader(data(), batch_size=LOT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_it_is_refused_by_name(tmp_path: Path) -> None:
    for said in values(2, tmp_path, refused):
        assert said.startswith("UnsupportedModuleError: the model is sharded by fully_shard (FSDP2)")


# ---- what docs/distributed.md says about it --------------------------------------------------------------------------


def overwritten(rank: int, size: int) -> tuple[bool, tuple[int, ...], str]:
    """Whether a layer still has what was put in its weight's place before the model ran; what is there, then after."""
    model, seen, mark = sharded(), [], torch.zeros(16, FEATURES)
    model.register_forward_pre_hook(lambda module, given: module[0]._parameters.update(weight=mark))
    model[0].register_forward_pre_hook(lambda layer, given: seen.append(layer.weight))
    model(torch.randn(5, FEATURES))
    return seen[0] is mark, tuple(seen[0].shape), type(model[0].weight).__name__


def test_the_gathered_weight_takes_the_place_of_what_the_engine_puts_there(tmp_path: Path) -> None:
    for kept, shape, after in values(2, tmp_path, overwritten):
        assert not kept
        assert shape == (16, FEATURES)  # gathered
        assert after == "DTensor"  # and a shard again


def lent(rank: int, size: int) -> tuple[bool, bool]:
    """Gradients of this process's own examples, from gathered weights that are detached while a layer runs.

    Returns:
        Whether they are right, and whether fully_shard reduced any.

    """
    model, whole = sharded(), mlp()
    found: dict[str, Tensor] = {}

    def lend(layer: Any, given: Any) -> None:
        layer.kept = dict(layer._parameters)
        layer._parameters.update({name: value.detach() for name, value in layer.kept.items()})

    def tap(layer: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
        layer._parameters.update(layer.kept)
        inputs, output = given[0].detach(), output.clone() if output.requires_grad else output.requires_grad_()
        output.register_hook(lambda gradient: found.update({str(id(layer)): gradient.T @ inputs}))
        return output

    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(lend)
        layer.register_forward_hook(tap, prepend=True)
    inputs = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(rank))
    for each in (model, whole):
        each(inputs).square().sum().backward()
    pairs = [(found[str(id(model[place]))], whole[place].weight.grad) for place in (0, 2)]
    right = all(torch.allclose(mine, own, atol=1e-5) for mine, own in pairs)
    return right, any(parameter.grad is not None for parameter in model.parameters())


def test_detached_gathered_weights_give_each_process_its_own_gradients(tmp_path: Path) -> None:
    assert values(2, tmp_path, lent) == [(True, False)] * 2
