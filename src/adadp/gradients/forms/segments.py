"""Rows of a batch that are one contribution: all rows of one person, or several views of one example.

What is clipped is a contribution. So the gradients of its rows are added up first, and only their sum has a norm: where
each row was clipped by itself, a person of a hundred rows would move a release a hundred times as far.

`Segments` says which rows belong together. `SegmentRows` does the arithmetic, on a device and without rows that are
left out. A form of gradients of rows becomes one of segments in `forms.dense.by_segment`; nothing after it knows that
there were rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from adadp.gradients.rounding import drop


class Segments:
    """Consecutive rows of a batch, some to a segment; rows after the last segment's belong to none.

    Args:
        sizes: how many rows each segment has.
        most: how many it may have, a public number: arithmetic is chosen for it, and not for the sizes at hand.
        planned: how many segments such a batch is planned for, public (see `PerExample`).
        shares: the factor of each segment's sum, 1 unless given.
    """

    def __init__(self, sizes: Sequence[int], most: int, planned: int, shares: Sequence[float] | None = None) -> None:
        self.sizes, self.most, self.planned = tuple(sizes), most, planned
        self.shares = None if shares is None or all(share == 1 for share in shares) else tuple(shares)
        self.starts = (0, *accumulate(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int:
        """How many rows are in any segment."""
        return self.starts[-1]

    @property
    def whole(self) -> bool:
        """Whether every segment has all the rows that it may have."""
        return all(size == self.most for size in self.sizes)

    def pieces(self, room: int) -> Iterator[slice]:
        """The segments in runs of at most `room` rows, or of one segment."""
        start = 0
        for place in range(len(self)):
            if place > start and self.starts[place + 1] - self.starts[start] > room:
                yield slice(start, place)
                start = place
        yield slice(start, len(self))

    def part(self, some: slice, planned: int | None = None) -> Segments:
        """These segments alone, of the rows `rows_of(some)`."""
        shares = None if self.shares is None else self.shares[some]
        return Segments(self.sizes[some], self.most, self.planned if planned is None else planned, shares)

    def rows_of(self, some: slice) -> slice:
        """Where the rows of consecutive segments are."""
        start, stop, _ = some.indices(len(self))
        return slice(self.starts[start], self.starts[max(start, stop)])


class SegmentRows:
    """The arithmetic of one batch's segments.

    Args:
        segments: which rows belong together.
        device: where the rows' gradients are.
        keep: [n] of bool; rows with False add nothing to their segment. None keeps all.
    """

    def __init__(self, segments: Segments, device: torch.device, keep: Tensor | None = None) -> None:
        self.segments, self.device, self.keep = segments, device, keep

    @cached_property
    def counted(self) -> Tensor:
        """Which segments have any rows, [m] of bool; an empty lot comes as one segment without rows."""
        return torch.tensor([size > 0 for size in self.segments.sizes], device=self.device)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """For each segment the numbers of its rows, [m, most], and whether there is such a row."""
        starts = torch.tensor(self.segments.starts[:-1], device=self.device).unsqueeze(1)
        sizes = torch.tensor(self.segments.sizes, device=self.device).unsqueeze(1)
        within = torch.arange(self.segments.most, device=self.device).unsqueeze(0)
        there = within < sizes
        places = torch.where(there, starts + within, 0)
        return places, there if self.keep is None else there & self.keep[places]

    def shared(self, values: Tensor) -> Tensor:
        """Values [m, ...] times the segments' shares."""
        if self.segments.shares is None:
            return values
        shares = torch.tensor(self.segments.shares, dtype=values.dtype, device=values.device)
        return values * shares.view(-1, *[1] * (values.ndim - 1))

    def folded(self, tokens: Tensor) -> Tensor:
        """Rows [n, T, ...] as segments [m, most * T, ...]: a segment's rows are more tokens, absent ones are zero."""
        count, most = len(self.segments), self.segments.most
        if self.keep is None and self.segments.whole:
            return tokens[: self.segments.rows].reshape(count, most * tokens.shape[1], *tokens.shape[2:])
        places, there = self._places
        rows = tokens[places.flatten()].view(count, most, *tokens.shape[1:])
        there = there.view(count, most, *[1] * (tokens.ndim - 1))
        return torch.where(there, rows, rows.new_zeros(())).flatten(1, 2)

    def summed(self, values: Tensor) -> Tensor:
        """The sums [m, ...] of values [n, ...] over each segment's rows, added in their order."""
        values = drop(values[: self.segments.rows], None if self.keep is None else self.keep[: self.segments.rows])
        total = values.new_zeros(len(self.segments), *values.shape[1:])
        for place in range(max(self.segments.sizes, default=0)):
            longer = [number for number, size in enumerate(self.segments.sizes) if size > place]
            rows = torch.tensor([self.segments.starts[number] + place for number in longer], device=values.device)
            if len(longer) == len(total):
                total += values[rows]
            else:
                total[torch.tensor(longer, device=values.device)] += values[rows]
        return total

    def part(self, some: slice) -> SegmentRows:
        """Consecutive segments alone, of the rows `segments.rows_of(some)`."""
        keep = None if self.keep is None else self.keep[self.segments.rows_of(some)]
        return SegmentRows(self.segments.part(some), self.device, keep)
