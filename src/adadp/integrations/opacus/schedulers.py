"""Schedules of the noise multiplier and of the clipping bound, by Opacus' names.

A schedule's steps are counted from 0, the first of which its constructor makes. Each lot is charged for the noise that
it gets. A schedule must be fixed beforehand: how often the loop steps it, and what a function of the step's number
returns, must not follow losses, releases or anything else of the data. The engine cannot see that, and every guarantee
says so (`guarantee.untried`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from adadp.errors import ConfigurationError
from adadp.integrations.opacus.optimizer import DPOptimizer

_PLANNED = (
    "the noise multiplier follows a scheduler that the loop steps: that its course was fixed beforehand, and follows "
    "neither losses nor releases, cannot be seen"
)


class _Scheduler(ABC):
    """Counts steps and sets one value of the optimizer."""

    def __init__(self, optimizer: DPOptimizer, *, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, DPOptimizer):
            raise ConfigurationError(
                f"{type(self).__name__} needs the optimizer that make_private of adadp.integrations.opacus returned, "
                f"not {type(optimizer).__name__}"
            )
        self.optimizer, self.last_epoch = optimizer, last_epoch
        self.base = self._value()
        self.step()

    @abstractmethod
    def _value(self) -> float:
        """The value now."""

    @abstractmethod
    def _set(self, value: float) -> None:
        """Use it from the next lot on."""

    @abstractmethod
    def _next(self) -> float:
        """The value for step `last_epoch`."""

    def step(self) -> None:
        """Go one step on. Call it between lots: once an epoch, or where `optimizer.stepped` is True."""
        self.last_epoch += 1
        try:
            self._set(self._next())
        except BaseException:
            self.last_epoch -= 1
            raise

    def state_dict(self) -> dict[str, Any]:
        """The step's number and the value, without optimizer and functions."""
        kept = {key: value for key, value in vars(self).items() if key != "optimizer" and not callable(value)}
        return {**kept, "value": self._value()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the value that was saved."""
        state = dict(state_dict)
        value = state.pop("value", None)
        vars(self).update(state)
        if value is not None:
            self._set(float(value))


class _Noise(_Scheduler):
    """Of the noise multiplier."""

    def __init__(self, optimizer: DPOptimizer, *, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch=last_epoch)
        optimizer._run.note(untried=[_PLANNED])

    def _value(self) -> float:
        return self.optimizer.noise_multiplier

    def _set(self, value: float) -> None:
        self.optimizer.schedule_noise(value)


class _GradClip(_Scheduler):
    """Of the clipping bound."""

    def _value(self) -> float:
        bound = self.optimizer.max_grad_norm
        if not isinstance(bound, float):
            raise ConfigurationError("bounds of layers have no schedule: use clipping='flat' or 'automatic'")
        return bound

    def _set(self, value: float) -> None:
        self.optimizer.schedule_bound(value)


class _Exponential(_Scheduler):
    def __init__(self, optimizer: DPOptimizer, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        return self._value() * (self.gamma if self.last_epoch > 0 else 1.0)


class _Step(_Scheduler):
    def __init__(self, optimizer: DPOptimizer, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return self._value() * (self.gamma if due else 1.0)


class ExponentialNoise(_Exponential, _Noise):
    """Multiplies the noise multiplier by `gamma` at each step."""


class StepNoise(_Step, _Noise):
    """Multiplies the noise multiplier by `gamma` at every `step_size`-th step."""


class LambdaNoise(_Noise):
    """The first noise multiplier times `noise_lambda(number of the step)`."""

    def __init__(self, optimizer: DPOptimizer, *, noise_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        self.noise_lambda = noise_lambda
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        return self.base * float(self.noise_lambda(self.last_epoch))


class ExponentialGradClip(_Exponential, _GradClip):
    """Multiplies the clipping bound by `gamma` at each step."""


class StepGradClip(_Step, _GradClip):
    """Multiplies the clipping bound by `gamma` at every `step_size`-th step."""


class LambdaGradClip(_GradClip):
    """The first clipping bound times `scheduler_function(number of the step)`."""

    def __init__(
        self, optimizer: DPOptimizer, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.scheduler_function = scheduler_function
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        return self.base * float(self.scheduler_function(self.last_epoch))
