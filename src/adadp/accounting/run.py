"""One run's side of a ledger: charge before each release, in microseconds.

Guarantee: when `charge` returns, the release is on the disk's record and within the budget. When it raises,
the release must not happen.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from typing import TYPE_CHECKING

from adadp.accounting.budget import Allowance
from adadp.accounting.events import Event, Gaussian, RenyiBlock
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError

if TYPE_CHECKING:
    from adadp.accounting.ledger import Ledger

MOST_RESERVED = 1024
"""The most releases that a run has reserved and not yet made (unless one `charge` asks for more)."""

_OVERHEAD = 0.005  # of a step's time, to be spent on syncing
_GROWTH = 32
_FRACTION = 128  # reserve 1/128 of what was charged already: a million slow steps are not a million lines


class Run:
    """Made by `Ledger.start`. Close it (or use `with`) to give back what was reserved in excess."""

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        allowance: Allowance | None,
        planned: int | None,
        before: int,
        *,
        durable: bool,
    ) -> None:
        self.id = name
        self._ledger, self._allowance, self._durable = ledger, allowance, durable
        self._planned, self._before = planned, before
        self._left: dict[Event, int] = {}
        self._reserved: dict[Event, int] = {}
        self._owner = os.getpid()
        # The ledger's own: a second lock could be taken in the other order by a thread that asks what was charged.
        self._mutex = ledger._mutex
        self._closed = False
        self._size, self._sync_time, self._since = 1, 0.0, time.perf_counter()
        self._charged_then = 0
        if durable:
            atexit.register(self.close)

    @staticmethod
    def is_step(event: Event) -> bool:
        """Whether the event counts towards a plan's "steps": preprocessing and filters do not."""
        return not isinstance(event, Gaussian | RenyiBlock)

    def charge(self, event: Event, count: int = 1) -> None:
        """Charge `count` releases that are about to happen.

        Raises `BudgetExhaustedError` if they would exceed the budget: then they must not happen, and nothing
        was charged. Most calls only count down a reservation.
        """
        if os.getpid() != self._owner:  # before the lock, which a thread may have held when this process was forked
            raise self._unusable()
        with self._mutex:
            if type(count) is not int or count < 1:
                raise ConfigurationError(f"count must be a whole number >= 1, not {count!r}")
            if self._closed:
                raise self._unusable()
            left = self._left.get(event, 0)
            if left < count:
                self._reserve(event, count)
                left = self._left[event]
                assert left >= count, "less was reserved than is released"
            self._left[event] = left - count
            if self._closed:  # by a signal's handler, after `left` was read: it has given back this release too
                raise self._unusable()

    def _unusable(self) -> LedgerError:
        if self._closed:
            return LedgerError(f"{self.id} is closed: start another run to release more")
        return LedgerError(f"{self.id} belongs to another process: only the one that started it may charge")

    def charged(self) -> dict[Event, int]:
        """How often each event was charged by this run."""
        with self._mutex:
            return {event: count - self._left.get(event, 0) for event, count in self._reserved.items()}

    def _steps(self) -> int:
        return sum(count for event, count in self.charged().items() if self.is_step(event))

    def _to_come(self, event: Event) -> int | None:
        """How many more of `event` the plan foresees beyond what is reserved; None if it foresees none."""
        if self._planned is None or not self.is_step(event):
            return None
        reserved = sum(count for each, count in self._reserved.items() if self.is_step(each))
        return max(0, self._planned - self._before - reserved) or None

    def _reserve(self, event: Event, wanted: int) -> None:
        """Have at least `wanted` of `event` reserved and unused, on the disk, before any of them happens."""
        self._choose_size()
        to_come = self._to_come(event)
        count = need = wanted - self._left.get(event, 0)
        if self.is_step(event):  # the others are rare and dear: never reserved in excess
            unused = sum(self._left.values())
            count = max(need, min(self._size, MOST_RESERVED - unused, to_come or MOST_RESERVED))
        with self._ledger._mutex:  # runs that share a budget must not find the same room
            if self._allowance is not None:
                count = self._within_budget(self._allowance, event, wanted, count, to_come)
            self._ledger._unsettle(self.id, self._allowance)
            start = time.perf_counter()
            self._ledger._reserve(self.id, event, count)
        self._reserved[event] = self._reserved.get(event, 0) + count
        self._left[event] = self._left.get(event, 0) + count
        self._since = time.perf_counter()
        self._sync_time = self._since - start

    def _within_budget(
        self, allowance: Allowance, event: Event, wanted: int, count: int, to_come: int | None
    ) -> int:
        """How many to reserve on top of what this run and all others have reserved: enough for `wanted`, `count`
        if there is room.
        """
        need = wanted - self._left.get(event, 0)
        allowance.beside(self._ledger._reserved_beside(self.id))
        room = allowance.room(event, self._reserved, need, to_come)
        if room < need and any(self._left.values()):
            # Reservations of other kinds that were not used must not stand in the way. What was left of this kind
            # goes back with them, so all that is wanted is needed.
            self._give_back()
            need = wanted
            room = allowance.room(event, self._reserved, need, to_come)
        if room < need and self._ledger._trim(self.id):
            # Nor must those of other runs. From here on they take turns: none is to reserve more than it needs.
            allowance.beside(self._ledger._reserved_beside(self.id))
            room = min(need, allowance.room(event, self._reserved, need, to_come))
        if room < need:
            raise BudgetExhaustedError(self._exhausted(event))
        return max(need, min(count, room))

    def _give_back(self) -> None:
        """Lower every reservation to what was charged of it. None of what is given back was released."""
        unused = {event: left for event, left in self._left.items() if left}
        # First forget, then write: in doubt the reservation stays charged on the disk.
        for event, left in unused.items():
            self._left[event] = 0
            self._reserved[event] -= left
        self._ledger._give_back(self.id, unused)

    def _trim(self) -> bool:
        """Give back for another run's sake. True if there was any."""
        with self._mutex:  # the ledger's, which the other run holds
            unused = any(self._left.values())
            if unused:
                self._give_back()
            return unused

    def _choose_size(self) -> None:
        """As few as keep syncing below half a percent of the time, so that little is lost in a crash."""
        if not self._durable:
            self._size = MOST_RESERVED
            return
        charged = sum(self.charged().values())
        steps = charged - self._charged_then
        self._charged_then = charged
        wanted = 1
        if steps and self._sync_time:
            step_time = max((time.perf_counter() - self._since) / steps, 1e-9)
            wanted = math.ceil(self._sync_time / (_OVERHEAD * step_time))
        # Grow step by step: one slow sync says little.
        wanted = max(min(wanted, _GROWTH * self._size), charged // _FRACTION, 1)
        self._size = min(wanted, MOST_RESERVED)

    def _exhausted(self, event: Event) -> str:
        assert self._allowance is not None
        budget = self._allowance.budget
        text = f"the budget (epsilon {budget.epsilon:g}, delta {budget.delta:g}) does not allow {event!r}"
        if self._planned is not None and self.is_step(event):
            done = self._before + self._steps()
            text += f": {max(0, self._planned - done):,} of {self._planned:,} planned steps were left out"
        return text + ". It did not run; what ran before is within the budget"

    def close(self) -> None:
        """Give back what was reserved and not charged. Safe to call twice, and called at exit.

        A run that never gets here stays charged for all that it reserved.
        """
        if os.getpid() != self._owner:  # before the lock, as in `charge`
            return
        with self._mutex:
            if self._closed:
                return
            # First of all, so that an interrupted close is never repeated: in doubt the reservation stays
            # charged.
            self._closed = True
            atexit.unregister(self.close)
            unused = {event: left for event, left in self._left.items() if left}
            self._ledger._closed(self.id, unused)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
