"""Models under `fully_shard`, and a user's loop over one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from distributed.work import FEATURES, LOT, cross_entropy, data, full


def layers() -> nn.Module:
    """Parameters of 7 rows, which two processes cannot share evenly, and of 1, which leave one process nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 2))


def sharded(made: Callable[[], nn.Module] = layers, *, each_layer: bool = True) -> Any:
    """Each linear layer by itself, and the rest; whole where there is no process group."""
    model: Any = made()
    if dist.is_initialized():
        for part in reversed(list(model.modules())):
            if type(part) is nn.Linear and each_layer:
                fully_shard(part)
        fully_shard(model)
    return model


class Loop:
    """A model that was made private, and a loop that does something of its own in the middle of a lot or after it."""

    def __init__(self, model: Any = None, **settings: Any) -> None:
        self.model = sharded() if model is None else model
        self.engine = PrivacyEngine(**{"seed": 5, **settings.pop("engine", {})})
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=settings.pop("optimizer", torch.optim.SGD)(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=LOT),
            **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **settings},
        )

    def run(
        self,
        middle: Callable[[], Any] = lambda: None,
        after: Callable[[], Any] = lambda: None,
        before: Callable[[], Any] = lambda: None,
        lots: int = 3,
    ) -> Loop:
        for number, (inputs, targets, _) in enumerate(self.loader):
            self.optimizer.zero_grad()
            before()
            self.optimizer.backward(cross_entropy(self.model, inputs, targets))
            middle()
            self.optimizer.step()
            after()
            if number == lots - 1:
                break
        return self

    @property
    def weights(self) -> Tensor:
        held = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return torch.cat([full(weight.detach()).flatten() for weight in held])


def said(work: Callable[[], Any]) -> str:
    try:
        return f"nothing was raised: {work()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


INPUTS = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(0))
