"""AdaDP: noise and step follow the gradient's shape."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.algorithms.published import as_published, reasons_of
from adadp.algorithms.shaped import from_probes
from adadp.algorithms.update_rule import Normalised
from adadp.clipping import Clipping


@algorithm("adadp")
class AdaDP(Algorithm):
    """Sound: an ellipsoid shaped by probes, then SGD with momentum; the shape is the adaptive rate.

    "example" and "lot" are the paper's Algorithm 1 with E' from raw gradients, clipping each example's gradient or
    the lot's average, and its rule g / sqrt(E[g^2] + eps0).
    """

    readings = ("sound", "example", "lot")

    @property
    def reasons(self) -> tuple[str, ...]:
        return reasons_of(self.reading)

    def clipping(self, task: Task) -> Clipping:
        return from_probes(task, self.settings) if self.sound else as_published(self.reading, self.settings)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.sound:
            return self._sgd(parameters)
        rule = {key: self.settings[key] for key in ("lr", "gamma", "epsilon0")}
        return Normalised(parameters, **rule)
