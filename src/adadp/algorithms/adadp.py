"""AdaDP: noise and step follow the gradient's shape."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import algorithm
from adadp.algorithms.shaped import ShapedNoise
from adadp.algorithms.update_rule import Normalised


@algorithm("adadp")
class AdaDP(ShapedNoise):
    """Sound: an ellipsoid shaped by probes, then SGD with momentum; the shape is the adaptive rate.

    "example" and "lot" are the paper's Algorithm 1 with E' from raw gradients, clipping each example's gradient or
    the lot's average, and its rule g / sqrt(E[g^2] + eps0).
    """

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.sound:
            return super().optimizer(parameters)
        return Normalised(parameters, **{key: self.settings[key] for key in ("lr", "gamma", "epsilon0")})
