"""The paper's idea in its readings: noise that follows the shape of the gradient.

In the sound reading the shape comes from probes; in the paper's own it comes from raw gradients (`published`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task
from adadp.algorithms.published import as_published, reasons_of
from adadp.clipping import Clipping, Ellipsoid
from adadp.shapes import Kronecker


def from_probes(task: Task, settings: Mapping[str, Any]) -> Clipping:
    """An ellipsoid whose axes follow the gradients of synthetic inputs: no data is touched, so it costs nothing."""
    shape = Kronecker(settings["before"], settings["after"], damping=settings["damping"], rank=settings["rank"])
    return Ellipsoid(settings["max_grad_norm"], shape=shape, source=task.probe(settings["probes"], settings["refresh"]))


class ShapedNoise(Algorithm):
    """Noise with a shape, then SGD with momentum. The shape is "sound", or the paper's by "example" or by "lot"."""

    readings = ("sound", "example", "lot")

    @property
    def reasons(self) -> tuple[str, ...]:
        return reasons_of(self.reading)

    def clipping(self, task: Task) -> Clipping:
        return from_probes(task, self.settings) if self.sound else as_published(self.reading, self.settings)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
