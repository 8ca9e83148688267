"""The attacks on one process, on two: two worlds in lockstep, and an audit by canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from adadp.testing import influence
from distributed.team import values
from distributed.work import LOT, data, mlp, planted


def trained(dataset: Any, lots: int = 6, noise: float = 1.0, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: nn.Module = DistributedDataParallel(mlp())
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=LOT),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        **settings,
    )
    for _, (inputs, targets, _indices) in zip(range(10 * lots), loader, strict=False):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(private(inputs), targets, reduction="none"))
        optimizer.step()
    return engine


def lockstep(rank: int, size: int, bug: str | None) -> tuple[str, float]:
    with planted(bug):
        found = influence(trained, data(), examples=["large", "ordinary"], among="own", lots=6)
    return found.verdict, found.value


def test_one_example_moves_a_release_of_two_processes_by_at_most_the_bound(tmp_path: Path) -> None:
    for verdict, value in values(2, tmp_path, lockstep, None):
        assert verdict == "within"
        assert 0.5 < value <= 1 + 1e-3


def test_an_example_that_counts_in_both_processes_is_caught(tmp_path: Path) -> None:
    for verdict, value in values(2, tmp_path, lockstep, "the whole lot on every process"):
        assert verdict == "exceeded"
        assert value > 1.5
