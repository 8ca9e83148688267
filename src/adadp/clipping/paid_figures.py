"""Any clipping, and means of figures over the lot beside it (loss, accuracy): coordinates of the same release."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from adadp.clipping.adaptive import part
from adadp.clipping.base import Clipping
from adadp.clipping.shaped import STATISTIC
from adadp.errors import ConfigurationError
from adadp.gradients.collection import LOSS, Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.paid import split_noise
from adadp.shapes.source import ModelGradients

Figures = tuple[tuple[str, float, float], ...]


class PaidFigures(Clipping):
    """Clips as `inner` does, and releases means of figures over the lot with the same event.

        clipping = PaidFigures(Flat(1.0), {"loss": (0, 8), "accuracy": (0, 1)})
        ...
        optimizer.backward(losses, figures={"accuracy": scores.argmax(1) == labels})
        optimizer.step()
        clipping.means  # {"loss": ..., "accuracy": ...}

    Args:
        inner: bounds the gradients.
        figures: for each figure (low, high), public: what is below counts as low, what is above as high. "loss" is what
            `optimizer.backward` differentiates; all others are given to it by name.
        share: part of the step's 1/sigma^2 that the figures take together. With 0.01, the gradient gets half a percent
            more noise, and the mean of one of k figures noise of standard deviation 5 sqrt(k) sigma (high - low) / the
            expected lot.

    Attributes:
        figures: (name, low, high) of each.
        means: the last lot's, released numbers: they may be logged. Empty before the first.

    Raises:
        ConfigurationError: no figure is named, one has no finite low < high, or `inner` is another PaidFigures; while
            training: a figure was not given.

    Guarantee:
        An example adds to each figure's sum its cut value less the middle, in units of half the width: 1 at most in
        absolute value, and nothing where the value is not a number. Over all k figures that has length sqrt(k) at most.
        The gradient's radii are those of `inner` over sqrt(1 - share) and each figure's is sqrt(k / share): together
        one example has length at most sqrt((1 - share) + share) = 1, and the lot stays one event of noise multiplier
        sigma. As for losses, row i of a figure must be a function of example i and the weights alone; figures other
        than the loss are not tried, so that the guarantee states this as an assumption.

    """

    as_made = ("inner",)  # which keeps its own state

    def __init__(self, inner: Clipping, figures: Mapping[str, tuple[float, float]], share: float = 0.01) -> None:
        super().__init__()
        if not isinstance(figures, Mapping) or not figures:
            raise ConfigurationError(f'figures are bounds by name, as {{"loss": (0, 8)}}, not {figures!r}')
        if isinstance(inner, PaidFigures):
            raise ConfigurationError("PaidFigures inside PaidFigures: name all figures in one")
        self.inner, self.share = inner, part("share", share)
        self.figures: Figures = tuple((name, *_bounds(name, each)) for name, each in figures.items())
        self._means: Tensor | None = None

    @property
    def means(self) -> dict[str, Tensor]:
        if self._means is None:
            return {}
        return {name: mean for (name, _, _), mean in zip(self.figures, self._means, strict=True)}

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.inner.reasons

    @property
    def assumptions(self) -> tuple[str, ...]:
        given = [name for name, _, _ in self.figures if name != LOSS]
        if not given:
            return self.inner.assumptions
        return (
            *self.inner.assumptions,
            f"row i of the released figures ({', '.join(given)}) is a function of example i and the weights alone",
        )

    def check(self, names: Iterable[str]) -> None:
        self.inner.check(names)

    def objects(self) -> list[object]:
        return [self, *self.inner.objects()]

    def norm_bound(self) -> float | Tensor:
        return self.inner.norm_bound()

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        self.inner.begin(parameters, model)

    @property
    def _key(self) -> str:
        """The key of the figures' sums, [k]: a statistic of the first parameter, as other statistics are."""
        return f"{STATISTIC}{next(iter(self.parameters))}/figures"

    def bound(self, gradients: Gradients) -> BoundedSums:
        sums = self.inner.bound(gradients)
        if self.parameters:
            self._refuse_missing(gradients.figures)
            sums[self._key] = torch.stack([
                _in_half_widths(gradients.figures[name].to(gradients.keep.device), low, high, gradients.keep)
                for name, low, high in self.figures
            ])  # fmt: skip
        return sums

    def _refuse_missing(self, given: Mapping[str, Tensor]) -> None:
        missing = [name for name, _, _ in self.figures if name not in given]
        if LOSS in missing:
            raise ConfigurationError(
                "means are released of losses for each example: use optimizer.backward(losses), or a loss function "
                "that returns [n]. Contributions of several rows (unit=, augmentations=) are not supported"
            )
        if missing:
            names = ", ".join(f'"{name}": [n]' for name in missing)
            raise ConfigurationError(
                f"no {missing[0]} was given, which is to be released: optimizer.backward(losses, figures={{{names}}}), "
                "or return (losses, figures) from a TrainingStep's loss. Contributions of several rows (unit=, "
                "augmentations=) are not supported"
            )

    def complete(self, sums: BoundedSums) -> BoundedSums:
        figures = {self._key: sums.pop(self._key)} if self.parameters else {}
        return BoundedSums({**self.inner.complete(sums), **figures})

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        gradient, figures = split_noise(scale, self.share)
        found = self.inner.radii(gradient)
        if self.parameters:
            found[self._key] = figures * math.sqrt(len(self.figures))
        return found

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        if self.parameters:
            # The expected lot, never the realised one: how many were drawn is private.
            means = noisy.pop(self._key) / self.expected_lot
            self._means = torch.stack([
                (low + high) / 2 + mean * ((high - low) / 2)
                for (_, low, high), mean in zip(self.figures, means, strict=True)
            ])  # fmt: skip
        return self.inner.release(noisy, stddev)

    def noise_of_release(self, noise_multiplier: float) -> Stddev:
        return self.inner.noise_of_release(split_noise(noise_multiplier, self.share)[0])

    def noise_of_gradient(self, noise_multiplier: float) -> Stddev:
        return self.inner.noise_of_gradient(split_noise(noise_multiplier, self.share)[0])


def _bounds(name: str, given: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (isinstance(name, str) and math.isfinite(abs(low) + abs(high)) and (high - low) / 2 > 0):
        raise ConfigurationError(
            f"a figure has a name and finite bounds (low, high), low < high, not {name!r}: {given!r}"
        )
    return low, high


def _in_half_widths(values: Tensor, low: float, high: float, keep: Tensor) -> Tensor:
    """The sum over the examples of the cut values less the middle, each between -1 and 1, in float64.

    In float32 a sum over a large lot would be rounded by more than the bound leaves room for.
    """
    values = values.double()
    scaled = (values.clamp(low, high) - (low + high) / 2) / ((high - low) / 2)
    # Again, since the middle of bounds that are far from zero and close together is rounded.
    return torch.where(keep & ~values.isnan(), scaled.clamp(-1.0, 1.0), 0.0).sum()
