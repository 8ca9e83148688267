"""The durable record of everything that was released on one dataset.

A run reserves releases, has the reservation on the disk, and only then releases. One ledger serves many
runs, so tuning on private data is charged too.

Guarantee: after a crash at any point the ledger holds at least what was released, and at most one reservation
(`MOST_RESERVED` releases) more. A run that did not close is charged in full for what it reserved. A ledger
that was edited, truncated, or belongs to another dataset, plan or neighbouring relation is refused with the
reason, and nothing in it is overwritten.

A run's seed, if it has one, is remembered as a keyed fingerprint and refused a second time. The key is in the
ledger: whoever holds the ledger can find a seed of few bits by trying. Noise without a seed is the normal
case.
"""

from __future__ import annotations

import hmac
import json
import operator
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adadp.accounting.budget import Allowance, Budget
from adadp.accounting.chain import Chain, Record, canonical_json
from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, Neighbours, event_from_json, event_to_json
from adadp.accounting.run import MOST_RESERVED, Run
from adadp.errors import ConfigurationError, LedgerError

if TYPE_CHECKING:
    from adadp.accounting.guarantee import Guarantee

__all__ = ["MOST_RESERVED", "Budget", "Ledger", "Run", "RunSummary", "dataset_fingerprint"]

JSON = Any
_VERSION = 1


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


@dataclass
class RunSummary:
    """What the ledger knows of one run. `reserved` is what it is charged for."""

    id: str
    plan: dict[str, JSON]
    resumes: str | None = None
    reserved: dict[Event, int] = field(default_factory=dict)
    closed: bool = False


