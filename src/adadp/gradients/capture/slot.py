"""Where a parameter hangs in a module, and what stands in for it while modules run."""

from __future__ import annotations

from torch import Tensor, nn


class Slot:
    """Where one parameter hangs in one module, and what stands in for it while modules run."""

    def __init__(self, module: nn.Module, attribute: str, parameter: nn.Parameter, name: str) -> None:
        self.module, self.attribute, self.parameter, self.name = module, attribute, parameter, name
        self._renew()

    def _renew(self) -> None:
        self.alias = self.parameter.detach()
        self.sentinel = self.parameter.detach().requires_grad_(self.parameter.requires_grad)

    @property
    def replaced(self) -> bool:
        """Whether something else hangs there than the parameter that is watched, or what stands in for it."""
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
