"""DPOPT (Xiang and others, 2019): the noise of each coordinate by optimisation, every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.algorithms.allocation import descend
from adadp.algorithms.published import RAW_REASON
from adadp.clipping import Clipping, Local
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes import Probe, Raw
from adadp.shapes.source import ModelGradients

WEIGHTS_REASON = "the noise of each coordinate is optimised for the lot's raw gradient, which it then shows"


class _Optimised(Local):
    """Noise that minimises sum w_i sigma_i^2, w_i = g_i^2, within Lemma 1's constraint for bounds s_i.

    `floor` is added to s_i^2 and w_i, as a part of their mean: a coordinate that looked dead may come to life.
    """

    def __init__(self, max_grad_norm: float, *, source: Probe | Raw, floor: float, **box: float) -> None:
        super().__init__(max_grad_norm, source=source, **box)
        self.floor = floor
        self._gradient: dict[str, Tensor] = {}
        self._sigma: Tensor | None = None

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        least = self.floor * self._flat(self.bounds).square().mean() if self.bounds else 0.0
        self.bounds = {name: (bound.square() + least).sqrt() for name, bound in self.bounds.items()}

    def steady(self, begun: bool = False) -> bool:
        return super().steady()  # the optimisation is an ordinary lot's work

    def _axes(self) -> dict[str, Tensor]:
        """sigma_i for a noise multiplier of 1; equal shares of the constraint while no gradient is known."""
        bounds = self._flat(self.bounds)
        if self._gradient:
            weights = self._flat(self._gradient).square().to(bounds.dtype)
            weights = weights + self.floor * weights.mean() + torch.finfo(weights.dtype).tiny
            self._sigma = descend(bounds, weights, 1.0, start=self._sigma)
        else:
            self._sigma = bounds * math.sqrt(len(bounds))
        parts = torch.split(self._sigma, [bound.numel() for bound in self.bounds.values()])
        return {name: part.view_as(self.bounds[name]) for name, part in zip(self.bounds, parts, strict=True)}

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.bounds])


class PublishedNoise(_Optimised):
    """Every coordinate clamped to s_i, the noise optimised for the lot's raw gradient."""

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*super().reasons, WEIGHTS_REASON)

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        self._gradient = {}

    def _bounded(self, gradients: Gradients) -> BoundedSums:
        sums = super()._bounded(gradients)
        for name, value in sums.items():
            self._gradient[name] = self._gradient.get(name, 0) + value / self.expected_lot
        return sums

    def _gradient_radii(self, scale: float) -> dict[str, float | Tensor]:
        if not self.local:
            return super()._gradient_radii(scale)
        return {name: scale * axis for name, axis in self._axes().items()}


class OptimisedNoise(_Optimised):
    """Clips to the ellipsoid that the noise is made for: |g / sigma| <= C / sigma_*, sigma optimised.

    It contains the box of the s_i at equal noise, so it cuts off less; and it needs norms only, which are far cheaper
    than a clamp of every coordinate of every example. Only the proportions of the s_i come from the source: their
    length is C. Left to itself it would grow with the weights, the noise with it, and with the noise the weights. g is
    a moving average of released gradients.
    """

    decay, every = 0.99, 10  # of the average; between two optimisations, in which it hardly moves
    axes: Mapping[str, Tensor] = MappingProxyType({})

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        if self._keeps_axes() and set(parameters) == set(self.axes):
            self.parameters, self.expected_lot = dict(parameters), model.expected_lot
            self.source.before_lot(self.shape, self.parameters, model)
            return
        super().begin(parameters, model)
        length = self._flat(self.bounds).norm() if self.bounds else torch.ones(())
        self.bounds = {name: bound / length.clamp_min(1e-30) for name, bound in self.bounds.items()}
        self.axes = self._axes() if self.local else {}

    def _keeps_axes(self) -> bool:
        number = self.source.step + 1  # of the lot to come; no gradient is known before the second
        return bool(self.axes) and number > 1 and number % self.every != 0

    def steady(self, begun: bool = False) -> bool:
        return self._keeps_axes() and super().steady()

    def _bounded(self, gradients: Gradients) -> BoundedSums:
        inside = gradients
        if self.axes:
            forms = {name: form.scaled(1 / self.axes[name]) for name, form in gradients.forms.items()}
            inside = gradients.replaced(forms)
        return self._sums(inside, self.weights(inside))

    def _gradient_radii(self, scale: float) -> dict[str, float | Tensor]:
        return dict.fromkeys(self.parameters, scale * self.max_grad_norm)

    def _carried(self, noisy: NoisedSums) -> ReleasedGradient:
        released = ReleasedGradient({k: v * self.axes[k] if self.axes else v for k, v in noisy.items()})
        for name, value in released.items():
            mean = value / self.expected_lot
            self._gradient[name] = torch.lerp(mean, self._gradient.get(name, mean), self.decay)
        return released

    def noise_of_release(self, noise_multiplier: float) -> Stddev:
        ball = super().noise_of_release(noise_multiplier)
        return {name: value * self.axes[name] if self.axes else value for name, value in ball.items()}


@algorithm("dpopt")
class DPOPT(Algorithm):
    """Sound: bounds s_i from probes and weights w_i from released gradients. "published": both from raw gradients."""

    readings = ("sound", "published")

    @property
    def reasons(self) -> tuple[str, ...]:
        return (RAW_REASON, WEIGHTS_REASON) if self.reading == "published" else ()

    def clipping(self, task: Task) -> Clipping:
        settings = self.settings
        if self.reading == "published":
            given = {key: settings[key] for key in ("beta", "threshold", "floor")}
            return PublishedNoise(settings["max_grad_norm"], source=Raw(decay=settings["decay"]), **given)
        source = task.probe(settings["probes"], settings["refresh"])
        return OptimisedNoise(settings["max_grad_norm"], source=source, floor=settings["floor"], threshold=0.0)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
