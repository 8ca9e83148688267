"""What a ledger's records say, and nothing about files: replay them in order and ask.

| record | says |
| --- | --- |
| ledger | version, dataset, unit, relation, shared budget; the first, once |
| upgrade | from here on version 2: written once, before the first new record in a file of version 1, so that programs that know version 1 only refuse the file and do not miss what follows |
| run | a run starts: plan, uid, unit, relation, seed, budget, remarks |
| plan | its budget does not hold all planned steps: how many it will make at most |
| reserve, give-back, close | releases that may happen, that did not, and the run's end |
| note | remarks that came up later, also after the run's end |
| inherit | runs that were made elsewhere and whose weights were loaded here |
| order, one-plan | how the shared budget is kept (`shared`): fixed once, before the first reservation |
"""  # noqa: E501  (a table's rows are one line each)

from __future__ import annotations

import hmac
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adadp.accounting.accountant import require_delta
from adadp.accounting.budget import Budget
from adadp.accounting.chain import Record
from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, Neighbours, Uncovered, event_from_json
from adadp.accounting.planned import as_planned, steps_in
from adadp.accounting.remarks import NO_REMARKS, Remarks
from adadp.accounting.shared import OnePlan
from adadp.accounting.spending import DEFAULT_UNIT, CarriedRun, larger

JSON = Any
Pairs = list[tuple[Event, int]]
VERSION = 3  # 2 with the unit of privacy in the header. Files of version 2 stay what they are
UPGRADED = 2  # what files of version 1 become
MOST_RELEASES = 2**53  # in one record: accountants compute with floats


class Refusal(Exception):  # noqa: N818  (the ledger makes a LedgerError of it, with its path)
    """The records, or what is to join them, belong to something else; the text says to what."""


@dataclass
class RunSummary:
    """What the ledger knows of one run.

    `reserved` is what it may have released (once it has closed: what it did release). `planned` is how many steps it
    is charged for from the first on, those of the runs that it resumes included; None where no number was declared.
    `number` counts runs from 0. `seed` is the fingerprint of its seed, and `attempt` which of the noises that the seed
    gives for a lot the run draws. `boot` says in which time between two starts of the system it ran, and `last` which
    record reserved last, and what, if nothing was given back since (`unused`). `delta` is the one that it declared.
    """

    id: str
    plan: dict[str, JSON]
    resumes: str | None = None
    reserved: dict[Event, int] = field(default_factory=dict)
    closed: bool = False
    uid: str = ""
    unit: str = DEFAULT_UNIT
    planned: int | None = None
    remarks: Remarks = NO_REMARKS
    number: int = 0
    seed: str | None = None
    attempt: int = 0
    boot: str | None = None
    last: tuple[int, Event] | None = None
    delta: float | None = None


View = Callable[[RunSummary], Mapping[Event, int]]
"""How much a run counts for before its plan is looked at."""


def on_record(run: RunSummary) -> Mapping[Event, int]:
    """All that may have been released by the time that somebody asks again."""
    return run.reserved


def planned_steps(plan: Mapping[str, JSON]) -> int | None:
    """The number of steps that a plan declares, if it does."""
    steps = plan.get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


