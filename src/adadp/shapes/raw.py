"""The source of the paper: the lot's own gradients, not protected."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adadp.gradients.collection import Gradients
from adadp.shapes.shape import Shape, Statistics
from adadp.shapes.source import LotRelease, ModelGradients, Source, accumulate, checked_decay


class Raw(Source):
    """The lot's own gradients, squared and averaged, as the paper computes E'.

    Guarantee:
        None: `reasons` says why.

    """

    looks = True

    reasons = (
        "the shape of the noise (E') is computed from raw gradients: clip bounds and noise scales then depend on "
        "private data that was never privatised, which Theorem 1 does not cover",
    )

    def __init__(self, *, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = checked_decay(decay)
        self._seen: dict[str, Statistics] = {}
        self._expected_lot = 1.0

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().before_lot(shape, parameters, model)
        self._expected_lot = model.expected_lot
        self._seen = {}

    def see(self, shape: Shape, gradients: Gradients) -> None:
        finite, share = gradients.finite(), gradients.scale**2 / self._expected_lot
        found = {name: shape.statistics(form, finite) for name, form in gradients.forms.items()}
        values = [value for statistics in found.values() for value in statistics.values()]
        squared = iter(torch._foreach_mul(values, share) if values else ())
        for name, statistics in found.items():
            accumulate(self._seen.setdefault(name, {}), {key: next(squared) for key in statistics})

    def pool(self, total: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
        kept = {(name, key): value for name, statistics in self._seen.items() for key, value in statistics.items()}
        pooled = total({f"{name}/{key}": value for (name, key), value in kept.items()})
        for (name, key), value in zip(kept, pooled.values(), strict=True):
            self._seen[name][key] = value

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        self._learn(shape, self._seen, self.decay)
