"""The durable record of everything that was released on one dataset.

A run reserves releases, has the reservation on the disk, and only then releases. One ledger serves many
runs, so tuning on private data is charged too.

Guarantee: after a crash at any point the ledger holds at least what was released, and at most one reservation
(`MOST_RESERVED` releases) more, or the rest of the plan where a number of steps was planned. A run that did not close
is charged for all that it reserved, until the next run starts: if the system was not restarted in between, it is known
what the dead run did not release (`unused`), and that is given back. A run that resumes another is charged for every
release that it makes, also of lots that were released before: the only exception is the very same release, bit for bit,
of a run with a seed (`adadp.mechanism.attempts`). A ledger that was edited, truncated, or belongs to another
dataset, plan, neighbouring relation or shared budget is refused with the reason, and nothing in it is
overwritten.

A run's seed, if it has one, is remembered as a keyed fingerprint and refused a second time, except to a run that
resumes that one and draws its noise by lot and attempt. The key is in the ledger: whoever holds the ledger can find a
seed of few bits by trying. Noise without a seed is the normal case.
"""

from __future__ import annotations

import copy
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from adadp.accounting.admission import relation_for, require_new_seed, require_resumable, unit_for
from adadp.accounting.budget import Allowance, Budget
from adadp.accounting.chain import Chain, Record, canonical_json
from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, Neighbours, Uncovered, event_to_json
from adadp.accounting.ledger_state import JSON, UPGRADED, VERSION, Refusal, RunSummary, on_record, planned_steps
from adadp.accounting.reading import ReadableLedger
from adadp.accounting.remarks import Remarks
from adadp.accounting.run import MOST_RESERVED, Run
from adadp.accounting.shared import FilterLimit, Limit, Limits, PlanLimit, fix_order
from adadp.accounting.spending import CarriedRun, spending_from_json
from adadp.accounting.unused import boot_id
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError

Result = TypeVar("Result")

__all__ = ["MOST_RESERVED", "Budget", "Ledger", "Run", "RunSummary", "dataset_fingerprint"]


def dataset_fingerprint(content: Iterable[bytes], key: bytes) -> str:
    """A name for a dataset that says nothing to whoever lacks `key`. Never publish an unkeyed hash of the
    data.

    `key` needs 16 bytes or more, is kept secret, and has to be the same each time.
    """
    if len(key) < 16:
        raise ConfigurationError("the key of a dataset fingerprint needs 16 bytes or more")
    digest = hmac.new(key, digestmod="sha256")
    for part in content:
        digest.update(len(part).to_bytes(8, "big") + part)
    return "hmac-sha256:" + digest.hexdigest()


