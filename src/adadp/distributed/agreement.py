"""Whether a lot is released: all processes have their part of it and process 0 has charged it, or none releases it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from adadp.accounting.run import Run
from adadp.distributed.books import Books
from adadp.distributed.group import Group, number_of
from adadp.distributed.wrapped import checksum
from adadp.errors import BudgetExhaustedError, DistributedError
from adadp.mechanism.sums import BoundedSums, Stddev

_READY, _FAILED, _SPENT, _REFUSED = range(4)
_NEWS, _ASKED = 1, 2  # bits of a row's last number
_EVERY = 100  # lots between two comparisons of the weights


class Agreement:
    """The agreement on one lot after the other of a process alone: it has all of the lot.

    Attributes:
        ask: asked for each lot; any process may ask all of them for something, such as to stop.
        asked: whether one of them did, with the last lot: the same in each.

    """

    group = Group()
    ask: Callable[[], bool] = staticmethod(lambda: False)
    asked = False

    def charge(self, lot: int, charge: Callable[[], None], sums: BoundedSums, stddev: Callable[[], Stddev]) -> None:
        """Have the lot charged; when this returns, it may be released. Raises where it must not be."""
        charge()

    def failed(self, lot: int) -> None:
        """Say that this process cannot have its part of the lot."""

    def totals(self, sums: BoundedSums) -> BoundedSums:
        """The sums of all processes' parts. Called after `charge`, and followed by the noise."""
        return sums


class AgreementOfAll(Agreement):
    """The agreement of several processes on the lots of one run.

    For each lot every process gives a row of numbers: which lot it is at, whether it has its part, how its sums and
    their noise look. Process 0 charges the lot before it gives its row, so one exchange suffices: it says that the lot
    is charged and that all are ready. Then the sums are added up.

    Guarantee:
        `charge` returns in a process only if process 0 has the lot on record and every process has bounded its part of
        the same lot, with the same noise. Otherwise it raises in all of them. A process that does not answer makes it
        raise within the process group's timeout.

    """

    def __init__(self, books: Books, run: Run, weights: Iterable[Tensor]) -> None:
        self.group, self._books, self._run = books.group, books, run
        self._weights = list(weights)
        self._released = 0  # how many lots

    def charge(self, lot: int, charge: Callable[[], None], sums: BoundedSums, stddev: Callable[[], Stddev]) -> None:
        status, raised = _READY, None
        if self.group.first:
            try:
                charge()
            except Exception as error:
                raised = error
                status = _SPENT if isinstance(error, BudgetExhaustedError) else _REFUSED
        looks, weights = _signature(sums, stddev()), self._weights_at(lot)
        self._conclude(lot, [status, looks, weights], raised)
        if not self.group.first:
            charge()
        self._released += 1

    def failed(self, lot: int) -> None:
        try:
            self._conclude(lot, [_FAILED, 0, 0], None)
        except Exception:  # the error that made it fail is the one to raise
            return

    def totals(self, sums: BoundedSums) -> BoundedSums:
        return BoundedSums(self.group.totals(sums))

    def _weights_at(self, lot: int) -> int:
        return checksum(self._weights) if self._released in (0, 1, 10) or lot % _EVERY == 0 else 0

    def _conclude(self, lot: int, state: list[int], raised: Exception | None) -> None:
        waiting = [] if self.group.first else list(self._run.waiting)
        table = self.group.rows([lot, *state, (bool(waiting) or self._books.news) * _NEWS + self.ask() * _ASKED])
        self.asked = any(row[-1] & _ASKED for row in table)
        if any(row[-1] & _NEWS for row in table):
            self._take(self._books.exchange(waiting), ready=all(row[1] == _READY for row in table))
            table = self.group.rows([lot, *state, 0])  # process 0 has written down what it was told
        if raised is not None:
            raise raised
        for rank, (number, status, *_) in enumerate(table):
            if number != lot:
                raise DistributedError(
                    f"process {rank} is at lot {number}, and this one at lot {lot}: their loops did not take the same "
                    "lots. Every process must go through the loader alike; none may skip, repeat or leave a lot by "
                    "itself. Nothing of it was released."
                )
            if status == _FAILED:
                raise DistributedError(
                    f"process {rank} could not work on its part of lot {lot}, so the lot is not released: see its own "
                    "error. Stop all processes, and start them again."
                )
        if table[0][1] == _SPENT:
            raise BudgetExhaustedError("the budget that process 0 keeps does not allow another release. It did not run")
        if table[0][1] == _REFUSED:
            raise DistributedError(f"process 0 could not charge lot {lot}: see its own error. Nothing was released")
        if len({row[2] for row in table}) > 1:
            raise DistributedError(
                f"the processes do not sum the same parameters of lot {lot} with the same noise: something was frozen, "
                "a setting of the clipping changed, or its shape came out differently in one of them. Nothing was "
                "released."
            )
        if len({row[3] for row in table}) > 1:
            raise DistributedError(
                f"the weights are no longer the same in all processes before lot {lot}: one of them changed them by "
                "itself, or its machine rounds differently. Nothing was released. Use machines of one kind, and change "
                "weights in all processes alike."
            )

    def _take(self, reasons: list[str], *, ready: bool) -> None:
        """Process 0 notes the reasons for *none* of the others, or lets them wait while nothing was released."""
        if reasons and (ready or self._released):
            self._run.note(reasons=reasons)
        else:
            self._run.waiting += [reason for reason in reasons if reason not in self._run.waiting]


ALONE = Agreement()


def _signature(sums: Mapping[str, Tensor], stddev: Stddev) -> int:
    """A number that differs where names, shapes, types or noise of the sums do."""
    noise = {name: scale for name, scale in stddev.items() if not isinstance(scale, Tensor)}
    parts = [(name, tuple(value.shape), str(value.dtype), noise.get(name)) for name, value in sums.items()]
    scales = checksum([scale for scale in stddev.values() if isinstance(scale, Tensor)])
    return number_of(parts, scales, *sorted(stddev))
