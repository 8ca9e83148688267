"""Canaries as gradients: the worst example that there can be, step by step.

A constant canary misses much: noise that is used twice cancels only if the canary turns, a denominator that counts
examples shows only if the others pull the other way, a bound on every coordinate only if all of them are at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adadp.errors import ConfigurationError

LENGTH = 1e6
"""Of a canary's gradient, before any clipping: far beyond every bound, and its square is still a float32."""

OTHERS = 10.0
"""Of every other example's gradient, where they oppose the canary: beyond every bound too."""

Sizes = tuple[tuple[int, int], ...]
"""(columns, rows) of each layer."""


class Layers(nn.Module):
    """Linear layers side by side, each with its own part of the input: `loss = <c, output>` has gradient c x^T.

    So an example's gradient is what the auditor wants it to be, through the engine's own backward pass. Always started
    alike: the start is public.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.columns = [columns for columns, _ in sizes]
        self.layers = nn.ModuleList(nn.Linear(columns, rows, bias=False) for columns, rows in sizes)
        generator = torch.Generator().manual_seed(0)
        for (columns, _), parameter in zip(sizes, self.parameters(), strict=True):
            nn.init.uniform_(parameter, -(columns**-0.5), columns**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.columns, 1)
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)], 1)


@dataclass(frozen=True)
class Canary:
    """Where the gradient is ("first": one coordinate of the first layer, "last", "everywhere"), and how it moves.

    `flips` turns it round at every step. `steers` keeps it steady in the first layer for half of the steps, so that a
    shape made of releases grows that way, then goes to the last layer. `opposed` has all others pull against it.
    """

    place: str
    flips: bool = True
    opposed: bool = True
    steers: bool = False

    def direction(self, step: int, steps: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """x [all columns] and c [all rows] of the gradient c x^T at a step, each layer's largest entry 1."""
        place, flips = self.place, self.flips
        if self.steers and 2 * step < steps:
            place, flips = "first", False
        rows = torch.zeros(sum(rows for _, rows in sizes))
        columns = torch.zeros(sum(columns for columns, _ in sizes))
        if place == "everywhere":
            rows += 1
            columns += 1
        elif place == "first":
            rows[0] = columns[0] = 1
        elif place == "last":
            rows[-1] = columns[-1] = 1
        else:
            raise ConfigurationError(f"a canary's place is first, last or everywhere, not {place!r}")
        return (-columns if flips and step % 2 else columns), rows


CANARIES = {
    "flipping": Canary("first", opposed=False),  # first of all: what is tried where nothing stands out
    "steady": Canary("first", flips=False, opposed=False),
    "opposed": Canary("first"),
    "last layer": Canary("last"),
    "everywhere": Canary("everywhere"),
    "steering": Canary("last", opposed=False, steers=True),
}
