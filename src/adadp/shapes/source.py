"""Where a shape's second moments come from, and what they cost.

| source   | made of                                          | cost                                              |
| -------- | ------------------------------------------------ | ------------------------------------------------- |
| Probe    | synthetic inputs through the current weights     | none: no data, and the weights are released       |
| Public   | public data through the current weights          | none                                              |
| Released | gradients that were released already             | none: post-processing                             |
| Paid     | noisy row and column energies of the same lot    | a share of the step's own Gaussian event          |
| Raw      | the lot's gradients as they are (as published)   | no proof covers it: the guarantee is *none*       |

Moments are means over examples of squared gradients, so that they mean the same from every source.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import NoisedSums, Stddev
from adadp.shapes.shape import THIN, Shape, Statistics


class ModelGradients(Protocol):
    """What a source may do with the model between two lots. The private data is not in reach."""

    expected_lot: float

    def gradients_of(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Gradients:
        """Per-example gradients of `loss(model(inputs))`, a sum over examples, at the current weights."""


@dataclass(frozen=True)
class LotRelease:
    """What one lot released.

    `sums` of gradients are in the coordinates of `Shape.apply_before`, with noise of `stddev`; `paid` are low
    statistics, means over the expected lot.
    """

    sums: NoisedSums
    stddev: Stddev
    paid: Mapping[str, Statistics]
    expected_lot: float

    def mean(self, name: str) -> tuple[Tensor, float | Tensor]:
        """The mean gradient of a parameter over the expected lot, and the standard deviation of its noise."""
        return self.sums[name] / self.expected_lot, self.stddev[name] / self.expected_lot


class Source(ABC):  # noqa: B024 - a source may have nothing to say at any of these points
    """Feeds a shape. One object serves one training run; lots are counted in `step`."""

    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    looks = False  # whether `see` squares the gradients that it is shown
    learns_first = False  # whether all that it learns, it learns before a lot

    def __init__(self) -> None:
        self.step = -1
        self._average: dict[str, Statistics] = {}

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        """Called once before each lot."""
        self.step += 1

    def steady(self) -> bool:
        """Whether the next lot asks nothing of this source but what every lot asks."""
        return True

    @property
    def share(self) -> float:
        """The share of this step's 1/sigma^2 that the shape takes from the gradient; 0 where it is free."""
        return 0.0

    def see(self, shape: Shape, gradients: Gradients) -> None:  # noqa: B027 - only Raw looks
        """Called with each microbatch's own gradients."""

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:  # noqa: B027 - Probe and Public learn before it
        """Called with what the lot released, all of it noised."""

    def _learn(self, shape: Shape, found: Mapping[str, Statistics], decay: float) -> None:
        """Average over time, as the paper does: E' <- decay E' + (1 - decay) new, from zero."""
        self._average |= averaged(self._average, found, decay)
        shape.learn_all({name: self._average[name] for name in found})


def averaged(old: Mapping[str, Statistics], new: Mapping[str, Statistics], decay: float) -> dict[str, Statistics]:
    """Of all parameters at once: there may be many, and most of them small."""
    if decay == 0 or not new:
        return dict(new)
    pairs = [
        (old[name][key].to(value.dtype) if name in old else torch.zeros_like(value), value)
        for name, statistics in new.items()
        for key, value in statistics.items()
    ]
    averages = iter(torch._foreach_lerp([before for before, _ in pairs], [value for _, value in pairs], 1 - decay))
    return {name: {key: next(averages) for key in statistics} for name, statistics in new.items()}


def checked_interval(every: int) -> int:
    """Return `every`, a number of steps; raise ConfigurationError unless it is a whole number of at least 1."""
    if not isinstance(every, int) or every < 1:
        raise ConfigurationError(f"every must be a whole number of steps, at least 1, not {every!r}")
    return every


def checked_decay(decay: float) -> float:
    """Return `decay`; raise ConfigurationError unless it is in [0, 1)."""
    if not 0 <= decay < 1:
        raise ConfigurationError(f"decay must be in [0, 1), not {decay!r}")
    return decay


def accumulate(total: Statistics, more: Statistics) -> None:
    """Add `more` to `total`, in place: both are ours alone."""
    for key, value in more.items():
        if key not in total:
            total[key] = value
        elif key.endswith(THIN):
            total[key] = torch.cat([total[key], value])
        else:
            total[key] += value
