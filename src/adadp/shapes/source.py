"""What every source does: it gives a shape its second moments, at a known privacy cost.

| source   | made of                                          | cost                                              |
| -------- | ------------------------------------------------ | ------------------------------------------------- |
| Probe    | synthetic inputs through the current weights     | none: no data, and the weights are released       |
| Public   | public data through the current weights          | none                                              |
| Known    | a layer's inputs, public or charged before       | none                                              |
| Released | gradients that were released already             | none: post-processing                             |
| Paid     | noisy row and column energies of the same lot    | a share of the step's own Gaussian event          |
| Raw      | the lot's gradients as they are (as published)   | no proof covers it: the guarantee is *none*       |

All sources give means over examples of squared gradients, so that their moments can be compared.
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
    """What a source may do with the model between two lots. Private data is not available to it."""

    expected_lot: float

    def gradients_of(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Gradients:
        """Per-example gradients of `loss(model(inputs))`, a sum over examples, at the current weights."""


@dataclass(frozen=True)
class LotRelease:
    """What one lot released: noised values only.

    `sums` are the gradients' in the coordinates of `Shape.apply_before`, with noise of `stddev`; `paid` are
    `Shape.low_statistics`, divided by the expected lot size.
    """

    sums: NoisedSums
    stddev: Stddev
    paid: Mapping[str, Statistics]
    expected_lot: float

    def mean(self, name: str) -> tuple[Tensor, float | Tensor]:
        """Return a parameter's gradient divided by the expected lot size, and the standard deviation of its noise."""
        return self.sums[name] / self.expected_lot, self.stddev[name] / self.expected_lot


class Source(ABC):  # noqa: B024 - a source may have nothing to say at any of these points
    """Gives a shape its second moments. One object serves one training run; lots are counted in `step`.

    A subclass overrides the points at which it has something to do: before a lot, with its gradients, or after it.

    Guarantee:
        What a source teaches a shape follows from released values, public values and the weights. A source that uses
        private data either pays for it with a `share` of the step, or gives `reasons` why no proof covers it.

    """

    reasons: tuple[str, ...] = ()  # why no proof covers it
    assumptions: tuple[str, ...] = ()  # what the proof assumes about it
    looks = False  # whether `see` needs the sum of squares
    learns_first = False  # whether it learns before lots only
    as_made: tuple[str, ...] = ()  # attributes that are configuration: no checkpoint keeps them

    def __init__(self) -> None:
        self.step = -1
        self._average: dict[str, Statistics] = {}

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        """Called once before each lot."""
        self.step += 1

    def steady(self) -> bool:
        """Whether the source does nothing for the next lot that it does not do for every lot."""
        return True

    @property
    def share(self) -> float:
        """Share of this step's 1/sigma^2 that statistics for the shape take from the gradient; 0 if there are none."""
        return 0.0

    def see(self, shape: Shape, gradients: Gradients) -> None:  # noqa: B027 - only Raw looks
        """Called with the per-example gradients of each microbatch: private data."""

    def pool(self, total: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:  # noqa: B027 - only Raw keeps any
        """Called where several processes have parts of the lot: `total` adds up over them what `see` has kept."""

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:  # noqa: B027 - Probe and Public learn before it
        """Called with what the lot released."""

    def _learn(self, shape: Shape, found: Mapping[str, Statistics], decay: float) -> None:
        """Teach the shape a moving average, as in the paper: E' <- decay E' + (1 - decay) new, starting at zero."""
        self._average |= averaged(self._average, found, decay)
        shape.learn_all({name: self._average[name] for name in found})


def averaged(old: Mapping[str, Statistics], new: Mapping[str, Statistics], decay: float) -> dict[str, Statistics]:
    """Return decay * old + (1 - decay) * new, where a missing old value is zero, for all parameters at once."""
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
    """Add `more` to `total` in place."""
    for key, value in more.items():
        if key not in total:
            total[key] = value
        elif key.endswith(THIN):
            total[key] = torch.cat([total[key], value])
        else:
            total[key] += value
