"""The paper's idea in its readings: noise that follows the shape of the gradient.

In the sound reading the shape comes from probes; in the paper's own it comes from raw gradients (`published`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task
from adadp.algorithms.published import AVERAGE_REASON, RAW_REASON, LotLocal, SquaredAverage
from adadp.clipping import Clipping, Ellipsoid, Local
from adadp.shapes import Kronecker, Raw


class ShapedNoise(Algorithm):
    """Noise with a shape, then SGD with momentum. The shape is "sound", or the paper's by "example" or by "lot"."""

    readings = ("sound", "example", "lot")

    @property
    def reasons(self) -> tuple[str, ...]:
        return {"example": (RAW_REASON,), "lot": (AVERAGE_REASON, RAW_REASON)}.get(self.reading, ())

    def clipping(self, task: Task) -> Clipping:
        settings = self.settings
        if self.sound:  # an ellipsoid whose axes follow the gradients of synthetic inputs: that costs nothing
            shape = Kronecker(settings["before"], settings["after"], damping=settings["damping"], rank=settings["rank"])
            source = task.source or task.probe(settings["probes"], settings["refresh"])
            return Ellipsoid(settings["max_grad_norm"], shape=shape, source=source)
        box = {key: settings[key] for key in ("beta", "threshold")}
        if self.reading == "lot":
            return LotLocal(settings["max_grad_norm"], source=SquaredAverage(decay=settings["decay"]), **box)
        return Local(settings["max_grad_norm"], source=Raw(decay=settings["decay"]), **box)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
