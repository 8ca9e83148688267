"""One ledger for several processes: process 0 writes it, the others keep a copy in memory.

The copy answers whoever asks for a guarantee, and goes into checkpoints. It bounds nothing: whether a lot may be
released is decided by process 0. What another process finds out about the run (a refusal, something untried) waits in
its copy until all exchange news, which is before the next release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adadp.accounting.events import Event
from adadp.accounting.ledger import Ledger
from adadp.accounting.ledger_state import LedgerState
from adadp.accounting.remarks import Remarks
from adadp.accounting.run import Run
from adadp.accounting.shared import Limits
from adadp.distributed.group import Group

#: What each process keeps of the runs that it makes. The other records of the ledger go from process 0 to all.
_OWN = frozenset({"reserve", "give-back", "close"})


class LedgerCopy(Ledger):
    """The ledger as a process other than the first knows it. Nothing that it is told reaches the file directly."""

    def __init__(self, state: LedgerState) -> None:
        super().__init__(None, dataset=state.dataset, neighbours=state.neighbours)
        self._state = state
        self.unsent: list[tuple[str, Remarks]] = []

    def take(self, record: dict[str, Any]) -> None:
        """Keep a record that process 0 has written."""
        with self._mutex:
            if record["kind"] == "ledger" and self._state.key:  # this copy needed a header before the file had one
                self._state.key = bytes.fromhex(record["key"])
                self._state.settle_header(record)
            else:
                self._state.apply(record)

    def follow(self, name: str) -> Run:
        """The run that process 0 has started, as this process counts it."""
        summary = self._state.runs[name]
        run = Run(self, name, summary.uid, None, summary.planned, self._state.before(name))
        self._open[name] = run
        return run

    def _limits(self, run: Run, event: Event) -> Limits | None:
        return None  # process 0 keeps the budget

    def _note(self, run: str, remarks: Remarks) -> None:
        with self._mutex:
            new = remarks.without(self._state.runs[run].remarks)
            if new:
                self.unsent.append((run, new))
                self._state.runs[run].remarks = self._state.runs[run].remarks.joined(new)


class Books:
    """The ledger of one engine, kept by process 0 of a group."""

    def __init__(self, group: Group, ledger: Ledger, unsent: list[dict[str, Any]]) -> None:
        self.group, self.ledger, self._unsent = group, ledger, unsent

    @classmethod
    def opened(cls, group: Group, open_ledger: Callable[[], Ledger]) -> Books:
        """The ledger that `open_ledger` opens in process 0, and copies of it elsewhere. All processes call this."""
        opened: list[Ledger] = []
        unsent: list[dict[str, Any]] = []

        def read() -> LedgerState:
            opened.append(open_ledger())
            ledger = opened[0]

            def note(record: dict[str, Any]) -> None:
                if record["kind"] not in _OWN or record["run"] not in ledger._open:
                    unsent.append(dict(record))

            ledger.on_record = note
            return opened[0]._refresh()

        state = group.from_first(read)
        return cls(group, opened[0] if opened else LedgerCopy(state), unsent)

    def start(self, begin: Callable[[], Run]) -> Run:
        """The run that `begin` starts in process 0, in every process; where it raises there, all raise."""
        started: list[Run] = []

        def start() -> tuple[str, list[dict[str, Any]]]:
            started.append(begin())
            return started[0].id, self._taken()

        name, records = self.group.from_first(start)
        if isinstance(self.ledger, LedgerCopy):
            for record in records:
                self.ledger.take(record)
            return self.ledger.follow(name)
        return started[0]

    @property
    def news(self) -> bool:
        """Whether this process knows something that the others do not."""
        return bool(self.ledger.unsent if isinstance(self.ledger, LedgerCopy) else self._unsent)

    def exchange(self, waiting: list[str]) -> list[str]:
        """Bring remarks to the ledger and records to the copies. All processes call this together.

        Args:
            waiting: this process's reasons for *none* that wait for the next release.

        Returns:
            In process 0, those of the others.

        """
        mine = self._taken() if self.group.first else self._notes()
        found = self.group.objects((mine, waiting))
        if isinstance(self.ledger, LedgerCopy):
            for record in found[0][0]:
                self.ledger.take(record)
            return []
        for notes, _ in found[1:]:
            for run, remarks in notes:
                self.ledger._note(run, remarks)
        return [reason for _, reasons in found[1:] for reason in reasons]

    def _taken(self) -> list[dict[str, Any]]:
        records = list(self._unsent)
        self._unsent.clear()
        return records

    def _notes(self) -> list[tuple[str, Remarks]]:
        assert isinstance(self.ledger, LedgerCopy)
        notes, self.ledger.unsent = self.ledger.unsent, []
        return notes
