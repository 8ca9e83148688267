"""AdaN: adaptive noise alone, the step is SGD's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.algorithms.published import as_published, reasons_of
from adadp.algorithms.shaped import from_probes
from adadp.clipping import Clipping


@algorithm("adan")
class AdaN(Algorithm):
    """Sound: exponents (a, -a), so the release is carried back and only the noise has a shape.

    "example" and "lot" are the paper's clipping and noise with E' from raw gradients, and plain SGD.
    """

    readings = ("sound", "example", "lot")

    @property
    def reasons(self) -> tuple[str, ...]:
        return reasons_of(self.reading)

    def clipping(self, task: Task) -> Clipping:
        return from_probes(task, self.settings) if self.sound else as_published(self.reading, self.settings)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
