"""Which of a lot's examples a process works on: a function of their indices, the same in every process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The part of process `rank` of `size`: the examples whose index leaves the remainder `rank`.

    Every process draws the whole lot, which takes time that grows with the lot, and takes its own examples from it. So
    each drawn example is worked on by exactly one process, and each process knows how many the others have.
    """

    rank: int = 0
    size: int = 1

    def own(self, drawn: Tensor) -> Tensor:
        """This process's examples of a lot, in the order in which they were drawn."""
        return drawn if self.size == 1 else drawn[drawn % self.size == self.rank]

    def most(self, drawn: Tensor) -> int:
        """How many examples of the lot the process with the most of them has."""
        return len(drawn) if self.size == 1 else int((drawn % self.size).bincount().max()) if len(drawn) else 0

    def expected(self, lot: int) -> int:
        """How many of `lot` examples a process has on average, rounded up."""
        return -(-lot // self.size)

    def room(self, lot: int, capacity: int) -> int:
        """Rows for a process's part where `capacity` rows suffice for lots of `lot` expected examples."""
        if self.size == 1:
            return capacity
        # The spread of a part is the lot's over the root of the number of parts.
        return min(capacity, math.ceil(lot / self.size + (capacity - lot) / math.sqrt(self.size)))


WHOLE = Share()
