"""Drawing lots: which examples a step sees.

A sampling scheme is part of the proof: it says what the accountant may assume. Lot k follows from the run's key and k
alone, so that drawing ahead, or again, changes nothing.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.errors import ConfigurationError, NoGuaranteeWarning

if TYPE_CHECKING:  # commands that only account for lots do not wait for torch
    import torch

    from adadp.randomness import Randomness, Stream


NO_NOISE = "the noise multiplier is 0: sums over private examples are released as they are"
"""Why there is no guarantee for a run that was made without noise, to look for a mistake."""


class Sampling(ABC):
    """How lots of about `lot` of `examples` are drawn, and what a release on one of them costs.

    Attributes:
        name: in `make_private(sampling=name)`.
        there: how many examples (or persons, `sampling.units`) there are; `examples` is the public number N.
        rows: how many rows an expected lot has at most.
        noted: what else a run's plan says.
        neighbours: the relation under which a proof covers the scheme.
        reasons: why no proof covers it; empty where one does.

    """

    def __init__(self, examples: int, lot: int) -> None:
        if examples < 1:
            raise ConfigurationError("the dataset is empty: there is nothing to train on")
        if not 1 <= lot <= examples:
            raise ConfigurationError(
                f"the lot (the DataLoader's batch_size, {lot}) must be in 1..{examples}, the size of the dataset"
            )
        self.examples, self.lot = examples, lot
        self.there = examples
        self.rows = lot
        self.noted: dict[str, Any] = {}

    name: str
    neighbours: Neighbours
    reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Lots in an epoch: as many as it takes for each example to be seen once on average."""
        return max(1, self.examples // self.lot)

    @property
    def capacity(self) -> int:
        """Rows of a padded lot. Larger lots are split into microbatches; no example is dropped."""
        return self.lot

    def plan(self) -> dict[str, Any]:
        """What the plan of a run in a ledger says of it."""
        own = {"neighbours": str(self.neighbours), "examples": self.examples, "lot": self.lot, "sampling": self.name}
        return {**own, **self.noted}

    @abstractmethod
    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        """The indices of the examples in lot number `lot`: the same whenever it is asked for."""

    @abstractmethod
    def event(self, noise_multiplier: float) -> Event:
        """What one noised sum over a lot costs."""

    def warn_of_none(self, stacklevel: int) -> None:
        """Say, where training is set up, that no proof covers this scheme."""
        if self.reasons:
            said = f"there will be no epsilon with sampling={self.name!r}: {'; '.join(self.reasons)}"
            warnings.warn(f"{said}. sampling='poisson' has one", NoGuaranteeWarning, stacklevel=stacklevel)

    def event_despite(self, noise_multiplier: float, reasons: Sequence[str]) -> Event:
        """As `event`, but uncovered where there are `reasons` why no proof holds (no noise at all is one)."""
        if noise_multiplier == 0:
            return Uncovered("; ".join(dict.fromkeys([*reasons, NO_NOISE])))
        event = self.event(noise_multiplier)
        if not reasons:
            return event
        return Uncovered("; ".join(reasons), event if isinstance(event, PoissonGaussian | FixedSizeGaussian) else None)


class Poisson(Sampling):
    """Each example is in a lot with probability lot / examples, independently of all else."""

    name = "poisson"
    neighbours = Neighbours.ADD_REMOVE

    @property
    def rate(self) -> float:
        """The probability q."""
        return self.lot / self.examples

    @property
    def capacity(self) -> int:
        room = self.lot + 4 * math.sqrt(self.lot * (1 - self.rate))  # one lot in 30,000 is larger
        return min(self.examples, 8 * math.ceil(room / 8))

    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        return _bernoulli_positions(self.there, self.rate, randomness.lot_stream(lot))

    def event(self, noise_multiplier: float) -> Event:
        return PoissonGaussian(noise_multiplier, self.rate)


def _bernoulli_positions(count: int, rate: float, stream: Stream) -> torch.Tensor:
    """Where `count` independent coins of probability `rate` show heads.

    The gaps between heads are geometric, so it takes about `rate * count` draws instead of `count`.
    """
    import torch

    if rate == 1:
        return torch.arange(count)
    expected = count * rate
    enough = int(expected + 10 * math.sqrt(expected) + 20)  # too few is possible, and then more are drawn
    positions = torch.empty(0, dtype=torch.float64)
    last = -1.0
    while last < count:
        gaps = torch.floor(torch.log1p(-stream.uniform(enough)) / math.log1p(-rate)) + 1
        new = last + gaps.cumsum(0)
        positions = torch.cat([positions, new])
        last = float(new[-1])
    return positions[positions < count].long()


class FixedSize(Sampling):
    """Lots of exactly `lot` examples, drawn without replacement, each lot independently of the others."""

    name = "fixed"
    neighbours = Neighbours.REPLACE_ONE

    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        return randomness.lot_stream(lot).permutation(self.examples)[: self.lot]

    def event(self, noise_multiplier: float) -> Event:
        return FixedSizeGaussian(noise_multiplier, self.examples, self.lot)


class Shuffle(Sampling):
    """The dataset in a random order, cut into lots. What most code does, and what no tight proof covers."""

    name = "shuffle"
    neighbours = Neighbours.ADD_REMOVE
    reasons = (
        "lots are cut from a shuffled dataset, so each example is seen at most once an epoch: amplification by "
        "Poisson sampling does not apply to them",
    )

    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        epoch, place = divmod(lot, len(self))
        order = randomness.stream(f"epoch {epoch}").permutation(self.examples)
        return order[place * self.lot : (place + 1) * self.lot]

    def event(self, noise_multiplier: float) -> Event:
        return Uncovered(self.reasons[0])  # not even a claim: Poisson's epsilon is not shuffling's


SAMPLINGS: dict[str, type[Sampling]] = {kind.name: kind for kind in (Poisson, FixedSize, Shuffle)}


def scheme(name: str) -> type[Sampling]:
    """The scheme called `name`, or `ConfigurationError` with the names there are."""
    if name not in SAMPLINGS:
        raise ConfigurationError(f"sampling must be one of {', '.join(SAMPLINGS)}, not {name!r}")
    return SAMPLINGS[name]
