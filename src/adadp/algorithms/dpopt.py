"""DPOPT (Xiang and others, 2019): the noise of each coordinate by optimisation, every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.algorithms.algorithm import Algorithm, Task, algorithm
from adadp.algorithms.allocation import descend
from adadp.algorithms.published import RAW_REASON
from adadp.clipping import Clipping, Local, Release
from adadp.gradients.collection import Gradients
from adadp.sources import ModelGradients, Raw, Source

WEIGHTS_REASON = "the noise of each coordinate is optimised for the lot's raw gradient, which it then shows"


class Optimised(Local):
    """A box of bounds s_i whose noise minimises sum w_i sigma_i^2 within Lemma 1's constraint, w_i = g_i^2.

    g is the lot's raw mean gradient with `raw`, else a moving average of released ones. `floor` is added to s_i^2 and
    w_i, as a part of their mean: a coordinate that looked dead may come to life.
    """

    def __init__(
        self, max_grad_norm: float, *, source: Source, beta: float, threshold: float, floor: float, raw: bool
    ) -> None:
        super().__init__(max_grad_norm, source=source, beta=beta, threshold=threshold)
        self.floor, self.raw = floor, raw
        self._gradient: dict[str, Tensor] = {}
        self._sigma: Tensor | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*super().reasons, *((WEIGHTS_REASON,) if self.raw else ()))

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        flat = self._flat(self.bounds)
        least = self.floor * flat.square().mean()
        self.bounds = {name: (bound.square() + least).sqrt() for name, bound in self.bounds.items()}
        if self.raw:
            self._gradient = {}

    def _bounded(self, gradients: Gradients) -> Release:
        sums = super()._bounded(gradients)
        if self.raw:
            for name, value in sums.items():
                self._gradient[name] = self._gradient.get(name, 0) + value / self.expected_lot
        return sums

    def _gradient_stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        if not self.local or not self._gradient:
            return super()._gradient_stddev(noise_multiplier)
        weights = self._flat(self._gradient).square()
        weights = weights + self.floor * weights.mean() + torch.finfo(weights.dtype).tiny
        self._sigma = descend(self._flat(self.bounds), weights, noise_multiplier, start=self._sigma)
        parts = torch.split(self._sigma, [bound.numel() for bound in self.bounds.values()])
        return {name: part.view_as(self.bounds[name]) for name, part in zip(self.bounds, parts, strict=True)}

    def release(self, noisy: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        released = super().release(noisy, stddev)
        if not self.raw:
            for name, value in released.items():
                mean = value / self.expected_lot
                self._gradient[name] = torch.lerp(self._gradient.get(name, mean), mean, 0.01)
        return released

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.bounds])


@algorithm("dpopt")
class DPOPT(Algorithm):
    """Sound: bounds s_i from probes and weights w_i from released gradients. "published": both from raw gradients."""

    readings = ("sound", "published")

    @property
    def reasons(self) -> tuple[str, ...]:
        return (RAW_REASON, WEIGHTS_REASON) if self.reading == "published" else ()

    def clipping(self, task: Task) -> Clipping:
        published = self.reading == "published"
        source: Source
        if published:
            source = Raw(decay=self.settings["decay"])
        else:
            source = task.probe(self.settings["probes"], self.settings["refresh"])
        given = {key: self.settings[key] for key in ("beta", "threshold", "floor")}
        return Optimised(self.settings["max_grad_norm"], source=source, raw=published, **given)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._sgd(parameters)
