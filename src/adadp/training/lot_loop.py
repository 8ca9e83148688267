"""The loop over lots: what `adadp train`, the audits and the paper's experiments all go through.

    for step, (inputs, targets) in each_lot(loader, work, steps):
        schedule.step()

A lot may come in several microbatches; a step is complete with the last of them. A budget may end the loop early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adadp.sampling.loader import PrivateLoader

Batch = tuple[Tensor, ...]


class ShuffledLots:
    """Lots without privacy: cut from a new order of the examples each epoch. `seed` None takes the system's."""

    def __init__(self, inputs: Tensor, labels: Tensor, lot: int, seed: int | None) -> None:
        self._inputs, self._labels, self._lot = inputs, labels, lot
        self._generator = torch.Generator()
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self._inputs), generator=self._generator).to(self._inputs.device)
        for part in torch.split(order, self._lot):
            yield self._inputs[part], self._labels[part]


def numbered_batches(lots: PrivateLoader | ShuffledLots, count: int) -> Iterator[tuple[int, Batch]]:
    """Each batch with the number of its lot, epoch after epoch, until `count` lots are complete or a budget ends them.

    The caller does all the work on a batch before it asks for the next.
    """
    lot = lots.lots.first if isinstance(lots, PrivateLoader) else 0  # a run that is resumed has made some
    while lot < count and not _stopped(lots):
        for batch in lots:
            yield lot, batch
            if _stopped(lots):
                return
            lot += _complete(lots)
            if lot == count:
                return


def each_lot(
    lots: PrivateLoader | ShuffledLots, work: Callable[..., object], count: int
) -> Iterator[tuple[int, Batch]]:
    """Do `work(*batch)` on every batch; after each complete lot yield how many there were, and its last batch."""
    for lot, batch in numbered_batches(lots, count):
        work(*batch)
        if _complete(lots) and not _stopped(lots):
            yield lot + 1, batch


def _stopped(lots: PrivateLoader | ShuffledLots) -> bool:
    return isinstance(lots, PrivateLoader) and lots.stopped


def _complete(lots: PrivateLoader | ShuffledLots) -> bool:
    """Whether the batch that was handed out last is the last of its lot."""
    return not isinstance(lots, PrivateLoader) or lots.current is None or lots.current.last
