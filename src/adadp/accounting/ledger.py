"""The durable record of everything that was released on one dataset.

A run reserves releases, has the reservation on the disk, and only then releases. One ledger serves many
runs, so tuning on private data is charged too.

Guarantee: after a crash at any point the ledger holds at least what was released, and at most one reservation
(`MOST_RESERVED` releases) more, or the rest of the plan where a number of steps was planned. A run that did
not close is charged in full for what it reserved. A ledger that was edited, truncated, or belongs to another
dataset, plan, neighbouring relation or shared budget is refused with the reason, and nothing in it is
overwritten.

A run's seed, if it has one, is remembered as a keyed fingerprint and refused a second time. The key is in the
ledger: whoever holds the ledger can find a seed of few bits by trying. Noise without a seed is the normal
case.
"""

from __future__ import annotations

import copy
import hmac
import json
import operator
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from adadp.accounting.books import JSON, VERSION, Books, Refusal, RunSummary, on_record, planned_steps
from adadp.accounting.budget import Allowance, Budget
from adadp.accounting.chain import Chain, Record, canonical_json
from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, Neighbours, Uncovered, event_to_json
from adadp.accounting.remarks import Remarks
from adadp.accounting.run import MOST_RESERVED, Run
from adadp.accounting.shared import FilterLimit, Limit, Limits, PlanLimit, fix_order
from adadp.accounting.spending import DEFAULT_UNIT, CarriedRun, FilterOrigin, spending_from_json, spending_to_json
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError

if TYPE_CHECKING:
    from adadp.accounting.guarantee import Guarantee

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


