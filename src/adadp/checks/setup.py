"""What `make_private` refuses before it changes anything."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from adadp.checks.dataset import problems_of
from adadp.checks.validation import check_module, check_optimizer
from adadp.checks.weights import taken, watching
from adadp.clipping import Clipping, by_name
from adadp.errors import ConfigurationError

#: Clippings, shapes and sources that serve a run already: they keep its state.
_SERVING: weakref.WeakSet[object] = weakref.WeakSet()


def number(name: str, value: float) -> float:
    """`value` as a float, or `ConfigurationError` that names the argument."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a number, not {value!r}") from None


def clipping_of(clipping: str | Clipping, max_grad_norm: float | None) -> Clipping:
    """The clipping that was asked for, by name or as an object that serves no other run."""
    if isinstance(clipping, str):
        return by_name(clipping, 1.0 if max_grad_norm is None else max_grad_norm)
    if not isinstance(clipping, Clipping):
        raise ConfigurationError(f"clipping must be a name or a Clipping, not {type(clipping).__name__}")
    if max_grad_norm is not None:
        raise ConfigurationError("max_grad_norm goes with a clipping's name: a clipping object has its own bound")
    if any(part in _SERVING for part in clipping.objects()):
        raise ConfigurationError(
            "this clipping (or its shape or source) serves another run, whose state it keeps: make a new one"
        )
    return clipping


def note_serving(clipping: Clipping) -> None:
    """From now on the clipping keeps the state of a run."""
    _SERVING.update(clipping.objects())


def check_training(
    module: nn.Module, optimizer: Optimizer, dataset: Any, clipping: Clipping, loss_reduction: str, loss_scale: float
) -> None:
    """Raise where these cannot be trained privately together."""
    if watching(module) is not None:
        raise ConfigurationError("this module is private already; engine.detach(module) makes it an ordinary one")
    shared = taken(module)
    if shared is not None:
        raise ConfigurationError(
            f"{shared} is part of another private model: a backward pass through one would be taken for the "
            "other's. Train them as one module with one loader, or give each its own copy."
        )
    check_module(module)
    check_optimizer(module, optimizer)
    if loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
    if not 0 < loss_scale < float("inf"):
        raise ConfigurationError(f"loss_scale must be a finite number above 0, not {loss_scale!r}")
    twice = problems_of(dataset)
    if twice:
        raise ConfigurationError("; ".join(twice))
    clipping.check(name for name, _ in module.named_parameters())
