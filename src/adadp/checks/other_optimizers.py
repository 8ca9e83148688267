"""An ordinary optimizer that steps on a private module moves nothing: its gradients are the private optimizer's.

No gradient reaches the parameters of a private module in its own calls. So the step of any other optimizer does nothing
and says nothing, whoever trains on with the optimizer that was given to `make_private`, or with a new one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adadp.distributed.sharded import at_rest
from adadp.errors import TrainingLoopError
from adadp.gradients import Capture

#: Each live capture with the ids of its module's parameters.
_WATCHED: weakref.WeakKeyDictionary[Capture, frozenset[int]] = weakref.WeakKeyDictionary()

_STEPS = threading.local()
_registered: list[Any] = []


def watch(module: nn.Module, capture: Capture) -> None:
    """Have every step of an optimizer refused that could only do nothing to `module`, until `capture` is detached."""
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_refuse))
    _WATCHED[capture] = frozenset(map(id, [*module.parameters(), *at_rest(module).values()]))


@contextmanager
def private_step() -> Iterator[None]:
    """Inside, the wrapped optimizer steps with released gradients."""
    before = getattr(_STEPS, "private", False)
    _STEPS.private = True
    try:
        yield
    finally:
        _STEPS.private = before


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(_STEPS, "private", False):
        return
    for capture, parameters in list(_WATCHED.items()):
        if not capture.attached:
            continue
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in parameters]
        if held and all(p.grad is None for p in held):
            raise TrainingLoopError(
                f"this {type(optimizer).__name__} is an ordinary optimizer on a module that is private: no gradient "
                "reaches its parameters, so the step would change nothing. Step with the optimizer that make_private "
                "returned, or make the module an ordinary one again with engine.detach(module)"
            )
