"""Learning rates over time, by name. They depend on the number of the step alone, so they cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adadp.errors import ConfigurationError

#: From (step, steps, steps of an epoch) to the factor on the initial learning rate.
Factor = Callable[[int, int, float], float]

LINEAR_END, LINEAR_EPOCHS = 0.52, 10
"""The paper's linear schedule for DPSGD: from 0.1 to 0.052 over 10 epochs, then constant."""

EXPONENTIAL_END = 0.52
"""Where the exponential schedule ends, over the initial rate. The paper gives no figure; this is the linear one's."""


def _constant(step: int, steps: int, epoch: float) -> float:
    return 1.0


def _linear(step: int, steps: int, epoch: float) -> float:
    return 1.0 - (1.0 - LINEAR_END) * min(1.0, step / (LINEAR_EPOCHS * epoch))


def _exponential(step: int, steps: int, epoch: float) -> float:
    return float(EXPONENTIAL_END ** (step / steps))


def _cosine(step: int, steps: int, epoch: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))


SCHEDULES: dict[str, Factor] = {
    "constant": _constant,
    "linear": _linear,
    "exponential": _exponential,
    "cosine": _cosine,
}


def schedule(name: str, optimizer: Optimizer, steps: int, steps_per_epoch: float) -> LambdaLR:
    """A scheduler for `optimizer`, to be stepped once after each of `steps` steps."""
    if name not in SCHEDULES:
        raise ConfigurationError(f"schedule must be one of {', '.join(SCHEDULES)}, not {name!r}")
    if steps < 1 or not steps_per_epoch > 0:
        raise ConfigurationError(f"a schedule needs at least one step, not {steps} of {steps_per_epoch} an epoch")
    factor = SCHEDULES[name]
    return LambdaLR(optimizer, lambda step: factor(step, steps, steps_per_epoch))