class LedgerState:
    """The state after some records. What is given beforehand, the records have to agree with.

    A ledger has one neighbouring relation and one unit of privacy. Both are None until something settles them.
    """

    def __init__(
        self, dataset: str | None, neighbours: Neighbours | None, budget: Budget | None, unit: str | None = None
    ) -> None:
        self.dataset, self.neighbours, self.budget, self.unit = dataset, neighbours, budget, unit
        self.version = VERSION
        self.key = b""
        self.runs: dict[str, RunSummary] = {}
        self.seeds: set[str] = set()
        self.carried: dict[str, CarriedRun] = {}
        self.order: float | None = None
        self.one_plan: OnePlan | None = None
        self.count = 0  # of records

    # ---- one record after the other --------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Take in the next record. `Refusal`, or an error of the kind that nonsense causes, if it does not fit."""
        self.count += 1
        kind = record["kind"]
        if (kind == "ledger") == bool(self.key):
            raise ValueError("a ledger has one header, at its start")
        known = _SINCE.get(kind)
        if known is None or (self.version < known and self.key):
            raise ValueError(f"a record of kind {kind!r}, perhaps from a later version")
        getattr(self, "_" + kind.replace("-", "_"))(record)

    def _ledger(self, record: Record) -> None:
        if type(record["version"]) is not int or not 1 <= record["version"] <= VERSION:
            raise Refusal(f"it is of version {record['version']}, and this adadp reads up to version {VERSION}")
        self.version = record["version"]
        if self.dataset is not None and record["dataset"] != self.dataset:
            raise Refusal(f"it belongs to the dataset {record['dataset']!r}, not to {self.dataset!r}")
        self.dataset = _text(record["dataset"], optional=True)
        shared = record.get("budget")
        fixed = None if shared is None else Budget(*shared)
        if self.budget is not None and self.budget != fixed:
            raise Refusal(
                f"its shared budget was fixed when it was made: {_budget(fixed)}, not {_budget(self.budget)}. Open it "
                "without budget=, or start another ledger"
            )
        self.budget = fixed
        self.settle_header(record)
        self.key = bytes.fromhex(record["key"])

    def _upgrade(self, record: Record) -> None:
        if self.version != 1 or record["version"] != UPGRADED:
            raise ValueError(f"an upgrade from version {self.version} to {record['version']}")
        self.version = UPGRADED

    def settle_header(self, record: Record) -> None:
        """Take relation and unit from a header: null where nothing had settled them when it was written."""
        if record["neighbours"] is not None:
            self._settle_neighbours(Neighbours(record["neighbours"]))
        if record["version"] == VERSION and record["unit"] is not None:
            self._settle_unit(record["unit"])

    def _settle_neighbours(self, relation: Neighbours) -> None:
        if self.neighbours is not None and self.neighbours is not relation:
            raise Refusal(f"it holds guarantees for {relation} neighbours, not for {self.neighbours}")
        self.neighbours = relation

    def _settle_unit(self, unit: str) -> None:
        if not _text(unit).strip():
            raise ValueError("a unit of privacy without a name")
        if self.unit not in (None, unit):
            raise Refusal(f"it protects {unit!r}, not {self.unit!r}: one ledger, one unit")
        self.unit = unit

    def _run(self, record: Record) -> None:
        self._settle_neighbours(Neighbours(record["neighbours"]))
        name, plan = _text(record["run"]), dict(record["plan"])
        summary = RunSummary(name, plan, _text(record["resumes"], optional=True), planned=planned_steps(plan))
        if self.version == 1:
            self._read_version_1(summary, record)
        else:
            summary.uid, summary.remarks = _text(record["uid"]), Remarks.from_json(record)
            if self.version == VERSION or record["unit"] is not None:  # in version 2 the usual one is left out
                summary.unit = _text(record["unit"])
        self._settle_unit(summary.unit)
        summary.number, summary.seed = len(self.runs), record["seed"]
        summary.attempt, summary.boot = record.get("attempt", 0), record.get("boot")
        declared = record.get("delta", None if record["budget"] is None else record["budget"][1])
        if declared is not None:
            summary.delta = float(declared)
            require_delta(summary.delta)
        if name in self.runs or summary.resumes not in (None, *self.runs):
            raise ValueError(f"{name} is there already, or resumes a run that is not")
        self.runs[name] = summary
        if record["seed"] is not None:
            self.seeds.add(_text(record["seed"]))

    def _read_version_1(self, summary: RunSummary, record: Record) -> None:
        """Runs of version 1 have no uid, and where a budget ended them nothing says how many steps it allowed."""
        summary.uid = self.derived(summary.id)
        if record["budget"] is not None:
            summary.planned = None

    def derived(self, purpose: str) -> str:
        """An id that is always the same for this ledger, and tells nobody its key."""
        return hmac.new(self.key, f"uid {purpose}".encode(), "sha256").hexdigest()[:32]

    def fingerprint(self, seed: int) -> str:
        """What stands for a seed in this ledger."""
        return hmac.new(self.key, f"seed {operator.index(seed)}".encode(), "sha256").hexdigest()

    def _plan(self, record: Record) -> None:
        summary, steps = self.runs[record["run"]], record["steps"]
        if type(steps) is not int or summary.planned is None or not 0 <= steps < summary.planned or summary.closed:
            raise ValueError(f"{summary.id} cannot plan {steps!r} steps now")
        summary.planned = steps

    def _reserve(self, record: Record) -> None:
        event, count = event_from_json(record["event"]), record["count"]
        summary = self.runs[record["run"]]
        if type(count) is not int or not 1 <= count <= MOST_RELEASES or summary.closed:
            raise ValueError("a reservation of nothing, of more than can be, or after the run closed")
        if self.budget is not None and self.order is None and self.one_plan is None:
            raise ValueError("a reservation before it was settled how the shared budget is kept")
        summary.reserved[event] = summary.reserved.get(event, 0) + count
        summary.last = self.count, event

    def _give_back(self, record: Record) -> None:
        summary = self.runs[record["run"]]
        if summary.closed:
            raise ValueError(f"{summary.id} is closed already")
        for value, count in record["unused"]:
            event = event_from_json(value)
            if type(count) is not int or not 0 <= count <= summary.reserved.get(event, 0):
                raise ValueError(f"{summary.id} gives back more than it reserved")
            summary.reserved[event] -= count
        summary.last = None

    def _close(self, record: Record) -> None:
        self._give_back(record)
        self.runs[record["run"]].closed = True

    def _note(self, record: Record) -> None:
        summary = self.runs[record["run"]]
        summary.remarks = summary.remarks.joined(Remarks.from_json(record))

    def _inherit(self, record: Record) -> None:
        for value in record["runs"]:
            run = CarriedRun.from_json(value)
            if run.same_as(self.dataset):
                self._settle_neighbours(run.neighbours)
                self._settle_unit(run.unit)
            before = self.carried.get(run.uid)
            self.carried[run.uid] = run if before is None else before.joined(run)

    def _order(self, record: Record) -> None:
        self._decide()
        self.order = float(record["order"])

    def _one_plan(self, record: Record) -> None:
        self._decide()
        run, event = self.runs[record["run"]], event_from_json(record["event"])
        self.one_plan = OnePlan(run.id, event, record["steps"], record["accountant"])

    def _decide(self) -> None:
        if self.budget is None or self.order is not None or self.one_plan is not None:
            raise ValueError("it is settled once how a shared budget is kept, and only where there is one")

    # ---- what it comes to ------------------------------------------------------------------------------------------

    def ancestors(self, name: str | None) -> Iterable[RunSummary]:
        """The runs that this one continues, nearest first."""
        while name is not None and (name := self.runs[name].resumes) is not None:
            yield self.runs[name]

    def newest(self, uid: str) -> RunSummary | None:
        """The last of the runs that continue the one called `uid`, which is that run itself if none does."""
        found = next((run for run in self.runs.values() if run.uid == uid), None)
        for run in self.runs.values():  # oldest first
            if found is not None and run.resumes == found.id:
                found = run
        return found

    def died(self, boot: str | None, alive: Container[str]) -> list[tuple[RunSummary, int, Event]]:
        """Runs that did not close since the system was started as `boot`, with the record and event reserved last."""
        return [
            (run, *run.last)
            for run in self.runs.values()
            if run.last is not None and not run.closed and run.id not in alive and boot is not None and run.boot == boot
        ]

    def only_in_line(self, seed: str | None, name: str) -> bool:
        """Whether all runs that had the seed of this fingerprint are this one, and those that it resumed."""
        line = {name, *(run.id for run in self.ancestors(name))}
        return all(run.id in line for run in self.runs.values() if run.seed == seed)

    def before(self, name: str) -> int:
        """How many steps of its plan the runs that it continues may have made."""
        return sum(steps_in(run.reserved) for run in self.ancestors(name))

    def charges(self, view: View, *, going_on: str | None = None) -> dict[str, dict[Event, int]]:
        """What each run counts for, by name: its plan from the first step on.

        A plan that was resumed is charged once: what is left of it counts for the last run that made a step of it. So
        does a run about to make one, `going_on`.
        """
        seen = {name: view(run) for name, run in self.runs.items()}
        active = [name for name, counts in seen.items() if steps_in(counts) or name == going_on]
        passed_on = {run.id for name in active for run in self.ancestors(name)}
        result = {}
        for name, run in self.runs.items():
            owed = None if run.planned is None or name in passed_on else run.planned - self.before(name)
            result[name] = as_planned(seen[name], owed)
            if run.uid in self.carried:  # its weights came back with more than this file knows, from a lost copy of it
                result[name] = larger(result[name], dict(self.carried[run.uid].counts))
        return result

    def inherited(self) -> list[CarriedRun]:
        """Runs on this dataset that were made elsewhere."""
        own = {run.uid for run in self.runs.values()}
        return [run for run in self.carried.values() if run.uid not in own and run.same_as(self.dataset)]

    def elsewhere(self) -> list[CarriedRun]:
        """Runs on other datasets."""
        return [run for run in self.carried.values() if not run.same_as(self.dataset)]

    def pairs(self, view: View, *, without: str | None = None, going_on: str | None = None) -> Pairs:
        """Every release on this dataset, as events. `without` leaves a run's own out."""
        charges = self.charges(view, going_on=going_on)
        own = [pair for name, counts in charges.items() if name != without for pair in counts.items()]
        if self.order is not None:  # this ledger's filter admits each release, wherever it was made
            return own + [pair for run in self.inherited() for pair in run.counts]
        plain = [pair for run in self.inherited() if run.filter is None for pair in run.counts]
        # Runs of one filter were chosen after seeing one another: the filter's budget is all that bounds them. A filter
        # admits nothing that no proof covers, so such a release was outside of it and stays.
        filtered = [run for run in self.inherited() if run.filter is not None]
        blocks = dict.fromkeys(run.filter for run in filtered if run.filter is not None)
        outside = [pair for run in filtered for pair in run.counts if isinstance(pair[0], Uncovered)]
        return own + plain + outside + [(origin.event, 1) for origin in blocks]

    def remarks(self) -> Remarks:
        """Those of every run on this dataset, in order."""
        found = NO_REMARKS
        for run in self.runs.values():
            found = found.joined(self.remarks_of(run))
        for carried in self.inherited():
            found = found.joined(carried.remarks)
        return found

    def remarks_of(self, run: RunSummary) -> Remarks:
        """Those of one run of this ledger."""
        found, declared = run.remarks, planned_steps(run.plan)
        if run.planned is None and declared is not None and 0 < self.before(run.id) + steps_in(run.reserved) < declared:
            # Version 1: the budget allowed fewer steps than were planned, or somebody ended the run.
            assumption = f"{run.id} ended before its {declared:,} planned steps because its budget did"
            found = found.joined(Remarks(assumptions=(assumption,)))
        if run.uid in self.carried:
            found = found.joined(self.carried[run.uid].remarks)
        return found

    def notes(self, view: View, live: Iterable[str]) -> tuple[str, ...]:
        """Plans that were not made to their end, and what other datasets paid."""
        found = []
        for name, counts in self.charges(view).items():
            run = self.runs[name]
            made = self.before(name) + steps_in(view(run))
            if run.planned is not None and steps_in(counts) > steps_in(view(run)) and made < run.planned:
                known = "" if run.closed or name in live else "at most "
                found.append(f"{known}{made:,} of {run.planned:,} planned steps were made: charged as planned ({name})")
        for dataset, releases, reasons in self._apart():
            none = "" if not reasons else f", and which have no guarantee there: {'; '.join(reasons)}"
            plural = "release" if releases == 1 else "releases"
            found.append(
                f"these weights also carry {releases:,} {plural} on dataset {dataset!r}, which are not part of this "
                f"number{none}"
            )
        return tuple(found)

    def _apart(self) -> list[tuple[str | None, int, tuple[str, ...]]]:
        from adadp.accounting.composition import uncovered_reasons

        rows: dict[str | None, tuple[int, tuple[str, ...]]] = {}
        for run in self.elsewhere():
            releases, reasons = rows.get(run.dataset, (0, ()))
            more = (*run.remarks.reasons, *uncovered_reasons(run.counts))
            total = releases + sum(count for _, count in run.counts)
            rows[run.dataset] = total, tuple(dict.fromkeys((*reasons, *more)))
        return [(dataset, *row) for dataset, row in rows.items()]

    def news(self, runs: Iterable[CarriedRun], view: View) -> list[CarriedRun]:
        """What `runs` add to the state. `Refusal` where they cannot be put together with what is here."""
        charges = self.charges(view)
        own = {run.uid: (run, charges[name]) for name, run in self.runs.items()}
        relation, unit, found = self.neighbours, self.unit, []
        for run in runs:
            if run.uid in own and run.dataset != self.dataset:
                name = own[run.uid][0].id
                raise Refusal(f"{name} is on {self.dataset!r} here, and on {run.dataset!r} in the weights")
            if run.same_as(self.dataset):
                relation, unit = relation or run.neighbours, unit or run.unit
                if run.neighbours is not relation:
                    raise Refusal(
                        f"it holds guarantees for {relation} neighbours, and the weights were paid for under "
                        f"{run.neighbours} neighbours: the two do not add up"
                    )
                if run.unit != unit:
                    raise Refusal(f"it protects {unit!r}, and the weights were paid for by {run.unit!r}")
            if run.uid in self.carried:
                try:
                    run = self.carried[run.uid].joined(run)
                except ValueError as error:
                    raise Refusal(str(error)) from None
                if run != self.carried[run.uid]:
                    found.append(run)
            elif run.uid not in own or self._more(run, *own[run.uid]):
                found.append(run)
        return found

    @staticmethod
    def _more(run: CarriedRun, own: RunSummary, counts: Mapping[Event, int]) -> bool:
        more = any(count > counts.get(event, 0) for event, count in run.counts)
        return more or bool(run.remarks.without(own.remarks))

    def composition(self, view: View) -> Canonical:
        """All of it in a form that accountants bound: adaptively chosen runs as their filter's budget."""
        pairs = canonical(self.pairs(view))
        if self.order is None or not pairs or self.budget is None or self.neighbours is None:
            return pairs
        from adadp.accounting.shared import FilterLimit

        return ((FilterLimit(self.budget, self.order, self.neighbours).event, 1),)


def _text(value: JSON, *, optional: bool = False) -> Any:
    if not (isinstance(value, str) or (optional and value is None)):
        raise TypeError(f"{value!r} where a text is expected")
    return value


def _budget(budget: Budget | None) -> str:
    return "none" if budget is None else f"(epsilon {budget.epsilon:g}, delta {budget.delta:g})"


_SINCE = {
    **dict.fromkeys(("ledger", "upgrade", "run", "reserve", "give-back", "close"), 1),
    **dict.fromkeys(("plan", "note", "inherit", "order", "one-plan"), 2),
}
