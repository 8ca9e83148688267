"""AdaL: adaptive learning rate alone, the noise is DPSGD's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.algorithms.update_rule import Normalised
from adadp.clipping import Clipping, Flat


@algorithm("adal")
class AdaL(Algorithm):
    """Flat clipping and the paper's rule g / sqrt(E[g^2] + eps0). It uses no E', so as printed it is sound."""

    def clipping(self, task: Task) -> Clipping:
        return Flat(self.settings["max_grad_norm"])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Normalised(parameters, **{key: self.settings[key] for key in ("lr", "gamma", "epsilon0")})
