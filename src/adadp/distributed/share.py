"""Which of a lot's units (examples, persons) a process works on: a function of their numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The part of process `rank` of `size`: the units whose number leaves the remainder `rank`.

    A unit is what lots are drawn of: an example, or a person with all their rows. Every process draws the whole lot,
    which takes time that grows with the lot, and takes its own units from it. So each drawn unit is worked on by
    exactly one process, whole, and each process knows how many the others have.
    """

    rank: int = 0
    size: int = 1

    def places(self, drawn: Tensor) -> Tensor:
        """Where this process's units are among those that were drawn for a lot, in their order."""
        if self.size == 1:
            return torch.arange(len(drawn))
        return (drawn % self.size == self.rank).nonzero()[:, 0]

    def most(self, drawn: Tensor) -> int:
        """How many units of the lot the process with the most of them has."""
        return len(drawn) if self.size == 1 else int((drawn % self.size).bincount().max()) if len(drawn) else 0

    def expected(self, lot: int) -> int:
        """How many of `lot` units a process has on average, rounded up."""
        return -(-lot // self.size)

    def room(self, lot: int, capacity: int) -> int:
        """Room for a process's part where `capacity` suffices for lots of `lot` expected units."""
        if self.size == 1:
            return capacity
        # The spread of a part is the lot's over the root of the number of parts.
        return min(capacity, math.ceil(lot / self.size + (capacity - lot) / math.sqrt(self.size)))


WHOLE = Share()
