"""The states of one lot: handed out by the loader, filled by backward passes, charged, released.

One lot is out at a time. The loader, the step and the optimizer of a run share one `Lots`. What a microbatch may be
used for depends on the state of its lot, never on the order in which other objects were called.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adadp.errors import TrainingLoopError
from adadp.gradients.forms.segments import Segments
from adadp.mechanism.sums import BoundedSums
from adadp.sampling.units import Grouping


class State(enum.Enum):
    """How far a lot has come."""

    OPENED = "handed out; some of its microbatches may have been added up"
    FILLED = "every microbatch was added up"
    CHARGED = "written down in the ledger"
    RELEASED = "its noised sum has left the step"
    FAILED = "a microbatch could not be worked on, and what was added up is gone"
    LEFT = "the loop left the iterator that handed it out"


@dataclass(eq=False)
class Lot:
    """The examples of one release. `number` is its place in the run: lot k is drawn from (run key, k) alone."""

    number: int
    state: State = State.OPENED
    charged: bool = False
    added: int = 0  # how many of its microbatches are in `sums`
    sums: BoundedSums = field(default_factory=BoundedSums)  # bounded, not noised: private data
    nonfinite: Tensor | None = None  # examples whose gradients were not finite; shown only with expose_raw
    settings: list[object] = field(default_factory=list)  # what must not change between its microbatches

    def drop(self, state: State) -> None:
        """Forget everything that was added up, and change to `state`."""
        self.state, self.added, self.sums, self.nonfinite, self.settings = state, 0, BoundedSums(), None, []


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A part of a lot that fits in memory.

    Attributes:
        of: its lot.
        index: its place among the lot's microbatches.
        last: whether it is the last of them.
        count: rows of its batch.
        real: how many of these, the first ones, are examples that were drawn. The others are padding and are not
            counted (an empty lot comes as one such row).
        planned: the number of rows that such a part is planned for, which is public.
        indices: the drawn examples' places in the dataset, in the order in which collate got them.
        batch: what collate made of them, padded.
        segments: which rows are one contribution to the lot; None where each is one.
        start: the first of its rows in the batch that it was cut from.

    """

    of: Lot
    index: int
    last: bool
    count: int
    real: int | Tensor  # a tensor where steps are replayed on a GPU: each replay writes its drawn count into it
    planned: int
    indices: Sequence[int] = ()
    batch: Any = field(default=None, repr=False)
    segments: Segments | None = None
    start: int = 0

    @property
    def lot(self) -> int:
        """The number of its lot."""
        return self.of.number

    @property
    def done(self) -> bool:
        """Whether `optimizer.step()` was called for it."""
        return self.of.added > self.index or self.of.state is State.RELEASED

    def keep(self, device: torch.device) -> Tensor:
        """Which rows are examples that were drawn, [count] of bool."""
        if isinstance(self.real, int) and self.real == self.count:
            return torch.ones(self.count, dtype=torch.bool, device=device)
        return torch.arange(self.count, device=device) < self.real

    def fits(self, size: int) -> bool:
        """Whether it is no larger than a part for `size` rows is planned to be."""
        return self.count <= size if self.segments is None else len(self.segments) * self.segments.most <= size

    def cut(self, size: int) -> list[Microbatch]:
        """The same rows as microbatches of `size`, for a lot that was handed out whole."""
        starts = range(0, self.count, size)
        real = self.real if isinstance(self.real, int) else self.count
        if self.segments is not None:
            return self._cut_between(self.segments, size // self.segments.most)
        return [
            Microbatch(
                self.of,
                number,
                start + size >= self.count,
                min(size, self.count - start),
                max(0, min(size, real - start)),
                min(size, self.planned),
                self.indices[start : start + size],
                start=start,
            )
            for number, start in enumerate(starts)
        ]

    def _cut_between(self, segments: Segments, each: int) -> list[Microbatch]:
        """Parts of `each` segments; padding is left out."""
        parts = []
        for number, first in enumerate(range(0, len(segments), each)):
            own = segments.part(slice(first, first + each), min(each, segments.planned))
            rows = segments.rows_of(slice(first, first + each))
            indices, last = self.indices[rows], first + each >= len(segments)
            planned = own.planned * own.most
            parts.append(
                Microbatch(self.of, number, last, own.rows, own.rows, planned, indices, segments=own, start=rows.start)
            )
        return parts


def microbatches(
    number: int, indices: Sequence[int], size: int | None, planned: int, padded: bool, most: int = 0
) -> list[Microbatch]:
    """Lot `number` in parts of at most `size` examples; with `padded` every part has rows for exactly `size`.

    There are as many parts as for `most` examples: another process may have that many of the lot. What this one lacks
    comes as parts of one row that is not counted.
    """
    lot = Lot(number)
    most = max(1, len(indices), most)
    size = size or most
    pieces = [indices[start : start + size] for start in range(0, most, size)]
    return [
        Microbatch(
            lot, place, place == len(pieces) - 1, size if padded else max(1, len(piece)), len(piece), planned, piece
        )
        for place, piece in enumerate(pieces)
    ]


def grouped_microbatches(
    number: int,
    groups: Sequence[list[int]],
    size: int | None,
    planned: int,
    padded: bool,
    grouping: Grouping,
    most: int = 0,
) -> list[Microbatch]:
    """Lot `number` in parts of whole units, `groups` of rows; no part has more than `size` rows.

    A part has room for the most rows that its units may have: how many parts there are depends on how many units were
    drawn, and not on their rows. There are as many as for `most` units (see `microbatches`).

    Args:
        number: of the lot.
        groups: the rows of each unit that was drawn.
        size: the most rows of a part; None for one part.
        planned: how many units a lot is planned for.
        padded: whether every part has `size` rows.
        grouping: which units have how many rows.
        most: how many units of the lot another process may have.

    """
    lot = Lot(number)
    most = max(1, len(groups), most)
    each = most if size is None else grouping.at_a_time(size)
    planned = planned if size is None else min(planned, each)
    parts = [groups[start : start + each] for start in range(0, most, each)]
    found = []
    for place, part in enumerate(parts):
        rows = [row for group in part for row in group]
        count = size if padded and size is not None else max(1, len(rows))
        segments = grouping.segments(part, planned)
        last = place == len(parts) - 1
        found.append(Microbatch(lot, place, last, count, len(rows), planned * grouping.most, rows, segments=segments))
    return found


class Lots:
    """The lots of one run, of which one is out at a time.

    Args:
        on_hand_out: called with each microbatch as the loop gets it (`PrivateStep.open`).
        note: writes reasons for *none* and notes into the run (`Run.note_once_charged`).

    """

    def __init__(
        self,
        on_hand_out: Callable[[Microbatch], None] = lambda microbatch: None,
        note: Callable[..., None] = lambda **facts: None,
    ) -> None:
        self.on_hand_out, self.note = on_hand_out, note
        self.current: Microbatch | None = None
        self.whole: Microbatch | None = None  # as it was handed out, where `current` is a part that was cut from it
        self.first = 0  # the number of the first lot that this process hands out
        self.next = 0  # the number of the lot that will be opened next
        self.abandoned: Counter[str] = Counter()  # how many lots were handed out and left
        self.stopped = False  # the budget is spent: nothing more is handed out
        self.trained_on: Microbatch | None = None  # for which the module was last called with gradients on
        self._holder: object = None  # the iteration that handed out `current`
        self._handed: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def begin_at(self, number: int) -> None:
        """Let the first lot be one that a checkpoint was made before."""
        self.first = self.next = number

    # ---- handing out ----------------------------------------------------------------------------------------------

    def refuse_next(self, holder: object) -> None:
        """Raise where `holder`, an iteration of the loader, may not hand out another batch now."""
        if self.current is None or self.current.of.state in (State.RELEASED, State.LEFT):
            return
        if holder is not self._holder:
            self._leave()
            return
        if self.current.done and not self.current.last:
            return  # the next piece of the same lot
        self.note(
            reasons=[
                "the loop asked for another batch before optimizer.step() was called for the one that it held: either "
                "a batch was skipped, and one example can decide whether hundreds of others count, or batches were "
                "fetched ahead"
            ]
        )
        raise TrainingLoopError(
            f"lot {self.current.lot} was handed out and optimizer.step() was not called for it, but another batch is "
            "asked for. Call step() once for every batch. To fetch ahead, use the DataLoader's workers or "
            "make_private(prefetch=device); to evaluate, use an ordinary DataLoader over the same dataset; do not skip "
            "a batch because of its loss or an error: examples whose gradients are not finite count for nothing by "
            "themselves, and step(keep=mask) leaves examples out one by one. The guarantee is none from here on."
        )

    def held_by(self, holder: object) -> bool:
        """Whether the last batch was handed out by this iteration of the loader."""
        return self._holder is holder

    def refuse_second_iteration(self) -> None:
        """Raise: an iteration that was left goes on, and would hand out lots that a later one has handed out."""
        self.note(reasons=["two iterations of the loader took turns, so that a lot may have been handed out twice"])
        raise TrainingLoopError(
            "another iteration of this loader was begun since this one gave out its last batch (zip(loader, loader), "
            "or a loop over the loader inside a loop over it): its lots were taken over. Use one iteration at a time; "
            "to evaluate, use an ordinary DataLoader over the same dataset. The guarantee is none from here on."
        )

    def _leave(self) -> None:
        """A new iteration of the loader begins while a batch of an earlier one is out: that lot is not released."""
        assert self.current is not None
        self.abandoned["lots"] += 1
        # An interactive session keeps what ended its last command. Its user's own interruption is like a break.
        between_pieces = self.current.done and not self.current.last
        interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
        self.current.of.drop(State.LEFT)
        if self.trained_on is self.current and not between_pieces and not interrupted:
            self.note(
                reasons=[
                    "a lot was left after the model had been trained on a batch of it, without optimizer.step() (an "
                    "error that the loop caught, a break): one example can decide whether hundreds of others count"
                ]
            )
            return
        self.note(
            notes=[
                "the loop left an iterator of the loader (a break, a peek) while a lot was out; that lot was not "
                "released, which must not have depended on what was in it"
            ]
        )

    def hand_out(self, microbatch: Microbatch, holder: object = None) -> None:
        """The loop holds this microbatch from now on; `holder` is the iteration of the loader that gave it out."""
        self.current = self.whole = microbatch
        self._holder = holder
        self.next = max(self.next, microbatch.lot + 1)
        if len(self._handed) > 256:
            self._handed = {key: entry for key, entry in self._handed.items() if entry[0]() is not None}
        for leaf in tree_leaves(microbatch.batch):
            if isinstance(leaf, Tensor):
                self._handed[id(leaf)] = weakref.ref(leaf), microbatch.lot
        self.on_hand_out(microbatch)

    def work_on(self, microbatch: Microbatch) -> None:
        """Go to another part of what was handed out, which stays with the iteration that handed it out."""
        self.current = microbatch
        self.on_hand_out(microbatch)

    # ---- using ----------------------------------------------------------------------------------------------------

    def refuse_other_batches(self, leaves: Iterable[Any]) -> None:
        """Raise where one of `leaves` is a tensor that was handed out for another lot than the one that is out."""
        if self.current is None:
            return
        for leaf in leaves:
            reference, number = self._handed.get(id(leaf), (None, -1))
            if reference is not None and reference() is leaf and number != self.current.lot:
                self.note(reasons=["a batch of another lot was trained on"])
                raise TrainingLoopError(
                    f"the module is given a batch of lot {number} while lot {self.current.lot} is out: an example of "
                    "it would be in two releases, or its padding would count. Train on the batch that the loader "
                    "handed out last."
                )
