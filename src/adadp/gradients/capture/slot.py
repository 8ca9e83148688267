"""Replacing a parameter while modules run, so that each use of it is either seen by a layer or refused."""

from __future__ import annotations

from torch import Tensor, nn


class Slot:
    """The place of one parameter in one module.

    While modules run, the place holds the alias (detached, for the layer that computes the parameter's gradients) or
    the sentinel (a leaf whose gradient shows a use that no layer saw).
    """

    def __init__(self, module: nn.Module, attribute: str, parameter: nn.Parameter, name: str) -> None:
        self.module, self.attribute, self.parameter, self.name = module, attribute, parameter, name
        self._renew()

    def _renew(self) -> None:
        self.alias = self.parameter.detach()
        self.sentinel = self.parameter.detach().requires_grad_(self.parameter.requires_grad)

    @property
    def replaced(self) -> bool:
        """Whether the place holds another tensor than the parameter, its alias and its sentinel."""
        there = self.module._parameters.get(self.attribute)
        return there is not self.parameter and there is not self.alias and there is not self.sentinel

    def guard(self) -> None:
        """Put the sentinel in the parameter's place."""
        if self.alias.data_ptr() != self.parameter.data_ptr() or self.alias.dtype != self.parameter.dtype:
            self._renew()  # the module was moved or cast since
        self.sentinel.requires_grad_(self.parameter.requires_grad)
        self._place(self.sentinel)

    def lend(self) -> None:
        """Put the detached alias in the parameter's place, for the layer that answers for it."""
        self._place(self.alias)

    def restore(self) -> None:
        """Put the parameter back."""
        self._place(self.parameter)

    def _place(self, tensor: Tensor) -> None:
        self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        if isinstance(self.module, nn.RNNBase):  # which computes with a list of its own
            self.module._flat_weights[self.module._flat_weights_names.index(self.attribute)] = tensor
