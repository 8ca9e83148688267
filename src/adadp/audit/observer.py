"""What an auditor who sees every release writes down: how far each points the canary's way.

Everything here is read after the noise was added. Where the clipping is sound its state (bounds, shape, noise)
follows from releases and public values, so the auditor knows it too and can weigh coordinates as the best test would.
Where it was computed from raw gradients (`Raw`), the auditor is kept from looking at it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from adadp.algorithms.search import SearchStep
from adadp.audit.target import Started
from adadp.gradients import Gradients
from adadp.gradients.forms.per_example import Dense
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.sums import NoisedSums, ReleasedGradient
from adadp.shapes import Raw

PER_STEP = 4
"""Numbers that a transcript has for each step: projection before and after post-processing, energy, objectives."""


class Gradient(Protocol):
    """What the auditor knows of the data: the canary's gradient, and that of an other example, at the current lot."""

    def canary(self, lot: int) -> dict[str, Tensor]: ...

    def other(self, lot: int) -> dict[str, Tensor] | None: ...


class Auditor(Observer):
    """Watches one run through the hook that its step offers; `rows` has what was seen of each lot."""

    def __init__(self, started: Started, gradient: Gradient, rate: float, others: int) -> None:
        self._size = started.loader.batch_size  # the expected lot: a public number
        self.rows: list[list[float]] = []
        self._gradient, self._rate, self._others = gradient, rate, others
        self._step = started.optimizer._step
        self._clipping = self._step.clipping
        self._informed = not any(isinstance(part, Raw) for part in self._clipping.objects())
        self._weights: dict[str, Tensor] = {}
        self._offset = self._length = self._projection = 0.0
        self._exponents = [0.0, 0.0]
        self._stepped: Mapping[str, Tensor] = {}  # the gradient that the optimizer goes along, redraws averaged in
        started.optimizer.observe(self)

    # ---- the hook: nothing is looked at before the noise, since an auditor sees what everybody sees ---------------

    def noised(self, release: Unnoised, noisy: NoisedSums) -> None:
        """One release of the lot."""
        if release.kind == "gradient":
            self._weigh(release.lot, noisy, release.stddev)
        elif release.kind == "objectives":
            self._look(release, noisy["objectives"])
        elif release.kind == "redraw":
            self._redraw(release, noisy)

    def stepped(self, lot: int, gradient: ReleasedGradient) -> None:
        """The gradient of the lot, a mean, as the optimizer gets it."""
        self._stepped = gradient
        self._note(gradient)

    # ---- one release ------------------------------------------------------------------------------------------------

    def _bound(self, gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the clipping lets through of one example's gradient, in the state that it is in."""
        forms = {name: Dense(value.unsqueeze(0)) for name, value in gradient.items()}
        return self._clipping.bound(Gradients(forms, 1, keep=torch.ones(1, dtype=torch.bool)))

    def _weigh(self, lot: int, noisy: NoisedSums, stddev: Mapping[str, float | Tensor]) -> None:
        """Fix the linear functional that tells best whether the canary is in, and apply it to the noised sum."""
        canary, other = self._gradient.canary(lot), self._gradient.other(lot)
        if not self._informed:
            length = math.sqrt(sum(float(value.double().square().sum()) for value in canary.values()))
            self._weights, self._length, self._offset = {k: v / length for k, v in canary.items()}, 0.0, 0.0
        else:
            shift = self._bound(canary)
            inverse = {name: _inverse(stddev[name], value) for name, value in shift.items()}
            self._length = math.sqrt(sum(_dot(value * inverse[name], value) for name, value in shift.items()))
            scale = 1 / max(self._length, 1e-30)
            self._weights = {name: value * inverse[name] * scale for name, value in shift.items()}
            self._offset = 0.0
            if other is not None:
                self._offset = self._rate * self._others * self._apply(self._bound(other))
        self._projection = self._apply(noisy) - self._offset

    def _apply(self, release: Mapping[str, Tensor]) -> float:
        return sum(_dot(weight, release[name]) for name, weight in self._weights.items() if name in release)

    def _note(self, released: ReleasedGradient) -> None:
        """The release as the optimizer gets it, a mean over the lot."""
        stepped = self._size * self._apply(released) - self._offset
        squares = sum(float(value.double().square().sum()) for value in released.values())
        energy = math.log(squares * self._size**2 + 1e-300)
        self._exponents = [self._exponent(self._projection), self._exponent(stepped)]
        self.rows.append([self._projection, stepped, energy, 0.0, *self._likelihoods()])

    def _exponent(self, projection: float) -> float:
        """The log likelihood ratio of "in this lot" to "not in it", for noise of unit variance."""
        return self._length * projection - self._length**2 / 2

    def _likelihoods(self) -> list[float]:
        """The log likelihood ratios of the lot, Poisson sampling included."""
        return [_mixture(self._rate, exponent) for exponent in self._exponents]

    # ---- what a line search releases besides ------------------------------------------------------------------------

    def _look(self, release: Unnoised, seen: Tensor) -> None:
        """Noised objectives: a canary's loss goes past the bound, down along its gradient and up against it."""
        canary = self._gradient.canary(release.lot)
        along = sum(_dot(value, self._stepped[name]) for name, value in canary.items())
        way = -1.0 if along > 0 else 1.0
        deviation = float(release.stddev["objectives"])
        self._add(way * float(seen.sum()) / math.sqrt(len(seen)) / deviation, 1 / release.noise_multiplier)

    def _redraw(self, release: Unnoised, noisy: NoisedSums) -> None:
        """The gradient again, with noise of its own."""
        assert isinstance(self._step, SearchStep)
        ratio = self._step.noise_multiplier / release.noise_multiplier  # this draw's precision over the first one's
        growth = self._step.rules.growth
        self._stepped = {
            name: (self._stepped[name] + growth * value / self._size) / (1 + growth) for name, value in noisy.items()
        }
        self._add(ratio * (self._apply(noisy) - self._offset), self._length * ratio)

    def _add(self, projection: float, length: float) -> None:
        """A further independent look at the same lot, of unit variance and this mean."""
        row = self.rows[-1]
        row[3] += projection
        self._exponents = [e + length * projection - length**2 / 2 for e in self._exponents]
        row[PER_STEP:] = self._likelihoods()


def _inverse(stddev: float | Tensor, like: Tensor) -> Tensor:
    variance = torch.as_tensor(stddev, dtype=torch.float64).square().expand(like.shape)
    return torch.where(variance > 0, 1 / variance.clamp_min(1e-300), 0.0)


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())


def _mixture(rate: float, exponent: float) -> float:
    """log(1 - q + q e^exponent)."""
    if rate == 1:
        return exponent
    return float(torch.logaddexp(torch.tensor(math.log1p(-rate)), torch.tensor(math.log(rate) + exponent)))
