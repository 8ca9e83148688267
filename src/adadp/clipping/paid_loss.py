"""Any clipping, and the lot's mean loss beside it: one coordinate more of the same release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from adadp.clipping.adaptive import part
from adadp.clipping.base import Clipping
from adadp.clipping.flat import positive
from adadp.clipping.shaped import STATISTIC
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.paid import split_noise
from adadp.shapes.source import ModelGradients


class PaidLoss(Clipping):
    """Clips as `inner` does, and releases the mean of the losses, each cut to 0..`most`, with the same event.

    Args:
        inner: bounds the gradients.
        most: a loss above it counts as this much; one below 0 as 0. Public.
        share: part of the step's 1/sigma^2 that the mean takes. With 0.01, the gradient gets half a percent more noise,
            and the mean noise of standard deviation 5 sigma `most` / the expected lot.

    Attributes:
        mean: the last lot's, a released number: it may be logged. None before the first.

    Guarantee:
        An example adds to the sum its cut loss less `most` / 2, so `most` / 2 at most in absolute value, and nothing
        where its loss is not a number. The gradient's radii are those of `inner` over sqrt(1 - share) and the loss's is
        (`most` / 2) / sqrt(share): together one example has length at most sqrt((1 - share) + share) = 1, and the lot
        stays one event of noise multiplier sigma. As for gradients, row i of the losses must be a function of example i
        and the weights alone.

    """

    as_made = ("inner",)  # which keeps its own state

    def __init__(self, inner: Clipping, most: float = 10.0, share: float = 0.01) -> None:
        super().__init__()
        self.inner, self.most, self.share = inner, positive("most", most), part("share", share)
        self.mean: Tensor | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.inner.reasons

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.inner.assumptions

    def check(self, names: Iterable[str]) -> None:
        self.inner.check(names)

    def objects(self) -> list[object]:
        return [self, *self.inner.objects()]

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        self.inner.begin(parameters, model)

    @property
    def _loss(self) -> str:
        """The sum's key: a statistic of the first parameter, as other statistics are."""
        return f"{STATISTIC}{next(iter(self.parameters))}/loss"

    def bound(self, gradients: Gradients) -> BoundedSums:
        sums = self.inner.bound(gradients)
        if self.parameters:
            if gradients.losses is None:
                raise ConfigurationError(
                    "a mean loss is released of losses for each example: use optimizer.backward(losses), or a "
                    "TrainingStep whose loss returns [n]. Losses of persons with several rows are not supported"
                )
            half = self.most / 2
            losses = gradients.losses.double()
            counted = gradients.keep.to(losses.device) & ~losses.isnan()
            sums[self._loss] = torch.where(counted, losses.clamp(0.0, self.most) - half, 0.0).sum().float()
        return sums

    def complete(self, sums: BoundedSums) -> BoundedSums:
        loss = {self._loss: sums.pop(self._loss)} if self.parameters else {}
        return BoundedSums({**self.inner.complete(sums), **loss})

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        gradient, loss = split_noise(scale, self.share)
        found = self.inner.radii(gradient)
        if self.parameters:
            found[self._loss] = loss * self.most / 2
        return found

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        if self.parameters:
            # The expected lot, never the realised one: how many were drawn is private.
            self.mean = self.most / 2 + noisy.pop(self._loss) / self.expected_lot
        return self.inner.release(noisy, stddev)
