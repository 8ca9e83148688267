"""One L2 ball for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from adadp.clipping.base import register
from adadp.clipping.flat import Flat, positive
from adadp.clipping.grouped import Grouped
from adadp.shapes.source import ModelGradients


@register("per_layer")
class PerLayer(Grouped):
    """One L2 ball for each layer, of radius C / sqrt(layers), so that an example's whole gradient stays within C.

    Args:
        max_grad_norm: C; or a radius for each pattern of parameter names.

    Guarantee:
        That of `Grouped`.

    """

    def __init__(self, max_grad_norm: float | Mapping[str, float] = 1.0) -> None:
        if isinstance(max_grad_norm, Mapping):
            super().__init__({pattern: Flat(radius) for pattern, radius in max_grad_norm.items()})
            self._radius: float | None = None
        else:
            self._radius = positive("max_grad_norm", max_grad_norm)
            super().__init__({"": Flat(self._radius)})

    def _group_of(self, name: str) -> str:
        return super()._group_of(name) if self._radius is None else name.rpartition(".")[0]

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        if self._radius is not None:
            layers = {self._group_of(name) for name in parameters}
            if self.groups.keys() != layers:
                self.groups = {layer: Flat(self._radius / math.sqrt(len(layers))) for layer in layers}
        super().begin(parameters, model)
