"""A step that releases more than a gradient: the objective along it, and the gradient again, all on one lot.

What it charges. On one lot everything is Gaussian with information 1/sigma^2, and information adds up, whatever was
chosen by what came before on the same lot (mu-GDP composes adaptively). So a lot costs one sampled Gaussian event of
the *most* information that it may come to: all redraws included. Charging only the redraws that happened would not do:
after a first release the lot is no longer a fresh random sample, and amplification by sampling does not hold for
further ones one by one.

How much noise later lots have depends on what earlier ones released, so every lot goes through a privacy filter whose
order and budget were fixed before the first: that of the planned number of lots at the initial noise. Lots with less
noise use it up sooner, and training ends there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adadp.accounting.events import Event, PoissonGaussian
from adadp.accounting.filter import RenyiFilter
from adadp.mechanism.step import PrivateStep
from adadp.mechanism.sums import BoundedSums, ReleasedGradient
from adadp.sampling.lot import Lot, Microbatch


@dataclass(frozen=True)
class Rules:
    """Numbers fixed before the first lot.

    `share` of a lot's information goes to objectives, of which there are `candidates`, each example's bounded by
    `bound`; with every redraw the gradient's information grows by `growth`, at most `redraws` times a lot.
    """

    candidates: int
    bound: float
    share: float
    growth: float
    redraws: int
    improvement: bool


class SearchStep(PrivateStep):
    """A `PrivateStep` for line searches. `noise_multiplier` is that of a whole lot at the start, at its dearest."""

    resumable = False  # how much of the filter's budget lots used is in memory alone

    def __init__(
        self, *args: Any, rules: Rules, rate: float, filter: RenyiFilter, charge: Callable[[Event], None], **rest: Any
    ) -> None:
        self._filter, self._reserved = filter, False

        def admit(event: Event) -> None:
            if not self._reserved:
                charge(filter.event)  # all of it, before the first release
                self._reserved = True
            filter.admit(event)

        super().__init__(*args, charge=admit, **rest)
        self.rules, self.rate = rules, rate
        self._whole = self.noise_multiplier
        self._level = 0
        self._kept = BoundedSums()
        self._microbatch: Microbatch | None = None
        self._looks = self._redraws = 0  # on the lot that was released last

    # ---- how much each release of a lot has -----------------------------------------------------------------------

    def _information(self) -> float:
        """Of one gradient at the current level. At level 0 a lot's dearest course has all of `noise_multiplier`'s."""
        rules = self.rules
        return (1 - rules.share) / self._whole**2 * (1 + rules.growth) ** (self._level - rules.redraws)

    def _objective_information(self) -> float:
        return self.rules.share / self._whole**2 / (self.rules.redraws + 1)

    def lot_event(self) -> PoissonGaussian:
        """The dearest course of the next lot, as one event."""
        if self._level == 0:
            return PoissonGaussian(self._whole, self.rate)  # to the last bit, so that the planned lots all fit
        rules = self.rules
        gradient = self._information() * (1 + rules.growth) ** rules.redraws
        total = gradient + (rules.redraws + 1) * self._objective_information()
        return PoissonGaussian(1 / math.sqrt(total), self.rate)

    # ---- releases --------------------------------------------------------------------------------------------------

    def add(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        super().add(microbatch, keep)
        self._microbatch = microbatch

    def release(self, lot: Lot) -> ReleasedGradient:
        self.event = self.lot_event()
        self.noise_multiplier = 1 / math.sqrt(self._information())
        sums = lot.sums
        released = super().release(lot)
        self._kept, self._looks, self._redraws = sums, 0, 0
        return released

    def objectives(self, losses: Tensor) -> Tensor:
        """Noised sums over the lot of what each example's loss is, or gains, at each candidate. Part of the event.

        `losses` is [candidates, n], the first row at the current weights. With `improvement` the first
        result is exactly 0 for all data, so it needs no noise.
        """
        rules = self.rules
        if self._looks > rules.redraws or not self._kept or self._microbatch is None:
            raise RuntimeError("more looks at a lot than were charged for")
        self._looks += 1
        values = losses.double()
        if rules.improvement:
            values = (values - values[0])[1:]
            low = -rules.bound
        else:
            low = 0.0
        # Whatever is not finite counts as the worst: within the bound like everything else.
        values = values.nan_to_num(nan=rules.bound, posinf=rules.bound, neginf=low).clamp(low, rules.bound)
        sums = torch.where(self._microbatch.keep(values.device), values, 0.0).sum(1)
        sensitivity = rules.bound * math.sqrt(len(sums))
        multiplier = 1 / math.sqrt(self._objective_information())
        named, stddev = BoundedSums(objectives=sums), {"objectives": sensitivity * multiplier}
        noisy = self.noised("objectives", self._microbatch.lot, named, stddev, multiplier)["objectives"]
        return torch.cat([noisy.new_zeros(1), noisy]) if rules.improvement else noisy

    def redraw(self, gradient: ReleasedGradient) -> ReleasedGradient:
        """`gradient` averaged with a new draw on the same lot: together they have `growth` more information."""
        if self._redraws >= self.rules.redraws:
            raise RuntimeError("more redraws of a lot than were charged for")
        self._redraws += 1
        growth = self.rules.growth
        multiplier = 1 / math.sqrt(growth * self._information())
        lot = -1 if self._microbatch is None else self._microbatch.lot
        drawn = self.noised("redraw", lot, self._kept, self.clipping.stddev(multiplier), multiplier)
        self._level += 1
        return ReleasedGradient(
            (name, (gradient[name] + growth * value / self.expected_lot) / (1 + growth))
            for name, value in drawn.items()
        )

    def end(self, *, lost: bool) -> None:
        """Forget the lot. If nothing was gained on it, the next one gets a more precise gradient."""
        self._kept, self._microbatch = BoundedSums(), None
        if lost:
            self._level += 1
