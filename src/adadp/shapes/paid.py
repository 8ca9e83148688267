"""A source that releases statistics of the lot, for a share of the step's privacy cost."""

from __future__ import annotations

import math

from adadp.errors import ConfigurationError
from adadp.shapes.shape import Shape
from adadp.shapes.source import LotRelease, Source, checked_decay, checked_interval


class Paid(Source):
    """Noisy squared gradients of the lot itself, released together with the gradient as one Gaussian event.

    Args:
        share: part of the step's 1/sigma^2 that the statistics take, in (0, 1).
        every: steps between such releases.
        decay: of the moving average over releases.

    Guarantee:
        A step costs what it costs without the statistics: 1/sigma^2 = 1/sigma_gradient^2 + 1/sigma_statistics^2.

    """

    def __init__(self, *, share: float = 0.1, every: int = 10, decay: float = 0.9) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ConfigurationError(f"share must be in (0, 1), not {share!r}")
        self._share, self.every, self.decay = share, checked_interval(every), checked_decay(decay)

    def steady(self) -> bool:
        return (self.step + 1) % self.every != 0

    @property
    def share(self) -> float:
        return self._share if self.step % self.every == 0 else 0.0

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        self._learn(shape, lot.paid, self.decay)


def split_noise(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Return noise multipliers of gradient and statistics that together are one event of `noise_multiplier`."""
    return noise_multiplier / math.sqrt(1 - share), noise_multiplier / math.sqrt(share) if share else math.inf
