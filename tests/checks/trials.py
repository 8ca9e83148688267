"""A loop that calls a `Trial` as the engine does: one part of a lot, with its items and its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from adadp.checks import Trial
from adadp.gradients import Capture


@dataclass(frozen=True)
class Part:
    lot: int
    count: int
    indices: Sequence[int] = ()
    batch: Any = None


class Run:
    """A model that is watched and tried, lot by lot."""

    def __init__(self, model: nn.Module, *, batch_first: bool = True, **settings: Any) -> None:
        self.model = model
        self.capture = Capture(model, batch_first=batch_first)
        self.trial = Trial(self.capture, batch_first=batch_first, **settings)
        self.calls = 0
        self.capture.on_first_call = lambda module, args, kwargs, count: self.trial.before_call(
            module, args, kwargs, self.part
        )
        self.capture.after_call = lambda output: self.trial.after_call(output, self.part)

    def out(self, lot: int, count: int, indices: Sequence[int] = (), batch: Any = None) -> Part:
        self.part = Part(lot, count, indices, batch)
        self.capture.work_on(self.part, count)
        return self.part

    def __call__(self, *args: Any, lot: int = 0, count: int | None = None, **kwargs: Any) -> Any:
        self.out(lot, len(args[0]) if count is None else count)
        return self.model(*args, **kwargs)

    def gradients(self, total: Tensor) -> Any:
        total.backward()
        return self.capture.take(self.part.count)


def collated(
    model: nn.Module,
    dataset: Any,
    collate: Callable[..., Any],
    give: Callable[[nn.Module, Any], Any],
    *,
    count: int = 8,
    lot: int = 0,
    **settings: Any,
) -> Trial:
    """Draw the first items, collate them and give the batch to the model."""
    run = Run(model, dataset=dataset, collate=collate, **settings)
    indices = list(range(count))
    batch = collate([dataset[i] for i in indices])
    run.out(lot, count, indices, batch)
    try:
        give(model, batch)
    finally:
        run.capture.detach()
    return run.trial


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


__all__ = ["Part", "Run", "collated", "default_collate", "normal"]