class Ledger:
    """Every release on one dataset. `path` None keeps it in memory: nothing then survives the process."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dataset: str | None = None,
        neighbours: Neighbours | None = Neighbours.ADD_REMOVE,
        budget: Budget | None = None,
    ) -> None:
        """Open, and verify if it exists. A new file is written by the first `start` and needs a `dataset`.

        `dataset` is a declared name or a `dataset_fingerprint`. `neighbours` None takes what the file says,
        or what the first run's plan says under "neighbours". `budget` is shared by all runs, may be chosen
        adaptively from one run to the next, and is fixed when the ledger is made (`shared`); None takes what
        the file says.
        """
        self.path = None if path is None else Path(path)
        self._books = Books(dataset, None if neighbours is None else Neighbours(neighbours), budget)
        self._chain = None if self.path is None else Chain(self.path)
        self._open: dict[str, Run] = {}
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        if self._chain is not None and self._chain.exists():
            self._replay(self._chain.read())

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> str | None:
        """The name of the data, if it has one."""
        return self._books.dataset

    @property
    def neighbours(self) -> Neighbours | None:
        """The relation of everything in it; None until the first run settles it."""
        return self._books.neighbours

    @property
    def budget(self) -> Budget | None:
        """What all runs share, if that was fixed when the ledger was made."""
        return self._books.budget

    def _refuse(self, reason: object) -> LedgerError:
        name = self.path or "(in memory)"
        return LedgerError(f"the ledger {name} is refused: {reason}. Nothing was changed")

    def _replay(self, records: Sequence[Record]) -> None:
        """Rebuild what the ledger knows from its records."""
        books = Books(self.dataset, self.neighbours, self.budget)
        for number, record in enumerate(records, 1):
            try:
                books.apply(record)
            except Refusal as reason:
                raise self._refuse(reason) from None
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise self._refuse(f"record {number} makes no sense ({error})") from None
        self._books = books

    def _refresh(self) -> Books:
        """Read the file again unless this process holds it: another one may have charged since."""
        held = self._chain is None or (self._chain.locked and os.getpid() == self._owner)
        if self._chain is not None and not held and (self._books.key or self._chain.exists()):
            self._replay(self._chain.read())
        return self._books

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

    def charged(self) -> Canonical:
        """The releases charged so far, without the rest of any plan. To show progress: no guarantee is made of it."""
        with self._mutex:
            books = self._refresh()
            own = [pair for run in books.runs.values() for pair in self._exact(run).items()]
            return canonical([*own, *(pair for run in books.inherited() for pair in run.counts)])

    def charges(self) -> dict[str, Canonical]:
        """What each run of this ledger counts for, by id: as planned where a number of steps was planned."""
        with self._mutex:
            charges = self._refresh().charges(self._exact)
            return {name: canonical(counts) for name, counts in charges.items()}

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
            books = self._refresh()
            return books.remarks().joined(Remarks(notes=books.notes(self._exact, self._open)))

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
    ) -> Guarantee:
        """What may be said about everything in this ledger, with the remarks of all its runs and those given here.

        `accountant` None means `pld`, or `rdp` where no distribution is known. What a privacy filter admitted is
        always accounted for by `rdp`: its price is its whole budget, whatever was used of it. `unit` is the unit that
        the plans declared ("one example" where they did not).
        """
        from adadp.accounting.statement import over

        with self._mutex:
            given = Remarks.of(assumptions, reasons, untried, notes)
            remarks = self._remarks().joined(given)
            return over(self._books, self._exact, remarks, delta, accountant, unit)

    # ---- spending that follows weights -----------------------------------------------------------------------------

    def spending(self) -> dict[str, Any]:
        """Everything that weights trained under this ledger may depend on, as plain values (`spending`).

        All runs of the ledger are in it and all that they inherited: settings of a run are chosen by earlier ones.
        Runs with planned steps are in it as planned.
        """
        with self._mutex:
            books = self._refresh()
            charges = books.charges(self._exact)
            rows = [
                CarriedRun(
                    run.uid,
                    books.dataset,
                    run.unit or DEFAULT_UNIT,
                    books.neighbours or Neighbours.ADD_REMOVE,
                    canonical(charges[run.id]),
                    books.remarks_of(run),
                    self._origin(),
                )
                for run in books.runs.values()
            ]
            own = {run.uid for run in rows}
            rows = [run for run in rows if run.counts or run.remarks.reasons]
            return spending_to_json([*rows, *(run for run in books.carried.values() if run.uid not in own)])

    def _origin(self) -> FilterOrigin | None:
        books = self._books
        if books.order is None or books.budget is None:
            return None
        block = self._filter().event
        return FilterOrigin(books.derived("filter"), block.order, block.divergence)

    def _filter(self) -> FilterLimit:
        books = self._books
        assert books.budget is not None
        assert books.order is not None
        assert books.neighbours is not None
        return FilterLimit(books.budget, books.order, books.neighbours)

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
            news = self._books.news(runs, self._exact)
        except Refusal as reason:
            raise self._refuse(reason) from None
        if not news:
            return
        for run in self._open.values():  # what they reserved was within their budgets as they were
            run._trim()
        self._admit(news)
        self._append({"kind": "inherit", "runs": [run.to_json() for run in news]})

    def _admit(self, news: Sequence[CarriedRun]) -> None:
        """Hold what is inherited against the shared budget, if there is one."""
        books = self._books
        here = [run for run in news if run.same_as(books.dataset) and run.counts]
        if books.budget is None or not here:
            return
        counts = [pair for run in here for pair in run.counts]
        for event, _ in counts:
            if isinstance(event, Uncovered):
                raise self._refuse(f"a shared budget cannot be kept over what no proof covers ({event.reason})")
        if books.one_plan is not None:
            raise self._refuse(f"{self._one_plan_text()}, and these weights were paid for by other runs")
        relation = books.neighbours or here[0].neighbours
        order = books.order
        if order is None:  # as before a release: nothing of this ledger's own has been released yet
            order = fix_order(max(counts, key=lambda pair: pair[1])[0], books.budget, relation)
        then = copy.copy(books)
        then.order, then.carried = order, {**books.carried, **{run.uid: run for run in here}}
        limit = FilterLimit(books.budget, order, relation)
        if not limit.certify(dict(canonical(then.pairs(on_record)))):
            raise BudgetExhaustedError(
                f"{limit} does not hold what these weights cost: they cannot be trained on under it. Use a ledger "
                "with a larger budget, or none"
            )
        if books.order is None:
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
        assumptions: Sequence[str] = (),
        reasons: Sequence[str] = (),
        untried: Sequence[str] = (),
    ) -> Run:
        """Begin a run. Its releases are charged through the `Run`, each before it happens.

        `plan` is plain JSON that says what the run means to do. "steps" in it is a number of steps that is charged
        from the first step on, made or not (`planned`); "unit" is the unit of privacy, "one example" unless given.
        `budget` bounds everything in the ledger together, by `accountant`, for plans declared together. `resume` is
        the id of a run that this one continues: its plan has to be the same, and what it reserved stays charged.
        `assumptions`, `reasons` for *none*, and what was `untried` are kept and printed by every guarantee.
        """
        self._require_owner()
        remarks = Remarks.of(assumptions, reasons, untried)
        return self._writing(lambda: self._start(dict(plan), seed, budget, accountant, resume, remarks))

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
            if not self._books.key:
                self._books.apply(self._header())
            return
        if self._chain.locked:
            return
        if not self._chain.exists():
            self._require_dataset()  # before a file is made
        self._replay_locked(self._chain)

    def _replay_locked(self, chain: Chain) -> None:
        records = chain.lock()
        try:
            self._replay(records)
            if not self._books.key:
                self._append(self._header())
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self._chain is not None:
            self._chain.unlock()

    def _require_dataset(self) -> None:
        if self.path is not None and not self.dataset:
            raise ConfigurationError(
                f"a new ledger ({self.path}) has to know its dataset: pass dataset=, a name or a keyed "
                "fingerprint"
            )

    def _header(self) -> Record:
        self._require_dataset()
        return {
            "kind": "ledger",
            "version": VERSION,
            "dataset": self.dataset,
            "neighbours": self.neighbours,
            "key": secrets.token_hex(32),
            "budget": None if self.budget is None else [self.budget.epsilon, self.budget.delta],
        }

    def _append(self, record: Record) -> None:
        """On the disk first, then in memory."""
        with self._mutex:
            if self._books.version == 1 and self._books.key:
                self._write({"kind": "upgrade", "version": VERSION})
            self._write(record)

    def _write(self, record: Record) -> None:
        if self._chain is not None:
            self._chain.append(record)
        self._books.apply(record)

    def _start(
        self,
        plan: dict[str, JSON],
        seed: int | None,
        budget: Budget | None,
        accountant: str,
        resume: str | None,
        remarks: Remarks,
    ) -> Run:
        plan = json.loads(canonical_json(plan))  # a copy that nobody else can change
        relation, unit = self._relation(plan), self._unit(plan)
        fingerprint = None if seed is None else self._fingerprint(seed)
        if fingerprint in self._books.seeds:
            raise LedgerError(
                "this seed has been used in this ledger: the same noise twice protects nothing. Leave the "
                "seed out, or take a new one; a resumed run needs a new one too"
            )
        self._require_resumable(resume, plan)
        self._require_free(resume)
        if budget is not None:
            from adadp.accounting.accountants import get_accountant

            get_accountant(accountant).check(self._books.pairs(self._exact), relation)
        name, uid = f"run-{len(self._books.runs) + 1}", secrets.token_hex(16)
        self._append(
            {
                "kind": "run",
                "run": name,
                "uid": uid,
                "plan": plan,
                "resumes": resume,
                "neighbours": relation,
                "unit": unit,
                "seed": fingerprint,
                "budget": None if budget is None else [budget.epsilon, budget.delta],
                "accountant": accountant,
                **remarks.to_json(),
            }
        )
        allowance = None if budget is None else Allowance(budget, accountant, relation)
        run = Run(
            self, name, uid, allowance, planned_steps(plan), self._books.before(name), durable=self._chain is not None
        )
        self._open[name] = run
        return run

    def _relation(self, plan: Mapping[str, JSON]) -> Neighbours:
        relation = self.neighbours or Neighbours(plan.get("neighbours", Neighbours.ADD_REMOVE))
        if plan.get("neighbours", relation) != relation:
            asked = plan["neighbours"]
            raise self._refuse(f"it holds guarantees for {relation} neighbours, the plan is for {asked}")
        return relation

    def _unit(self, plan: Mapping[str, JSON]) -> str | None:
        unit = plan.get("unit")
        if unit is not None and (not isinstance(unit, str) or not unit.strip()):
            raise ConfigurationError(f"a plan's unit must be a text such as 'one example', not {unit!r}")
        if self._books.unit not in (None, unit or DEFAULT_UNIT):
            raise self._refuse(f"it protects {self._books.unit!r}, and the plan {unit or DEFAULT_UNIT!r}")
        return unit

    def _fingerprint(self, seed: int) -> str:
        return hmac.new(self._books.key, f"seed {operator.index(seed)}".encode(), "sha256").hexdigest()

    def _require_resumable(self, resume: str | None, plan: dict[str, JSON]) -> None:
        while resume is not None:
            summary = self._books.runs.get(resume)
            if summary is None:
                raise self._refuse(f"it has no run {resume!r} to resume")
            if resume in self._open:
                raise self._refuse(f"{resume} is still open and cannot be resumed")
            if canonical_json(summary.plan) != canonical_json(plan):
                raise self._refuse(f"{resume} belongs to another plan: {_difference(summary.plan, plan)}")
            resume = summary.resumes

    def _goes_on(self, run: str | None) -> bool:
        """Whether this run is the one that has all of the shared budget, or continues it."""
        plan = self._books.one_plan
        if plan is None or run is None:
            return False
        return run == plan.run or any(each.id == plan.run for each in self._books.ancestors(run))

    def _require_free(self, resume: str | None) -> None:
        if self._books.one_plan is not None and not self._goes_on(resume):
            raise self._refuse(
                f"{self._one_plan_text()}. Resume that run, or start a ledger of its own for this one, whose cost then "
                "comes on top; a larger budget (or fewer steps of the first run) leaves room for several runs"
            )

    def _one_plan_text(self) -> str:
        plan = self._books.one_plan
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
        return canonical(self._books.pairs(on_record, without=run, going_on=run if step else None))

    def _limits(self, run: Run, event: Event) -> Limits | None:
        """What bounds a run. If nothing has been released yet, settle here how a shared budget is kept."""
        self._settle_shared(run, event)
        shared = self._shared_limit(run)
        parts: list[Limit] = [part for part in (shared, run._allowance) if part is not None]
        return Limits(parts) if parts else None

    def _shared_limit(self, run: Run) -> Limit | None:
        if self._books.one_plan is not None:
            return PlanLimit(self._books.one_plan, mine=self._goes_on(run.id))
        return None if self._books.order is None else self._filter()

    def _settle_shared(self, run: Run, event: Event) -> None:
        books = self._books
        if books.budget is None or books.neighbours is None or books.order is not None or books.one_plan is not None:
            return
        steps, mine = run._to_come(event), run._allowance
        order, refusal = None, None
        try:
            order = fix_order(event, books.budget, books.neighbours)
        except BudgetExhaustedError as error:
            refusal = error
        held = order is not None and (
            steps is None or FilterLimit(books.budget, order, books.neighbours).certify({event: steps})
        )
        whole = mine is not None and mine.budget == books.budget and not books.pairs(on_record)
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

    def _reserve(self, run: str, event: Event, count: int) -> None:
        self._append({"kind": "reserve", "run": run, "event": event_to_json(event), "count": count})

    def _give_back(self, run: str, unused: Mapping[Event, int], kind: str = "give-back") -> None:
        """Lower the run's reservations by what it did not release."""
        rows = [[event_to_json(event), count] for event, count in unused.items()]
        self._append({"kind": kind, "run": run, "unused": rows})

    def _note(self, run: str, remarks: Remarks) -> None:
        """Keep what is new of `remarks`. The run may have ended: what is found out late counts too."""
        with self._mutex:
            if remarks.without(self._books.runs[run].remarks):
                self._require_owner()
                self._writing(lambda: self._write_note(run, remarks))

    def _write_note(self, run: str, remarks: Remarks) -> None:
        new = remarks.without(self._books.runs[run].remarks)  # another process may have noted some of it meanwhile
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


def _difference(old: Mapping[str, JSON], new: Mapping[str, JSON]) -> str:
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys)
