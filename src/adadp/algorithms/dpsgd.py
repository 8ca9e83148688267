"""DPSGD (Abadi and others, 2016)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.clipping import Clipping, Flat


@algorithm("dpsgd")
class DPSGD(Algorithm):
    """One L2 bound for an example's whole gradient, isotropic noise, SGD."""

    def clipping(self, task: Task) -> Clipping:
        return Flat(self.settings["max_grad_norm"])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
