"""The hooks on each watched module: what torch calls before and after the module runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.slot import Slot
from adadp.gradients.layers.layer import Layer


class HookTarget(Protocol):
    """What the hooks report to: the capture of one module tree."""

    module: nn.Module  # the root

    @property
    def awake(self) -> bool:
        """Whether calls are to be reported now."""

    def enter(self, part: WatchedPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run with these arguments."""

    def leave(self, part: WatchedPart, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A module returned `output`, or raised and `output` is None. Returns what to use instead, None to keep it."""


class WatchedPart:
    """One watched module with its two hooks. A copy of the module keeps them; there they do nothing.

    Attributes:
        module: the module.
        layer: the layer that answers for it, None for one without.
        slots: of the parameters that the layer answers for.
        calls: which call of it runs in the pass of number `in_pass`, from 0 on.
    """

    def __init__(self, target: HookTarget, module: nn.Module, layer: Layer | None, slots: Sequence[Slot]) -> None:
        self.target, self.module, self.layer, self.slots = target, module, layer, tuple(slots)
        self.calls = self.in_pass = 0
        # Under torch.compile the hooks are left out of the graph. Elsewhere they are called directly, which is cheaper.
        self._enter = torch.compiler.disable(target.enter)  # type: ignore[no-untyped-call]
        self._leave = torch.compiler.disable(target.leave)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> WatchedPart:
        return self

    def __reduce__(self) -> Any:
        return _NoHooks, ()  # a pickled module is an ordinary one

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        if module is self.module and self.target.awake:
            enter = self._enter if _compiling() else self.target.enter
            enter(self, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook."""
        if module is self.module and self.target.awake:
            leave = self._leave if _compiling() else self.target.leave
            return leave(self, args, kwargs, output)
        return None


def copied_from(module: nn.Module) -> nn.Module | None:
    """The watched module that this one is a copy of, according to its hooks, or None."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, WatchedPart) and owner.target.module is not module:
            return owner.target.module
    return None


def _compiling() -> bool:
    """Whether torch.compile traces what runs now, or might: what it gave up on calls functions that it compiles."""
    return torch.compiler.is_dynamo_compiling() or callable(get_eval_frame_callback())


def refuse_tracing() -> None:
    """Raise while a graph of the module is recorded: it would hold the hooks and stand-ins of its training."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or torch.compiler.is_exporting():
        raise UnsupportedModuleError(
            "a graph of a private module would hold the engine's hooks (torch.jit.trace, torch.export, TensorBoard's "
            "add_graph): pass a copy, copy.deepcopy(module), which has none, or call engine.detach(module) first"
        )


class _NoHooks:
    """The hooks of an unpickled module, which do nothing."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Do nothing."""
