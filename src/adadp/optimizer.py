"""The optimizer that the user's loop sees: the user's own, fed with private gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.errors import BudgetExhaustedError, ConfigurationError, NoGuaranteeError, TrainingLoopError
from adadp.memory import advising
from adadp.sampling import Microbatch, PrivateLoader
from adadp.step import PrivateStep


class BudgetWarning(UserWarning):
    """The budget is spent: the last step did not run, and the loader gives out nothing more."""


class PrivateOptimizer(Optimizer):
    """Wraps a `torch.optim` optimizer; `step()` releases a private gradient and lets that optimizer use it.

    While a lot is not complete (it came as several microbatches), `step()` only adds up. `param_groups`, `state` and
    learning-rate schedulers are those of the wrapped optimizer, which is at `original_optimizer`.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler reaches `step`, which says why it cannot be used

    def __init__(
        self, optimizer: Optimizer, step: PrivateStep, loader: PrivateLoader, module: nn.Module, expose_raw: bool
    ) -> None:
        self.original_optimizer = optimizer
        self._step, self._loader, self._expose_raw = step, loader, expose_raw
        self._parameters = dict(module.named_parameters())
        self._own: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # the gradients that were set here, as they were set
        for parameter in self._parameters.values():
            parameter.grad = None  # whatever stood here before was not made private
        # Not calling Optimizer.__init__: all of its state is the wrapped optimizer's.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    @property
    def noise_multiplier(self) -> float:
        """Noise over the clipping bound."""
        return self._step.noise_multiplier

    @property
    def expected_batch_size(self) -> float:
        """The denominator of every step: the expected size of a lot, whatever was drawn."""
        return self._step.expected_lot

    @property
    def raw_nonfinite(self) -> int:
        """How many examples' gradients were not finite so far. Not noised: it takes the guarantee away."""
        if not self._expose_raw:
            raise NoGuaranteeError(
                "raw_nonfinite is a count over private examples without noise: make_private(..., expose_raw=True) "
                "shows it, and the guarantee is none from then on"
            )
        return 0 if self._step.nonfinite is None else int(self._step.nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does."""
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's. What was spent is in the ledger, not here."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters that are released are fixed by make_private."""
        raise ConfigurationError("parameters cannot be added after make_private: build the optimizer with all of them")

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """Add the current microbatch; when its lot is complete, release its private gradient and step with it."""
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            self.grad_scale = self.found_inf = None
            raise TrainingLoopError(
                "a GradScaler looks for overflows in gradients that are not private and skips steps because of them. "
                "Use bfloat16 autocast, which needs no scaling, or a fixed make_private(..., loss_scale=) with "
                "(loss * loss_scale).backward()."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        microbatch = self._loader.current
        if microbatch is None:
            raise TrainingLoopError(
                "optimizer.step() without a lot: the batches must come from the data loader that make_private returned"
            )
        try:
            self.release(microbatch)
        except BudgetExhaustedError as spent:
            self.stop(spent)
            return loss
        if microbatch.last:
            self.original_optimizer.step()
        return loss

    def release(self, microbatch: Microbatch) -> None:
        """Add the microbatch whose backward pass has just ended; if it is its lot's last, set private gradients."""
        self._refuse_unseen()
        with advising(microbatch.count):
            self._step.add(microbatch)
        if microbatch.last:
            self._set_gradients()

    def stop(self, spent: BudgetExhaustedError) -> None:
        """The budget allows no further release: the loader gives out nothing more."""
        self._loader.stopped = True
        warnings.warn(f"training ends here, with the model as it is: {spent}", BudgetWarning, stacklevel=3)

    @torch.no_grad()
    def step_with(self, gradients: Mapping[str, Tensor]) -> None:
        """Step with private gradients that were made elsewhere (`adadp.graphs`)."""
        for name, gradient in gradients.items():
            self._set(name, gradient)
        self.original_optimizer.step()
        self._opt_called = True  # what learning-rate schedulers look at

    def _refuse_unseen(self) -> None:
        """A gradient on the weights where no layer was seen to run is one of data that went past the engine."""
        if self._step.capture.recorded:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not self._is_own(name) and bool(parameter.grad.any()):
                raise TrainingLoopError(
                    f"{name} has a gradient, but no backward pass through the private module was seen: "
                    "model.forward(x) goes past the engine where model(x) does not."
                )

    def _is_own(self, name: str) -> bool:
        """Whether what stands in .grad is the private gradient of an earlier step, untouched."""
        reference, version = self._own.get(name, (lambda: None, 0))
        gradient = self._parameters[name].grad
        return gradient is not None and gradient is reference() and gradient._version == version

    def _set_gradients(self) -> None:
        for name, gradient in self._step.release().items():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # frozen since the model ran
                continue
            private = gradient.to(parameter.dtype)
            if parameter.grad is not None:
                # It came from terms of the loss on the weights themselves, which are free of data.
                private = private + parameter.grad / (1.0 if self._is_own(name) else self._step.loss_scale)
            self._set(name, private)

    def _set(self, name: str, private: Tensor) -> None:
        self._parameters[name].grad = private
        self._own[name] = weakref.ref(private), private._version