class Ledger(ReadableLedger):
    """Every release on one dataset. `path` None keeps it in memory: nothing then survives the process."""

    #: Called with each new record, once it is written (`adadp.distributed.books`).
    on_record: Callable[[Record], None] | None = None

    # ---- spending that follows weights -----------------------------------------------------------------------------

    def inherit(self, spending: Any) -> None:
        """Charge what weights cost that are about to be trained on here: `spending` of another ledger, or of this.

        A run that is here already is not charged again; of a run that comes a second time with larger counts the
        larger ones are kept. A run on another dataset is kept apart. `LedgerError` where it cannot be read, or where
        unit or neighbouring relation differ; `BudgetExhaustedError` where this ledger's shared budget does not hold
        it. Then nothing was recorded, and the weights must not be used.
        """
        try:
            runs = spending_from_json(spending)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LedgerError(
                f"what these weights cost cannot be read: {error}. They cannot be trained on, because nothing could "
                "be said about the result: load a checkpoint as it was saved"
            ) from None
        self._require_owner()
        if runs:
            self._writing(lambda: self._inherit(runs))

    def _inherit(self, runs: Sequence[CarriedRun]) -> None:
        try:
            news = self._state.news(runs, self._exact)
        except Refusal as reason:
            raise self._refuse(reason) from None
        if not news:
            return
        for run in self._open.values():  # what they reserved was within their budgets as they were
            run._trim()
        order = self._admit(news)
        here = next((run for run in news if run.same_as(self.dataset)), None)
        if here is not None:
            self._head(here.neighbours, here.unit)
        if order is not None:
            self._append({"kind": "order", "order": order})
        self._append({"kind": "inherit", "runs": [run.to_json() for run in news]})

    def _admit(self, news: Sequence[CarriedRun]) -> float | None:
        """Hold what is inherited against the shared budget, if there is one. Returns its order, where that is new."""
        state = self._state
        here = [run for run in news if run.same_as(state.dataset) and run.counts]
        if state.budget is None or not here:
            return None
        counts = [pair for run in here for pair in run.counts]
        for event, _ in counts:
            if isinstance(event, Uncovered):
                raise self._refuse(f"a shared budget cannot be kept over what no proof covers ({event.reason})")
        if state.one_plan is not None:
            raise self._refuse(f"{self._one_plan_text()}, and these weights were paid for by other runs")
        relation = state.neighbours or here[0].neighbours
        order = state.order
        if order is None:  # as before a release: nothing of this ledger's own has been released yet
            order = fix_order(max(counts, key=lambda pair: pair[1])[0], state.budget, relation)
        then = copy.copy(state)
        then.order, then.carried = order, {**state.carried, **{run.uid: run for run in here}}
        limit = FilterLimit(state.budget, order, relation)
        if not limit.certify(dict(canonical(then.pairs(on_record)))):
            raise BudgetExhaustedError(
                f"{limit} does not hold what these weights cost: they cannot be trained on under it. Use a ledger "
                "with a larger budget, or none"
            )
        return order if state.order is None else None

    def settle_order(self, event: Event) -> None:
        """Keep a shared budget at the order that suits releases like `event`; what was settled before stays.

        Otherwise the first release settles it, which may be a preprocessing's and suit no step.
        """
        self._require_owner()
        if self.budget is not None:
            self._writing(lambda: self._settle_order(event))

    def _settle_order(self, event: Event) -> None:
        state = self._state
        if state.budget is not None and state.order is None and state.one_plan is None:
            order = fix_order(event, state.budget, state.neighbours or Neighbours.ADD_REMOVE)
            self._append({"kind": "order", "order": order})

    # ---- writing ---------------------------------------------------------------------------------------------------

    def start(
        self,
        plan: Mapping[str, JSON],
        *,
        seed: int | None = None,
        budget: Budget | None = None,
        accountant: str = "pld",
        resume: str | None = None,
        attempt: int | None = None,
        assumptions: Sequence[str] = (),
        reasons: Sequence[str] = (),
        untried: Sequence[str] = (),
    ) -> Run:
        """Begin a run. Its releases are charged through the `Run`, each before it happens.

        `plan` is plain JSON that says what the run means to do. "steps" in it is a number of steps that is charged
        from the first step on, made or not (`planned`); "unit" is the unit of privacy ("one example" unless given) and
        "neighbours" the relation: those of the first run are the ledger's, and others are refused.
        `budget` bounds everything in the ledger together, by `accountant`, for plans declared together. `resume` is
        the id of a run that this one continues: its plan has to be the same, and what it released stays charged. With
        `attempt`, such a run may have the seed of those that it continues: its noise is that of (lot, attempt).
        `assumptions`, `reasons` for *none*, and what was `untried` are kept and printed by every guarantee.
        """
        self._require_owner()
        remarks = Remarks.of(assumptions, reasons, untried)
        return self._writing(lambda: self._start(dict(plan), seed, budget, accountant, resume, attempt, remarks))

    def line(self, uid: str) -> tuple[RunSummary, ...]:
        """The run of this uid with those that it resumed and those that resumed it, newest first; () if it is not here.

        Runs that died are ended first, as far as it is known what they did not release.
        """
        self._require_owner()

        def find() -> tuple[RunSummary, ...]:
            self._reclaim()
            newest = self._state.newest(uid)
            return () if newest is None else (newest, *self._state.ancestors(newest.id))

        return self._writing(find)

    def records(self) -> list[Record]:
        """All records of a ledger in memory, as plain values, for a checkpoint; none for one that has a file.

        What open runs reserved and did not use is given back first. Fingerprints of seeds are left out: checkpoints are
        shown to others, and with the key a seed of few bits could be found by trying.
        """
        with self._mutex:
            if self._chain is None:
                for run in self._open.values():
                    run._trim()
            return [{**copy.deepcopy(each), **({"seed": None} if "seed" in each else {})} for each in self._records]

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise LedgerError("a ledger belongs to the process that opened it: open it again in this one")

    def _writing(self, work: Callable[[], Result]) -> Result:
        """Do `work` while the file is held, and let go of it afterwards unless a run is open."""
        with self._mutex:
            self._lock()
            try:
                return work()
            finally:
                if not self._open:
                    self._unlock()

    def _lock(self) -> None:
        """Hold the file for writing."""
        if self._chain is None:
            return
        if self._chain.locked:
            return
        if not self._chain.exists():
            self._require_dataset()  # before a file is made
        self._replay_locked(self._chain)

    def _replay_locked(self, chain: Chain) -> None:
        records = chain.lock(self.wait)
        try:
            self._replay(records)
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self._chain is not None:
            self._chain.unlock()
        if self._unused is not None:
            self._unused.close()

    def _require_dataset(self) -> None:
        if self.path is not None and not self.dataset:
            raise ConfigurationError(
                f"a new ledger ({self.path}) has to know its dataset: pass dataset=, a name or a keyed fingerprint"
            )

    def _head(self, neighbours: Neighbours | None, unit: str | None) -> None:
        """Begin a new ledger, which is for this relation and this unit (None: what comes first settles it)."""
        if self._state.key:
            return
        self._require_dataset()
        self._write(
            {
                "kind": "ledger",
                "version": VERSION,
                "dataset": self.dataset,
                "neighbours": neighbours,
                "unit": unit,
                "key": secrets.token_hex(32),
                "budget": None if self.budget is None else [self.budget.epsilon, self.budget.delta],
            }
        )

    def _append(self, record: Record) -> None:
        """On the disk first, then in memory."""
        with self._mutex:
            self._head(self._state.neighbours, self._state.unit)
            if self._state.version == 1:
                self._write({"kind": "upgrade", "version": UPGRADED})
            self._write(record)

    def _write(self, record: Record) -> None:
        if self._chain is not None:
            self._chain.append(record)
        else:
            self._records.append(record)
        self._state.apply(record)
        if self.on_record is not None:
            self.on_record(record)

    def _start(
        self,
        plan: dict[str, JSON],
        seed: int | None,
        budget: Budget | None,
        accountant: str,
        resume: str | None,
        attempt: int | None,
        remarks: Remarks,
    ) -> Run:
        self._reclaim()
        plan = json.loads(canonical_json(plan))  # a copy that nobody else can change
        try:
            relation, unit = relation_for(self._state, plan), unit_for(self._state, plan)
            if seed is not None:
                require_new_seed(self._state, seed, attempt, resume)
            require_resumable(self._state, resume, plan, self._open)
        except Refusal as reason:
            raise self._refuse(reason) from None
        self._require_free(resume)
        if budget is not None:
            from adadp.accounting.accountants import get_accountant

            get_accountant(accountant).check(self._state.pairs(self._exact), relation)
        self._head(relation, unit)
        name, uid = f"run-{len(self._state.runs) + 1}", secrets.token_hex(16)
        self._append(
            {
                "kind": "run",
                "run": name,
                "uid": uid,
                "plan": plan,
                "resumes": resume,
                "neighbours": relation,
                "unit": unit,
                "seed": None if seed is None else self._state.fingerprint(seed),
                "budget": None if budget is None else [budget.epsilon, budget.delta],
                "accountant": accountant,
                "delta": self._delta if budget is None else budget.delta,
                "attempt": attempt or 0,
                "boot": boot_id(),
                **remarks.to_json(),
            }
        )
        allowance = None if budget is None else Allowance(budget, accountant, relation)
        note_left = None if self._unused is None else partial(self._unused.write, self._state.runs[name].number)
        planned, before = planned_steps(plan), self._state.before(name)
        run = Run(self, name, uid, allowance, planned, before, note_left=note_left)
        self._open[name] = run
        return run

    def _reclaim(self) -> None:
        """End the runs that died since the system was started: what they reserved and did not release is given back.

        Nobody else can be making them: whoever makes a run holds the file.
        """
        unused = self._unused
        if unused is None:
            return
        for run, record, event in self._state.died(boot_id(), self._open):
            left = min(unused.left(run.number, record), run.reserved[event])
            if left:
                unused.sync_digests()  # once it has ended, they count after a restart too
                self._give_back(run.id, {event: left}, "close")

    def _goes_on(self, run: str | None) -> bool:
        """Whether this run is the one that has all of the shared budget, or continues it."""
        plan = self._state.one_plan
        if plan is None or run is None:
            return False
        return run == plan.run or any(each.id == plan.run for each in self._state.ancestors(run))

    def _require_free(self, resume: str | None) -> None:
        if self._state.one_plan is not None and not self._goes_on(resume):
            raise self._refuse(
                f"{self._one_plan_text()}. Resume that run, or start a ledger of its own for this one, whose cost then "
                "comes on top; a larger budget (or fewer steps of the first run) leaves room for several runs"
            )

    def _one_plan_text(self) -> str:
        plan = self._state.one_plan
        assert plan is not None
        return (
            f"all of its shared budget belongs to the plan of {plan.run} ({plan.steps:,} steps by the "
            f"{plan.accountant} accountant), which leaves nothing that may be chosen later"
        )

    # ---- what runs ask ---------------------------------------------------------------------------------------------

    def _beside(self, run: str, *, step: bool) -> Canonical:
        """What everything but one run may have released by the time that it is asked again; `step` if it is about
        to take a step, and with it over what is left of a plan that it resumes.
        """
        return canonical(self._state.pairs(on_record, without=run, going_on=run if step else None))

    def _limits(self, run: Run, event: Event) -> Limits | None:
        """What bounds a run. If nothing has been released yet, settle here how a shared budget is kept."""
        self._settle_shared(run, event)
        shared = self._shared_limit(run)
        parts: list[Limit] = [part for part in (shared, run._allowance) if part is not None]
        return Limits(parts) if parts else None

    def _shared_limit(self, run: Run) -> Limit | None:
        if self._state.one_plan is not None:
            return PlanLimit(self._state.one_plan, mine=self._goes_on(run.id))
        return None if self._state.order is None else self._filter()

    def _settle_shared(self, run: Run, event: Event) -> None:
        state = self._state
        if state.budget is None or state.neighbours is None or state.order is not None or state.one_plan is not None:
            return
        steps, mine = run._to_come(event), run._allowance
        order, refusal = None, None
        try:
            order = fix_order(event, state.budget, state.neighbours)
        except BudgetExhaustedError as error:
            refusal = error
        held = order is not None and (
            steps is None or FilterLimit(state.budget, order, state.neighbours).certify({event: steps})
        )
        whole = mine is not None and mine.budget == state.budget and not state.pairs(on_record)
        if not held and whole and steps is not None and mine is not None and mine.certify({event: steps}):
            plan = {"event": event_to_json(event), "steps": steps, "accountant": mine.accountant}
            self._append({"kind": "one-plan", "run": run.id, **plan})
        elif refusal is not None:
            raise refusal
        else:
            self._append({"kind": "order", "order": order})

    def _trim(self, run: str) -> bool:
        """Have the other open runs give back what they reserved and did not use. True if any did."""
        others = [other for name, other in self._open.items() if name != run]
        return sum(other._trim() for other in others) > 0

    def _unsettle(self, run: str, limits: Limits | None) -> None:
        """Before `run` reserves within `limits`: have open runs under other budgets give back what they
        did not use, so that their next release is held against their budget again.
        """
        for name, other in self._open.items():
            theirs = other._limits
            if name != run and theirs is not None and not (limits and limits.covers(theirs)):
                other._trim()

    def _cut_plan(self, run: str, steps: int) -> None:
        """The budget holds only so many steps of the plan, fixed before they begin: no more are charged."""
        self._append({"kind": "plan", "run": run, "steps": steps})

    def _reserve(self, run: str, event: Event, count: int) -> int:
        """Returns the number of the record."""
        self._append({"kind": "reserve", "run": run, "event": event_to_json(event), "count": count})
        return self._state.count

    def _give_back(self, run: str, unused: Mapping[Event, int], kind: str = "give-back") -> None:
        """Lower the run's reservations by what it did not release."""
        rows = [[event_to_json(event), count] for event, count in unused.items()]
        self._append({"kind": kind, "run": run, "unused": rows})

    def _note(self, run: str, remarks: Remarks) -> None:
        """Keep what is new of `remarks`. The run may have ended: what is found out late counts too."""
        with self._mutex:
            if remarks.without(self._state.runs[run].remarks):
                self._require_owner()
                self._writing(lambda: self._write_note(run, remarks))

    def _write_note(self, run: str, remarks: Remarks) -> None:
        new = remarks.without(self._state.runs[run].remarks)  # another process may have noted some of it meanwhile
        if new:
            self._append({"kind": "note", "run": run, **new.to_json()})

    def _closed(self, run: str, unused: Mapping[Event, int]) -> None:
        """End the run: lower its reservations and let go of the file if no other run is open."""
        with self._mutex:
            try:
                self._give_back(run, unused, "close")
            finally:
                self._open.pop(run, None)
                if not self._open:
                    self._unlock()

    def close(self) -> None:
        """Close every open run."""
        for run in tuple(self._open.values()):
            run.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
