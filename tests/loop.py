"""A small task and the loop of an ordinary user, for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader

Private = tuple[PrivacyEngine, nn.Module, PrivateOptimizer, PrivateLoader]
cross_entropy = nn.CrossEntropyLoss()


def data(count: int = 24, features: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, features, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def private(
    model: nn.Module | None = None,
    engine: PrivacyEngine | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    count: int = 24,
    lot: int = 6,
    lr: float = 0.1,
    loader: dict[str, Any] | None = None,
    **settings: Any,
) -> Private:
    model = mlp() if model is None else model
    engine = PrivacyEngine() if engine is None else engine
    settings.setdefault("noise_multiplier", 1.0)
    settings.setdefault("optimizer", optimizer(model.parameters(), lr=lr))
    settings.setdefault("data_loader", DataLoader(data(count), batch_size=lot, **(loader or {})))
    return engine, *engine.make_private(module=model, **settings)


def step(
    model: nn.Module, optimizer: PrivateOptimizer, batch: Any, loss: Callable[..., Tensor] = cross_entropy
) -> None:
    inputs, targets = batch
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()


def epoch(
    model: nn.Module, optimizer: PrivateOptimizer, loader: PrivateLoader, loss: Callable[..., Tensor] = cross_entropy
) -> int:
    batches = 0
    for batch in loader:
        step(model, optimizer, batch, loss)
        batches += 1
    return batches


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def released(model: nn.Module) -> Tensor:
    """What the last step put into .grad."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
