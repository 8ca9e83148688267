"""A source for models whose inputs' second moments are known before training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.shapes.diagonal import Diagonal
from adadp.shapes.shape import Shape, Statistics
from adadp.shapes.source import ModelGradients, Source


class Known(Source):
    """Second moments of a linear layer's inputs, for its weight's columns; rows and biases keep their scale.

    Args:
        moments: of each input coordinate, [d], none below 0. Parameters of another width keep their scale.

    Guarantee:
        No private data is used: the moments are public, or were released and charged before.

    """

    learns_first = True
    as_made = ("moments",)
    assumptions = ("the second moments that shape the noise are public, or were charged when they were released",)

    def __init__(self, moments: Tensor) -> None:
        super().__init__()
        if moments.ndim != 1 or not bool((moments >= 0).all()) or not bool(moments.isfinite().all()):
            raise ConfigurationError("moments must be finite numbers of at least 0, one for each input coordinate")
        self.moments = moments

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().before_lot(shape, parameters, model)
        if self.step:
            return
        fitting = {
            name: value for name, value in parameters.items() if value.ndim == 2 and value.shape[1] == len(self.moments)
        }
        self._learn(shape, {name: self._of(shape, value) for name, value in fitting.items()}, 0.0)

    def _of(self, shape: Shape, weight: Tensor) -> Statistics:
        columns = self.moments.to(weight)
        if isinstance(shape, Diagonal):
            return {"square": columns.expand_as(weight).clone()}
        return {"rows": torch.ones_like(weight[:, 0]), "columns": columns}
