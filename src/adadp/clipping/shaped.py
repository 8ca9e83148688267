"""What clippings with a shape have in common: the shape is fed by a source, which may release statistics of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from adadp.clipping.flat import Flat
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.paid import split_noise
from adadp.shapes.shape import Shape, Statistics
from adadp.shapes.source import LotRelease, ModelGradients, Source

STATISTIC = "shape/"  # keys of statistics are "shape/<parameter>/<statistic>"


class Shaped(Flat):
    """A clipping whose bound or basis follows a shape.

    Guarantee:
        That of `Clipping`. Where the source releases statistics with the gradient (`Paid`), they are the statistics of
        gradients clipped to norm 1, of L2 norm at most s = `shape.low_sensitivity`, and are released with a share p of
        the step's privacy cost: the gradient's radii are divided by sqrt(1 - p), and the statistics' are s / sqrt(p),
        so that together one example has length at most sqrt((1 - p) + p) = 1.

    """

    def __init__(self, max_grad_norm: float, shape: Shape, source: Source) -> None:
        super().__init__(max_grad_norm)
        self.shape, self.source = shape, source

    @property
    def reasons(self) -> tuple[str, ...]:
        source = self.source
        if source.reasons or type(source).see is Source.see:
            return source.reasons
        return (f"{type(source).__name__} sees every example's gradient, and does not say what that costs",)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.source.assumptions

    def objects(self) -> list[object]:
        return [self, self.shape, self.source]

    def steady(self, begun: bool = False) -> bool:
        return self.source.steady() or (begun and self.source.learns_first)

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        self.source.before_lot(self.shape, self.parameters, model)

    def bound(self, gradients: Gradients) -> BoundedSums:
        sums = self._bounded(gradients)
        if self.source.share:
            sums.update(self._statistics(gradients))
        self.source.see(self.shape, gradients)
        return sums

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        gradient, statistics = split_noise(scale, self.source.share)
        found = self._gradient_radii(gradient)
        if self.source.share:
            for name, parameter in self.parameters.items():
                for key in self.shape.low_statistics_like(parameter):
                    found[f"{STATISTIC}{name}/{key}"] = statistics * self.shape.low_sensitivity
        return found

    @abstractmethod
    def _bounded(self, gradients: Gradients) -> BoundedSums:
        """Sum the bounded gradients."""

    def _gradient_radii(self, scale: float) -> dict[str, float | Tensor]:
        """`radii` of the gradients' part alone."""
        return super().radii(scale)

    def _statistics(self, gradients: Gradients) -> BoundedSums:
        """Statistics of gradients clipped to norm 1: those of one example have L2 norm at most `low_sensitivity`."""
        weights = self.weights(gradients) * gradients.scale / self.max_grad_norm
        weights = torch.where(weights >= self._least_factor(), weights, torch.zeros_like(weights))
        found = BoundedSums()
        for name, parameter in self.parameters.items():
            if name in gradients:
                statistics = self.shape.low_statistics(gradients.forms[name], weights)
            else:
                statistics = self.shape.low_statistics_like(parameter)
            found.update({f"{STATISTIC}{name}/{key}": value for key, value in statistics.items()})
        return found

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        paid: dict[str, Statistics] = {}
        for key in [key for key in noisy if key.startswith(STATISTIC)]:
            name, _, statistic = key.removeprefix(STATISTIC).rpartition("/")
            value = noisy.pop(key) * self.max_grad_norm**2 / self.expected_lot
            paid.setdefault(name, {})[statistic] = value
        released = self._carried(noisy)
        self.source.after_lot(self.shape, LotRelease(noisy, stddev, paid, self.expected_lot))
        return released

    def _carried(self, noisy: NoisedSums) -> ReleasedGradient:
        """The noised gradients in the coordinates that the optimizer takes."""
        return ReleasedGradient(noisy)


def parameter_of(key: str) -> str:
    """The parameter that an entry of the sums belongs to."""
    return key.removeprefix(STATISTIC).rpartition("/")[0] if key.startswith(STATISTIC) else key
