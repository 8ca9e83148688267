"""Replacing a parameter while modules run, so that each use of it is seen: by its layer, or operation by operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adadp.gradients.capture.shared import Operations, ParameterOrigin, Shared


class Slot:
    """The place of one parameter in one module.

    While modules run, the place holds the alias (detached, for the layer that computes the parameter's gradients) or,
    of a parameter that is trained, a shared value, which sees every operation on it.
    """

    def __init__(
        self, module: nn.Module, attribute: str, parameter: nn.Parameter, name: str, meetings: Operations
    ) -> None:
        self.module, self.attribute, self.parameter, self.name = module, attribute, parameter, name
        self._meetings = meetings
        self._places: dict[str, Any] = module._parameters
        self._recurrent = module if isinstance(module, nn.RNNBase) else None
        self._renew()

    def _renew(self) -> None:
        self.alias = self.parameter.detach()
        self._shared: Shared | None = None
        self._hidden: Shared | None = None  # the shared value, in passes in which the parameter is trained

    @property
    def there(self) -> Any:
        """What is in the place now."""
        return self._places.get(self.attribute)

    @property
    def replaced(self) -> bool:
        """Whether the place holds another tensor than the parameter, its alias and its shared value."""
        there = self.there
        return there is None or (there is not self.parameter and there is not self.alias and there is not self._shared)

    @property
    def taken(self) -> bool:
        """While modules run: whether something else stands in the place."""
        return self._places.get(self.attribute) is not (self.alias if self._hidden is None else self._hidden)

    def guard(self) -> None:
        """Put the shared value in the parameter's place; a frozen parameter's alias needs no watching."""
        if self.alias.data_ptr() != self.parameter.data_ptr() or self.alias.dtype != self.parameter.dtype:
            self._renew()  # the module was moved or cast since
        if not self.parameter.requires_grad:
            self._hidden = None
            self._place(self.alias)
            return
        if self._shared is None:
            leaf = self.parameter.detach().requires_grad_()
            self._shared = Shared.make(leaf, [ParameterOrigin(leaf, self.name, leaf)], self._meetings)
        self._hidden = self._shared
        self._place(self._shared)

    def hide(self) -> None:
        """Put the shared value back after `lend`."""
        self._place(self.alias if self._hidden is None else self._hidden)

    def lend(self) -> None:
        """Put the detached alias in the parameter's place, for the layer that answers for it."""
        self._place(self.alias)

    def restore(self) -> None:
        """Put the parameter back."""
        self._place(self.parameter)

    def unseen(self) -> bool:
        """Whether a gradient came past the shared value, from an operation that it did not see; it is dropped."""
        if self._shared is None:
            return False
        leaf = self._shared.value
        came, leaf.grad = leaf.grad is not None, None
        return past(self._shared) or came

    def _place(self, tensor: Tensor) -> None:
        self._places[self.attribute] = tensor
        if self._recurrent is not None:  # which computes with a list of its own
            place = self._recurrent._flat_weights_names.index(self.attribute)
            self._recurrent._flat_weights[place] = tensor


def past(shared: Shared) -> bool:
    """Whether a gradient came to a shared value as to an ordinary tensor; it is dropped."""
    with torch._C.DisableTorchFunctionSubclass():
        if shared.grad is None:
            return False
        shared.grad = None
        return True