class Ledger:
    """Every release on one dataset. `path` None keeps it in memory: nothing then survives the process."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dataset: str | None = None,
        neighbours: Neighbours | None = Neighbours.ADD_REMOVE,
    ) -> None:
        """Open, and verify if it exists. A new file is written by the first `start` and needs a `dataset`.

        `dataset` is a declared name or a `dataset_fingerprint`. `neighbours` None takes what the file says,
        or what the first run's plan says under "neighbours".
        """
        self.path = None if path is None else Path(path)
        self.dataset, self.neighbours = dataset, None if neighbours is None else Neighbours(neighbours)
        self._chain = None if self.path is None else Chain(self.path)
        self._key = b""
        self._summaries: dict[str, RunSummary] = {}
        self._seeds: set[str] = set()
        self._open: dict[str, Run] = {}
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        if self._chain is not None and self._chain.exists():
            self._replay(self._chain.read())

    # -- reading
    # ------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> LedgerError:
        name = self.path or "(in memory)"
        return LedgerError(f"the ledger {name} is refused: {reason}. Nothing was changed")

    def _replay(self, records: Sequence[Record]) -> None:
        """Rebuild what the ledger knows from its records."""
        self._summaries, self._seeds, self._key = {}, set(), b""
        for number, record in enumerate(records, 1):
            try:
                self._apply(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self._refuse(f"record {number} makes no sense ({error})") from None

    def _apply(self, record: Record) -> None:
        kind = record["kind"]
        if (kind == "ledger") == bool(self._key):
            raise ValueError("a ledger has one header, at its start")
        if kind == "ledger":
            self._apply_header(record)
        elif kind == "run":
            relation = Neighbours(record["neighbours"])
            self._settle_neighbours(relation)
            summary = RunSummary(record["run"], record["plan"], record["resumes"])
            self._summaries[summary.id] = summary
            if record["seed"] is not None:
                self._seeds.add(record["seed"])
        elif kind == "reserve":
            event, count = event_from_json(record["event"]), int(record["count"])
            summary = self._summaries[record["run"]]
            reserved = summary.reserved
            if count < 1 or summary.closed:
                raise ValueError("a reservation of nothing, or after the run closed")
            reserved[event] = reserved.get(event, 0) + count
        elif kind == "give-back":
            self._apply_unused(record)
        elif kind == "close":
            self._apply_unused(record)
            self._summaries[record["run"]].closed = True
        else:
            raise ValueError(f"a record of kind {kind!r}, perhaps from a later version")

    def _apply_header(self, record: Record) -> None:
        if record["version"] != _VERSION:
            raise self._refuse(f"it is of version {record['version']}, not {_VERSION}")
        if self.dataset is not None and record["dataset"] != self.dataset:
            raise self._refuse(f"it belongs to the dataset {record['dataset']!r}, not to {self.dataset!r}")
        self.dataset = record["dataset"]
        if record["neighbours"] is not None:
            self._settle_neighbours(Neighbours(record["neighbours"]))
        self._key = bytes.fromhex(record["key"])

    def _settle_neighbours(self, relation: Neighbours) -> None:
        if self.neighbours is not None and self.neighbours is not relation:
            raise self._refuse(f"it holds guarantees for {relation} neighbours, not for {self.neighbours}")
        self.neighbours = relation

    def _apply_unused(self, record: Record) -> None:
        summary = self._summaries[record["run"]]
        if summary.closed:
            raise ValueError(f"{summary.id} is closed already")
        for value, count in record["unused"]:
            event = event_from_json(value)
            if not 0 <= count <= summary.reserved.get(event, 0):
                raise ValueError(f"{summary.id} gives back more than it reserved")
            summary.reserved[event] -= count

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """Every run, oldest first."""
        with self._mutex:
            self._refresh()
            return tuple(self._summaries.values())

    def _refresh(self) -> None:
        """Read the file again unless this process holds it: another one may have charged since."""
        if self._chain is None or (self._chain.locked and os.getpid() == self._owner):
            return
        if self._summaries or self._chain.exists():
            self._replay(self._chain.read())

    def composition(self) -> Canonical:
        """Everything charged, over all runs. Runs that died are charged for all that they reserved."""
        with self._mutex:
            self._refresh()
            return self._composition(without=None)

    def _composition(self, without: str | None) -> Canonical:
        pairs: list[tuple[Event, int]] = []
        for summary in self._summaries.values():
            if summary.id == without:
                continue
            live = self._open.get(summary.id) if os.getpid() == self._owner else None
            pairs.extend((summary.reserved if live is None else live.charged()).items())
        return canonical(pairs)

    def _reserved_beside(self, run: str) -> Canonical:
        """What all runs but one may have released by the time that they are asked again."""
        others = (summary for summary in self._summaries.values() if summary.id != run)
        return canonical([pair for summary in others for pair in summary.reserved.items() if pair[1]])

    def _trim(self, run: str) -> bool:
        """Have the other open runs give back what they reserved and did not use. True if any did."""
        others = [other for name, other in self._open.items() if name != run]
        return sum(other._trim() for other in others) > 0

    def _unsettle(self, run: str, allowance: Allowance | None) -> None:
        """Before `run` reserves within `allowance`: have open runs under other budgets give back what they
        did not use, so that their next release is held against their budget again.
        """
        for name, other in self._open.items():
            theirs = other._allowance
            if name != run and theirs is not None and not (allowance and allowance.covers(theirs)):
                other._trim()

    def guarantee(self, delta: float, **options: Any) -> Guarantee:
        """What may be said about everything in this ledger. `options` as for `make_guarantee`."""
        from adadp.accounting.guarantee import make_guarantee

        options.setdefault("neighbours", self.neighbours or Neighbours.ADD_REMOVE)
        return make_guarantee(self.composition(), delta, **options)

    # -- writing
    # ------------------------------------------------------------------------------------------------

    def start(
        self,
        plan: Mapping[str, JSON],
        *,
        seed: int | None = None,
        budget: Budget | None = None,
        accountant: str = "pld",
        resume: str | None = None,
    ) -> Run:
        """Begin a run. Its releases are charged through the `Run`, each before it happens.

        `plan` is plain JSON that says what the run means to do; "steps" in it lets messages say how many were
        left out. `budget` bounds everything in the ledger together, by `accountant`. `resume` is the id of a
        run that this one continues: its plan has to be the same, and what it reserved stays charged.
        """
        if os.getpid() != self._owner:
            raise LedgerError("a ledger belongs to the process that opened it: open it again in this one")
        with self._mutex:
            taken = self._lock()
            try:
                return self._start(dict(plan), seed, budget, accountant, resume)
            except BaseException:
                if taken and not self._open:
                    self._unlock()
                raise

    def _lock(self) -> bool:
        """Hold the file for writing; True if this call took it."""
        if self._chain is None:
            if not self._key:
                self._apply(self._header())
            return False
        if self._chain.locked:
            return False
        if not self._chain.exists():
            self._require_dataset()  # before a file is made
        self._replay(self._chain.lock())
        try:
            if not self._key:
                self._append(self._header())
        except BaseException:
            self._unlock()
            raise
        return True

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
            "version": _VERSION,
            "dataset": self.dataset,
            "neighbours": self.neighbours,
            "key": secrets.token_hex(32),
        }

    def _append(self, record: Record) -> None:
        """On the disk first, then in memory."""
        with self._mutex:
            if self._chain is not None:
                self._chain.append(record)
            self._apply(record)

    def _start(
        self,
        plan: dict[str, JSON],
        seed: int | None,
        budget: Budget | None,
        accountant: str,
        resume: str | None,
    ) -> Run:
        plan = json.loads(canonical_json(plan))  # a copy that nobody else can change
        relation = self.neighbours or Neighbours(plan.get("neighbours", Neighbours.ADD_REMOVE))
        if plan.get("neighbours", relation) != relation:
            asked = plan["neighbours"]
            raise self._refuse(f"it holds guarantees for {relation} neighbours, the plan is for {asked}")
        fingerprint = None if seed is None else self._fingerprint(seed)
        if fingerprint in self._seeds:
            raise LedgerError(
                "this seed has been used in this ledger: the same noise twice protects nothing. Leave the "
                "seed out, or take a new one; a resumed run needs a new one too"
            )
        before = self._resumed(resume, plan)
        if budget is not None:
            from adadp.accounting.accountants import get_accountant

            get_accountant(accountant).check(self._composition(None), relation)
        name = f"run-{len(self._summaries) + 1}"
        self._append(
            {
                "kind": "run",
                "run": name,
                "plan": plan,
                "resumes": resume,
                "neighbours": relation,
                "seed": fingerprint,
                "budget": None if budget is None else [budget.epsilon, budget.delta],
                "accountant": accountant,
            }
        )
        allowance = None
        if budget is not None:
            allowance = Allowance(budget, accountant, relation, self._composition(without=name))
        steps = plan.get("steps")
        planned = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
        run = Run(self, name, allowance, planned, before, durable=self._chain is not None)
        self._open[name] = run
        return run

    def _fingerprint(self, seed: int) -> str:
        return hmac.new(self._key, f"seed {operator.index(seed)}".encode(), "sha256").hexdigest()

    def _resumed(self, resume: str | None, plan: dict[str, JSON]) -> int:
        """How many steps of the plan were reserved by the runs that this one continues."""
        steps = 0
        while resume is not None:
            summary = self._summaries.get(resume)
            if summary is None:
                raise self._refuse(f"it has no run {resume!r} to resume")
            if resume in self._open:
                raise self._refuse(f"{resume} is still open and cannot be resumed")
            if canonical_json(summary.plan) != canonical_json(plan):
                raise self._refuse(f"{resume} belongs to another plan: {_difference(summary.plan, plan)}")
            steps += sum(count for event, count in summary.reserved.items() if Run.is_step(event))
            resume = summary.resumes
        return steps

    def _reserve(self, run: str, event: Event, count: int) -> None:
        self._append({"kind": "reserve", "run": run, "event": event_to_json(event), "count": count})

    def _give_back(self, run: str, unused: Mapping[Event, int], kind: str = "give-back") -> None:
        """Lower the run's reservations by what it did not release."""
        rows = [[event_to_json(event), count] for event, count in unused.items()]
        self._append({"kind": kind, "run": run, "unused": rows})

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
