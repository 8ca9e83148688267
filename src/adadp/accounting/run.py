"""One run's side of a ledger: charge before each release, in microseconds.

Guarantee: when `charge` returns, the release is on the disk's record and within the budget, and so is the
rest of the plan where a number of steps was planned (`planned`). When it raises, the release must not happen.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from adadp.accounting.budget import Allowance
from adadp.accounting.events import Event
from adadp.accounting.planned import as_planned, dearest, is_step, steps_in
from adadp.accounting.remarks import Remarks
from adadp.accounting.shared import Limits
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
        uid: str,
        allowance: Allowance | None,
        planned: int | None,
        before: int,
        *,
        note_left: Callable[[int, int], None] | None = None,
    ) -> None:
        durable = note_left is not None
        self.id, self.uid, self._note_left = name, uid, note_left
        self._ledger, self._allowance, self._durable = ledger, allowance, durable
        self._planned, self._before = planned, before
        self._target = planned  # what of the plan the budget holds
        self._limits: Limits | None = None
        self._certified_with: object = None
        self._certified: set[tuple[Event, Event]] = set()
        self._left: dict[Event, int] = {}
        self._reserved: dict[Event, int] = {}
        self._last: tuple[int, Event] | None = None  # the record that reserved last, and what
        self._owner = os.getpid()
        # The ledger's own: a second lock could be taken in the other order by a thread that asks what was charged.
        self._mutex = ledger._mutex
        self._closed = False
        self.before_close: Callable[[], None] = lambda: None  # what must be on the disk before this run has ended
        self.waiting: list[str] = []  # reasons for *none* that are written with the first charge (`note_once_charged`)
        self._size, self._sync_time, self._since = 1, 0.0, time.perf_counter()
        self._charged_then = 0
        if durable:
            atexit.register(self.close)

    def charge(self, event: Event, count: int = 1) -> None:
        """Charge `count` releases that are about to happen.

        Raises `BudgetExhaustedError` if they would exceed the budget: then they must not happen, and nothing
        was charged. Most calls only count down a reservation.
        """
        if os.getpid() != self._owner:  # before the lock, which a thread may have held when this process was forked
            raise self._unusable()
        if self.waiting:
            self.note(reasons=self.waiting)  # where this raises, they wait still
            self.waiting = []
        with self._mutex:
            if type(count) is not int or count < 1:
                raise ConfigurationError(f"count must be a whole number >= 1, not {count!r}")
            if self._closed:
                raise self._unusable()
            left = self._left.get(event, 0)
            if left < count:
                self._reserve(event, count)
                left = self._left[event]
                if left < count:  # not an assertion: those can be switched off
                    raise LedgerError("less was reserved than is released")
            self._left[event] = left - count
            if self._note_left is not None and self._last is not None and self._last[1] == event:
                self._note_left(self._last[0], left - count)
            if self._closed:  # by a signal's handler, after `left` was read: it has given back this release too
                raise self._unusable()

    def _unusable(self) -> LedgerError:
        if self._closed:
            return LedgerError(f"{self.id} is closed: start another run to release more")
        return LedgerError(f"{self.id} belongs to another process: only the one that started it may charge")

    @property
    def unit(self) -> str:
        """The unit of privacy that its plan declared."""
        return self._ledger._state.runs[self.id].unit

    def charged(self) -> dict[Event, int]:
        """How often each event was charged by this run."""
        with self._mutex:
            return {event: count - self._left.get(event, 0) for event, count in self._reserved.items()}

    def note(
        self,
        *,
        assumptions: Sequence[str] = (),
        reasons: Sequence[str] = (),
        untried: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        """Keep what came up about this run, durably, for every guarantee over its ledger.

        Texts already on record are not written again. A reason makes all these guarantees *none*. It may come after the
        run has closed: the ledger is then held while it is written, and `LedgerError` says if another run holds it.
        """
        self._ledger._note(self.id, Remarks.of(assumptions, reasons, untried, notes))

    def note_once_charged(self, *, reasons: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """As `note`, but reasons wait for the first charge.

        A run that was refused before it released anything does not make the ledger's guarantee none.
        """
        if self.charged():
            self.note(reasons=reasons, notes=notes)
        else:
            self.waiting += reasons
            self.note(notes=notes)

    def spending(self) -> dict[str, Any]:
        """What weights trained in this run have cost: `Ledger.spending`, because runs build on one another."""
        return self._ledger.spending()

    def _to_come(self, event: Event) -> int | None:
        """How many more of `event` the plan foresees beyond what is reserved; None if it foresees none."""
        if self._target is None or not is_step(event):
            return None
        return max(0, self._target - self._before - steps_in(self._reserved)) or None

    def _reserve(self, event: Event, wanted: int) -> None:
        """Have at least `wanted` of `event` reserved and unused, on the disk, before any of them happens."""
        self._choose_size()
        with self._ledger._mutex:  # runs that share a budget must not find the same room
            if self._limits is None:
                self._limits = self._ledger._limits(self, event)
            count = need = wanted - self._left.get(event, 0)
            if is_step(event):  # the others are rare and dear: never reserved in excess
                unused, to_come = sum(self._left.values()), self._to_come(event)
                count = max(need, min(self._size, MOST_RESERVED - unused, to_come or MOST_RESERVED))
            if self._limits is not None:
                count = self._within_budget(self._limits, event, wanted, count)
            self._ledger._unsettle(self.id, self._limits)
            start = time.perf_counter()
            if self._closed:  # by a signal's handler: a reservation after the end would make the file unreadable
                raise self._unusable()
            self._last = self._ledger._reserve(self.id, event, count), event
        self._reserved[event] = self._reserved.get(event, 0) + count
        self._left[event] = self._left.get(event, 0) + count
        self._since = time.perf_counter()
        self._sync_time = self._since - start

    def _within_budget(self, limits: Limits, event: Event, wanted: int, count: int) -> int:
        """How many to reserve on top of what this run and all others have reserved: enough for `wanted`, `count`
        if there is room. If that is the first step of a plan, there is room for all of it, or it is cut to what fits.
        """
        need = wanted - self._left.get(event, 0)
        step = is_step(event)
        limits.beside(self._ledger._beside(self.id, step=step))
        room = self._room(limits, event, need)
        if room < need and any(self._left.values()):
            # Reservations of other kinds that were not used must not stand in the way. What was left of this kind
            # goes back with them, so all that is wanted is needed.
            self._give_back()
            need = wanted
            room = self._room(limits, event, need)
        planned = self._planned_room(event, need)
        if room < (planned or need) and self._ledger._trim(self.id):
            # Nor must those of other runs. From here on they take turns: none is to reserve more than it needs.
            limits.beside(self._ledger._beside(self.id, step=step))
            room = self._room(limits, event, need)
            room = room if planned else min(need, room)
        if room < need:
            raise BudgetExhaustedError(self._exhausted(limits, event))
        if planned is not None and room < planned:
            # How many steps there will be is fixed here by the budget, and by kinds of steps that were fixed
            # beforehand: not by anything that this plan has released.
            self._target = self._before + steps_in(self._reserved) + room
            self._ledger._cut_plan(self.id, self._target)
        return max(need, min(count, room))

    def _planned_room(self, event: Event, need: int) -> int | None:
        """How many more steps the plan needs room for; None if `need` steps are none of it or exceed it."""
        to_come = self._to_come(event)
        return None if to_come is None or need > to_come else to_come

    def _room(self, limits: Limits, event: Event, need: int) -> int:
        """How many more of `event` fit: at least `need`, or 0. Within a plan, together with the rest of it."""
        to_come = self._planned_room(event, need)
        if to_come is None:
            held = self._reserved if is_step(event) else as_planned(self._reserved, self._own_target())
            return limits.room(event, held, need)
        kinds = [each for each, count in self._reserved.items() if count and is_step(each)]
        dear = dearest([*kinds, event])
        others = tuple(pair for pair in self._reserved.items() if not is_step(pair[0]))
        if self._certified_with != (limits.spent, self._target, others):
            self._certified_with, self._certified = (limits.spent, self._target, others), set()
        if (dear, event) in self._certified:  # steps that are made cost no more than they counted for before
            return to_come
        least = {**self._reserved, event: self._reserved.get(event, 0) + need}
        whole = {**least, dear: least.get(dear, 0) + to_come - need}
        if limits.certify(whole):
            self._certified.add((dear, event))
            return to_come
        if not limits.certify(least):
            return 0
        return need + limits.most(dear, least, to_come - need)

    def _own_target(self) -> int | None:
        return None if self._target is None else self._target - self._before

    def _give_back(self) -> None:
        """Lower every reservation to what was charged of it. None of what is given back was released."""
        unused = {event: left for event, left in self._left.items() if left}
        self._last = None  # with this record the slot of what is left counts no more
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

    def _exhausted(self, limits: Limits, event: Event) -> str:
        text = f"{limits.tightest} does not allow {event!r}"
        if self._planned is not None and is_step(event):
            done = self._before + steps_in(self.charged())
            text += f": {max(0, self._planned - done):,} of {self._planned:,} planned steps were left out"
        return text + ". It did not run; what ran before is within the budget"

    def close(self) -> None:
        """Give back what was reserved and not charged. Safe to call twice, and called at exit.

        A run that never gets here stays charged for what it released; and for all that it reserved, if that is not
        known because the system was restarted, or has no name for the time since its start (`unused`).
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
            self.before_close()
            unused = {event: left for event, left in self._left.items() if left}
            self._ledger._closed(self.id, unused)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
