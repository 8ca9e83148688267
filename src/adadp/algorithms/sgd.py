"""Plain SGD, for comparison. It is not private, and says so."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.clipping import Clipping
from adadp.errors import ConfigurationError


@algorithm("sgd")
class SGD(Algorithm):
    """No clipping, no noise, no privacy."""

    private = False

    @property
    def reasons(self) -> tuple[str, ...]:
        return ("sgd trains without noise: its weights may show any example",)

    def clipping(self, task: Task) -> Clipping:
        raise ConfigurationError("sgd bounds nothing, so it has no clipping: dpsgd is the private one")

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
