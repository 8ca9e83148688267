"""The paper's clipping as its text can be read: E' from raw gradients, of each example or of the lot's average.

Neither is covered by a proof; both are here so that the paper's figures can be rerun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adadp.clipping import Local
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums
from adadp.shapes import Raw, Shape

AVERAGE_REASON = (
    "the lot's average is clipped, not each example's gradient: one example can move a clipped average by up to twice "
    "its bound s_i, while the noise is made for s_i / L"
)
RAW_REASON = Raw.reasons[0]


class SquaredAverage(Raw):
    """E' as a moving average of the lot's squared average gradient, not noised."""

    def see(self, shape: Shape, gradients: Gradients) -> None:
        """Single examples are of no interest here."""

    def take(self, shape: Shape, averages: Mapping[str, Tensor]) -> None:
        """Note the lot's average gradient."""
        self._seen = {name: dict(shape.moments_of(value)) for name, value in averages.items()}


class LotLocal(Local):
    """The lot reading: examples are added up as they are, and the lot's average is clipped to s_i, or to norm C."""

    def __init__(self, max_grad_norm: float = 4.0, *, source: SquaredAverage, **settings: Any) -> None:
        super().__init__(max_grad_norm, source=source, **settings)
        self._averages = source

    @property
    def reasons(self) -> tuple[str, ...]:
        return (AVERAGE_REASON, *super().reasons)

    def _bounded(self, gradients: Gradients) -> BoundedSums:
        return self._sums(gradients, gradients.finite().double())

    def complete(self, sums: BoundedSums) -> BoundedSums:
        averages = {name: value / self.expected_lot for name, value in sums.items()}
        self._averages.take(self.shape, averages)
        if self.local:
            bounded = {name: value.clamp(-self.bounds[name], self.bounds[name]) for name, value in averages.items()}
        else:
            length = torch.stack([value.square().sum() for value in averages.values()]).sum().sqrt()
            factor = (self.max_grad_norm / length.clamp_min(1e-30)).clamp(max=1.0)
            bounded = {name: value * factor for name, value in averages.items()}
        # The step divides by the lot, the noise included: sigma_i / L on the average.
        return BoundedSums({name: value * self.expected_lot for name, value in bounded.items()})
