"""The paper's update rule, for gradients that are private already: whatever happens here is post-processing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adadp.errors import ConfigurationError


class Normalised(Optimizer):
    """theta <- theta - lr * g / sqrt(E[g^2] + eps0), with E[g^2] <- (1 - gamma) E[g^2] + gamma g^2 from zero.

    The paper prints an average *after* the division ("1/L sum of delta theta"); taken literally it would divide the
    step by the lot. The average is taken before: `g` is a mean over the lot. There is no correction of the start at
    zero, as printed, so the first steps are up to 1/sqrt(gamma) times longer.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.002, *, gamma: float = 0.1, epsilon0: float = 1e-8) -> None:
        for name, value in (("lr", lr), ("epsilon0", epsilon0)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a finite number above 0, not {value!r}")
        if not 0 < gamma <= 1:
            raise ConfigurationError(f"gamma must be above 0 and at most 1, not {gamma!r}")
        super().__init__(params, {"lr": lr, "gamma": gamma, "epsilon0": epsilon0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """Take one step from the gradients that are set."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean_square"] = torch.zeros_like(parameter)
                mean_square = state["mean_square"]
                mean_square.mul_(1 - group["gamma"]).addcmul_(parameter.grad, parameter.grad, value=group["gamma"])
                parameter.addcdiv_(parameter.grad, (mean_square + group["epsilon0"]).sqrt_(), value=-group["lr"])
        return loss
