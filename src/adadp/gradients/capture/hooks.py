"""The two forward hooks of every watched module, which survive copying, pickling and torch.compile."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class HookTarget(Protocol):
    """What the hooks report to: the capture of one module tree."""

    module: nn.Module

    def watches(self, module: nn.Module) -> bool:
        """Whether a call of `module` is to be reported now."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`module` is about to run with these arguments."""

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """`module` returned `output`, or raised and `output` is None. Returns what to use instead, None to keep it."""


class Hooks:
    """The two hooks. A copy of a module keeps them, but is not the module that is watched: they do nothing there."""

    def __init__(self, target: HookTarget) -> None:
        self._target = target
        # Under torch.compile the hooks are left out of the graph. Elsewhere they are called directly, which is cheaper.
        self._enter = torch.compiler.disable(target.enter)  # type: ignore[no-untyped-call]
        self._leave = torch.compiler.disable(target.leave)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Hooks:
        return self

    def __reduce__(self) -> Any:
        return _NoHooks, ()  # a pickled module is an ordinary one

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        if self._target.watches(module):
            enter = self._enter if torch.compiler.is_dynamo_compiling() else self._target.enter
            enter(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook."""
        if self._target.watches(module):
            leave = self._leave if torch.compiler.is_dynamo_compiling() else self._target.leave
            return leave(module, args, kwargs, output)
        return None


def copied_from(module: nn.Module) -> nn.Module | None:
    """The watched module that this one is a copy of, according to its hooks, or None."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Hooks) and owner._target.module is not module:
            return owner._target.module
    return None


class _NoHooks:
    """The hooks of an unpickled module, which do nothing."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Do nothing."""
