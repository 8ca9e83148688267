"""Modules whose products are hidden inside one kernel of torch: their `forward` is replaced while they are watched.

The replacement is a class, not an attribute, so that a copy or a pickle of a watched module is an ordinary one.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import nn

from adadp.gradients.layers.layer import Taps
from adadp.gradients.layers.linear import Projection


class Rewritten(Projection):
    """A layer that computes its module's output itself, from tapped products. It answers for modules below as well."""

    atomic: ClassVar[bool] = True

    @abstractmethod
    def run(self, taps: Taps, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns for these arguments."""

    def install(self, module: nn.Module, taps: Taps) -> None:
        module.__dict__["_watched_by"] = (self, taps)
        module.__class__ = _watched(type(module))  # type: ignore[arg-type]

    def uninstall(self, module: nn.Module) -> None:
        if isinstance(module, _Watched):
            module.__class__ = module._ordinary  # type: ignore[assignment]
            del module.__dict__["_watched_by"]


class _Watched(nn.Module):
    """Mixed into the class of a watched module."""

    _ordinary: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The ordinary result, from tapped products where gradients are wanted."""
        layer, taps = self.__dict__["_watched_by"]
        if torch.is_grad_enabled() and taps.watches(self):
            return layer.run(taps, self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        return _blank, (self._ordinary,), {name: kept for name, kept in state.items() if name != "_watched_by"}


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@cache
def _watched(ordinary: type[nn.Module]) -> type[nn.Module]:
    return type(ordinary.__name__, (_Watched, ordinary), {"_ordinary": ordinary, "__module__": ordinary.__module__})
