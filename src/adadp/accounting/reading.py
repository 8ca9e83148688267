"""A ledger as it can be read: what was charged, what that rests on, what weights carry on. Nothing here writes."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adadp.accounting.accountant import require_delta
from adadp.accounting.budget import Budget
from adadp.accounting.chain import Chain, Record
from adadp.accounting.composition import Canonical, Composition, canonical
from adadp.accounting.events import Event, Neighbours
from adadp.accounting.ledger_state import LedgerState, Refusal, RunSummary, on_record
from adadp.accounting.remarks import Remarks
from adadp.accounting.shared import FilterLimit, fix_order
from adadp.accounting.spending import CarriedRun, FilterOrigin, spending_to_json
from adadp.accounting.unused import Unused
from adadp.errors import ConfigurationError, LedgerError

if TYPE_CHECKING:
    from adadp.accounting.guarantee import Guarantee
    from adadp.accounting.run import Run
    from adadp.accounting.running import RunningEpsilon


class ReadableLedger:
    """What every ledger can be asked. Open one as `Ledger`."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dataset: str | None = None,
        neighbours: Neighbours | None = Neighbours.ADD_REMOVE,
        budget: Budget | None = None,
        wait: float = 600.0,
        unit: str | None = None,
        delta: float | None = None,
    ) -> None:
        """Open, and verify if it exists. A new file is written by the first `start` and needs a `dataset`.

        `dataset` is a declared name or a `dataset_fingerprint`. `neighbours` and `unit` (of privacy, such as "one
        person") are the same for everything in a ledger; None takes what the file says, or what the first run's plan
        says under "neighbours" and "unit". `budget` is shared by all runs, which may then be chosen after seeing one
        another (`shared`). It is fixed when the ledger is made; None takes what the file says. `wait` is for how many
        seconds a run waits for one of another process to end. `delta` is noted with runs that have no budget of their
        own, for whoever reads the ledger later: it bounds nothing.
        """
        if delta is not None:
            require_delta(delta)
        self.wait, self._delta = wait, delta
        self.path = None if path is None else Path(path)
        if unit is not None and not unit.strip():
            raise ConfigurationError("unit must name what is protected, such as 'one example'")
        self._state = LedgerState(dataset, None if neighbours is None else Neighbours(neighbours), budget, unit)
        self._chain = None if self.path is None else Chain(self.path)
        self._unused = None if self.path is None else Unused(self.path)
        self._records: list[Record] = []  # of a ledger in memory
        self._open: dict[str, Run] = {}
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._running: RunningEpsilon | None = None
        if self._chain is not None and self._chain.exists():
            self._replay(self._chain.read())

    @property
    def dataset(self) -> str | None:
        """The name of the data, if it has one."""
        return self._state.dataset

    @property
    def neighbours(self) -> Neighbours | None:
        """The relation of everything in it; None until the first run settles it."""
        return self._state.neighbours

    @property
    def budget(self) -> Budget | None:
        """What all runs share, if that was fixed when the ledger was made."""
        return self._state.budget

    @property
    def unit(self) -> str | None:
        """The unit of privacy of everything in it; None until the first run settles it."""
        return self._state.unit

    @property
    def deltas(self) -> tuple[float, ...]:
        """Every delta that was declared: by the shared budget and by runs. Smallest first."""
        with self._mutex:
            state = self._refresh()
            found = {run.delta for run in state.runs.values() if run.delta is not None}
            return tuple(sorted(found | (set() if state.budget is None else {state.budget.delta})))

    def _refuse(self, reason: object) -> LedgerError:
        name = self.path or "(in memory)"
        return LedgerError(f"the ledger {name} is refused: {reason}. Nothing was changed")

    def _replay(self, records: Sequence[Record]) -> None:
        """Rebuild what the ledger knows from its records."""
        state = LedgerState(self.dataset, self.neighbours, self.budget, self.unit)
        for number, record in enumerate(records, 1):
            try:
                state.apply(record)
            except Refusal as reason:
                raise self._refuse(reason) from None
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise self._refuse(f"record {number} makes no sense ({error})") from None
        self._state = state

    def load_records(self, records: Sequence[Record]) -> None:
        """Be the ledger in memory that gave these `records`. It must be new."""
        with self._mutex:
            if self._chain is not None or self._state.key:
                raise LedgerError("only a new ledger in memory takes the records of another one")
            self._replay(records)
            self._records = copy.deepcopy(list(records))

    def with_resumed(self, runs: Iterable[str]) -> tuple[str, ...]:
        """These runs, and all that they resume."""
        with self._mutex:
            state = self._refresh()
            return tuple({name: None for run in runs for name in (run, *(each.id for each in state.ancestors(run)))})

    def unused(self, seed: int) -> RunSummary | None:
        """A run that was started with this seed and has reserved nothing: its noise was never drawn."""
        with self._mutex:
            state = self._refresh()
            found = [run for run in state.runs.values() if run.seed is not None and run.seed == state.fingerprint(seed)]
            return found[0] if len(found) == 1 and not any(found[0].reserved.values()) else None

    def _refresh(self) -> LedgerState:
        """Read the file again unless this process holds it: another one may have charged since."""
        held = self._chain is None or (self._chain.locked and os.getpid() == self._owner)
        if self._chain is not None and not held and (self._state.key or self._chain.exists()):
            self._replay(self._chain.read())
        return self._state

    def _exact(self, run: RunSummary) -> Mapping[Event, int]:
        """What a run charged, where this process makes it; otherwise all that it reserved."""
        live = self._open.get(run.id) if os.getpid() == self._owner else None
        return run.reserved if live is None else live.charged()

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """Every run, oldest first."""
        with self._mutex:
            return tuple(self._refresh().runs.values())

    def composition(self) -> Canonical:
        """Everything on this dataset as accountants may bound it: own runs and inherited ones.

        Runs that died are charged for all that they reserved, runs that planned a number of steps for that number,
        and where a privacy filter keeps the ledger's budget all of it together is the filter's whole budget.
        """
        with self._mutex:
            return self._refresh().composition(self._exact)

    def charged(self, runs: Collection[str] | None = None) -> Canonical:
        """The releases charged so far, without the rest of any plan. To show progress: no guarantee is made of it.

        `runs` are ids, where only those are asked about.
        """
        with self._mutex:
            state = self._refresh()
            if runs is not None:
                return canonical([pair for name in runs for pair in self._exact(state.runs[name]).items()])
            own = [pair for run in state.runs.values() for pair in self._exact(run).items()]
            return canonical([*own, *(pair for run in state.inherited() for pair in run.counts)])

    def charges(self) -> dict[str, Canonical]:
        """What each run of this ledger counts for, by id: as planned where a number of steps was planned."""
        with self._mutex:
            charges = self._refresh().charges(self._exact)
            return {name: canonical(counts) for name, counts in charges.items()}

    def room(self, event: Event, at_most: int, beside: Composition = ()) -> int | None:
        """How many releases like `event` the shared budget still holds, 0..at_most; None if there is no such budget.

        `beside` are other releases that are planned with them.
        """
        with self._mutex:
            state = self._refresh()
            if state.budget is None:
                return None
            if state.one_plan is not None:
                return 0
            relation = state.neighbours or Neighbours.ADD_REMOVE
            order = fix_order(event, state.budget, relation) if state.order is None else state.order
            limit = FilterLimit(state.budget, order, relation)
            limit.beside(canonical(state.pairs(on_record)))
            return limit.most(event, dict(canonical(beside)), at_most)

    @property
    def inherited(self) -> tuple[CarriedRun, ...]:
        """Runs on this dataset that were made elsewhere and came with weights."""
        with self._mutex:
            return tuple(self._refresh().inherited())

    @property
    def elsewhere(self) -> tuple[tuple[str | None, Canonical], ...]:
        """(dataset, releases) of runs on other datasets that came with weights: no part of `composition`."""
        with self._mutex:
            found: dict[tuple[str | None, str, str], list[tuple[Event, int]]] = {}
            for run in self._refresh().elsewhere():
                found.setdefault((run.dataset, run.neighbours, run.unit), []).extend(run.counts)
            return tuple((dataset, canonical(pairs)) for (dataset, _, _), pairs in found.items())

    def _remarks(self) -> Remarks:
        with self._mutex:
            state = self._refresh()
            return state.remarks().joined(Remarks(notes=state.notes(self._exact, self._open)))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the runs rest on, inherited ones included."""
        return self._remarks().assumptions

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why there is no guarantee over this ledger, as far as runs noted it. Uncovered releases have their own."""
        return self._remarks().reasons

    @property
    def untried(self) -> tuple[str, ...]:
        """What could not be tried before training."""
        return self._remarks().untried

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a reader should know."""
        return self._remarks().notes

    def guarantee(
        self,
        delta: float,
        *,
        accountant: str | None = None,
        unit: str | None = None,
        assumptions: Sequence[str] = (),
        reasons: Sequence[str] = (),
        untried: Sequence[str] = (),
        notes: Sequence[str] = (),
        running: bool = False,
    ) -> Guarantee:
        """What may be said about everything in this ledger, with the remarks of all its runs and those given here.

        `accountant` None means `pld`, or `rdp` where no distribution is known. What a privacy filter admitted is
        always accounted for by `rdp`: its price is its whole budget, whatever was used of it. `unit`, if it is given,
        has to be the ledger's. `running` answers quickly where a loop asks.
        """
        from adadp.accounting.statement import over

        with self._mutex:
            given = Remarks.of(assumptions, reasons, untried, notes)
            remarks = self._remarks().joined(given)
            if running and self._running is None:
                from adadp.accounting.running import RunningEpsilon

                self._running = RunningEpsilon()
            quick = self._running if running else None
            return over(self._state, self._exact, remarks, delta, accountant, unit, quick)

    def spending(self) -> dict[str, Any]:
        """Everything that weights trained under this ledger may depend on, as plain values (`spending`).

        All runs of the ledger are in it and all that they inherited: settings of a run are chosen by earlier ones.
        Runs with planned steps are in it as planned.
        """
        with self._mutex:
            state = self._refresh()
            charges = state.charges(self._exact)
            rows = [
                CarriedRun(
                    run.uid,
                    state.dataset,
                    run.unit,
                    state.neighbours or Neighbours.ADD_REMOVE,
                    canonical(charges[run.id]),
                    state.remarks_of(run),
                    self._origin(),
                )
                for run in state.runs.values()
            ]
            own = {run.uid for run in rows}
            rows = [run for run in rows if run.counts or run.remarks.reasons]
            return spending_to_json([*rows, *(run for run in state.carried.values() if run.uid not in own)])

    def _origin(self) -> FilterOrigin | None:
        state = self._state
        if state.order is None or state.budget is None:
            return None
        block = self._filter().event
        return FilterOrigin(state.derived("filter"), block.order, block.divergence)

    def _filter(self) -> FilterLimit:
        state = self._state
        assert state.budget is not None
        assert state.order is not None
        assert state.neighbours is not None
        return FilterLimit(state.budget, state.order, state.neighbours)
