"""A source that costs nothing: gradients that were released already."""

from __future__ import annotations

from adadp.shapes.shape import Shape, Statistics
from adadp.shapes.source import LotRelease, Source, averaged, checked_decay, checked_interval


class Released(Source):
    """Moments of gradients that were released, minus the expected moments of their noise.

    Args:
        decay: of the moving average over lots.
        every: steps between refreshes of the shape.

    Guarantee:
        Post-processing of released values: there is no further privacy cost.

    """

    def __init__(self, *, decay: float = 0.99, every: int = 1) -> None:
        super().__init__()
        self.decay, self.every = checked_decay(decay), checked_interval(every)

    def steady(self) -> bool:
        return (self.step + 1) % self.every != self.every - 1

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        moments: dict[str, Statistics] = {}
        for name in lot.sums:
            gradient, stddev = lot.mean(name)
            carried = shape.apply(name, gradient, shape.before)
            noise = shape.moments_of_noise(name, gradient, stddev)
            moments[name] = {key: value - noise[key] for key, value in shape.moments_of(carried).items()}
        self._average |= averaged(self._average, moments, self.decay)
        if self.step % self.every == self.every - 1:
            shape.learn_all(self._average)
