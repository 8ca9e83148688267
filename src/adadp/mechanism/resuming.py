"""A run that goes on from a checkpoint: in the same line of runs of the ledger, with the lot that comes next.

What it costs. The ledger decides, not the checkpoint. Everything that the interrupted run released stays charged, and
whatever the resumed run releases is charged on top: lots between the checkpoint and the interruption a second time. Two
things need no second charge: what the interrupted run reserved and is known not to have released
(`accounting.unused`), and a release that is repeated bit for bit with the same seed (`attempts`).
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adadp.accounting.events import Event
from adadp.accounting.ledger import Ledger, RunSummary
from adadp.accounting.planned import is_step, steps_in
from adadp.accounting.unused import boot_id
from adadp.checkpoint import Checkpoint, read
from adadp.clipping.base import Clipping, settings_of
from adadp.distributed.group import Group
from adadp.errors import CheckpointError, CheckpointWarning
from adadp.mechanism import run_state
from adadp.mechanism.attempts import Attempt, on_cpu, path_of
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.plain_values import unpack
from adadp.randomness import Randomness, new_attempt

_IN_MEMORY = (
    "the run before lot {} was interrupted, and its ledger was in memory: what it released after its checkpoint was "
    "neither kept, looked at nor used for anything"
)


class Resumed:
    """A checkpoint that the next run goes on from.

    Args:
        source: a file written by `save_checkpoint`, or what `state_dict` returned.

    Attributes:
        path: the file that was read; None for a state.
        refused: why the last checkpoint was not used but the one before; "" if it was.
        lot: the number of the lot that comes next, which is how many were made (or left).
        extra: what the caller added to the checkpoint.

    """

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.path, self.refused = None, ""
        if isinstance(source, Mapping):
            self._checkpoint = _of_state(source)
        else:
            found = read(source)
            self._checkpoint, self.path, self.refused = found.checkpoint, found.path, found.refused
            if found.refused:
                warnings.warn(f"{found.refused}. {found.path} is used instead", CheckpointWarning, stacklevel=4)
        values = self._checkpoint.values
        if values.get("version") != run_state.VERSION:
            raise CheckpointError(
                f"the checkpoint's state is of version {values.get('version')!r}, and this adadp reads "
                f"{run_state.VERSION}"
            )
        self.lot, self._number, self._uid = _whole(values, "lot"), _whole(values, "number"), str(values.get("run"))
        self.extra: dict[str, Any] = dict(values.get("extra") or {})

    @staticmethod
    def beginning(run: RunSummary) -> dict[str, Any]:
        """The state of a run that was started in its ledger and has made no lot: as `PrivacyEngine.state_dict()`."""
        return {"values": {"version": run_state.VERSION, "run": run.uid, "lot": 0, "number": 0}, "tensors": {}}

    def load_ledger(self, ledger: Ledger) -> None:
        """A ledger in memory went into the checkpoint: it comes back from there."""
        records = self._checkpoint.values.get("ledger")
        if records and ledger.path is None and not ledger.runs:
            ledger.load_records(records)

    def continuation(
        self, ledger: Ledger, root: Randomness, seed: int | None, event: Event, module: nn.Module, clipping: Clipping
    ) -> Continuation:
        """How the next run goes on: which run of the ledger it resumes, and with which noise.

        Raises:
            CheckpointError: it is of another model or clipping, the ledger does not hold the run, or the run cannot go
                on with this seed.

        """
        if "clipping" in self.values:
            run_state.refuse_other_clipping(self.values, clipping)
        if "module" in self.values:
            run_state.refuse_other_module(self.values["module"], self._checkpoint.tensors, module)
        line = self._line_in(ledger)
        memory = self._memory(ledger)
        name, made_with = f"run {self._number}", tuple(settings_of(clipping))
        if seed is None:
            return Continuation(self._number, root.spawn(name), made_with, line[0].id, None, None, memory, self)
        if self._number:
            raise CheckpointError(
                "this run was not the first that its engine made private, and its seed is not on record: leave the "
                "seed out, and noise and lots are drawn from fresh entropy"
            )
        kept = ledger.path is not None and on_cpu(dict(module.named_parameters()))
        mine = [run for run in line if run.seed == ledger._state.fingerprint(seed)]
        path = path_of(ledger.path) if ledger.path is not None else None
        if kept and path is not None and mine and _complete(mine):
            number = mine[0].attempt
            same = [run for run in mine if run.attempt == number]
            attempt = Attempt(path, root.spawn(name, number))
            if not any(_steps_of(line).values()):  # not one lot was released
                attempt.start(self.lot, 0)
            if attempt.resume(self.lot, _steps_of(same), len(same)):
                return Continuation(
                    self._number, root.spawn(name, number), made_with, line[0].id, number, attempt, (), self
                )
        randomness = root.spawn(name, new_attempt())
        started = None
        if kept and path is not None:
            started = Attempt(path, randomness)
            started.start(self.lot, 0)
        return Continuation(self._number, randomness, made_with, line[0].id, randomness.attempt, started, memory, self)

    def together(
        self, group: Group, ledger: Ledger, root: Randomness, seed: int | None, clipping: Clipping
    ) -> Continuation:
        """How the next run of several processes goes on: as process 0 decides, and with noise that is new.

        Each process has a part of the sums only, so that nothing is repeated without a charge: with a seed it is
        another attempt.
        """
        if "clipping" in self.values:
            run_state.refuse_other_clipping(self.values, clipping)

        def decide() -> tuple[str, int]:
            return self._line_in(ledger)[0].id, 0 if seed is None else new_attempt()

        resumes, attempt = group.from_first(decide)
        return Continuation(
            self._number, root.spawn(f"run {self._number}", attempt), tuple(settings_of(clipping)), resumes,
            None if seed is None else attempt, None, self._memory(ledger), self,
        )  # fmt: skip

    def _line_in(self, ledger: Ledger) -> tuple[RunSummary, ...]:
        """The runs of the ledger that this one goes on from, newest first."""
        line = ledger.line(self._uid)
        where = "in memory" if ledger.path is None else str(ledger.path)
        if not line:
            raise CheckpointError(
                f"the ledger ({where}) does not hold the run of this checkpoint: give the engine the ledger that the "
                "run was charged to, PrivacyEngine(resume=..., ledger=...)"
            )
        held = sum(_steps_of(run for run in line if run.uid == self._uid).values())
        known = _whole({"charged": 0, **self.values}, "charged")
        if held < known:
            raise CheckpointError(
                f"the ledger ({where}) holds {held:,} releases of this run, and the checkpoint was made after "
                f"{known:,}: the ledger was put back to an earlier state. Put back the one that the run was charged "
                "to; or begin a run of its own with engine.load_checkpoint(path), which charges what the checkpoint "
                "knows of"
            )
        return line

    def _memory(self, ledger: Ledger) -> tuple[str, ...]:
        return (_IN_MEMORY.format(self.lot),) if ledger.path is None else ()

    def load(self, module: nn.Module, optimizer: Optimizer, clipping: Clipping) -> None:
        """Weights and optimizer, as far as they are in the checkpoint, and the clipping's state."""
        values, tensors = self._checkpoint.values, self._checkpoint.tensors
        if "clipping" in values:
            run_state.put_into(values, tensors, clipping, module)
        if "module" in values:
            run_state.unpack_module(values["module"], tensors, module)
        self.load_optimizer(optimizer, module)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        """The optimizer's state, if the checkpoint has one."""
        packed = self._checkpoint.values.get("optimizer")
        if packed is not None:
            device = next(module.parameters()).device
            run_state.unpack_optimizer(packed, self._checkpoint.tensors, optimizer, device)

    @cached_property
    def scheduler_state(self) -> Any:
        """The schedule's state; None if the checkpoint has none."""
        packed = self._checkpoint.values.get("scheduler")
        return None if packed is None else unpack(packed, self._checkpoint.tensors, torch.device("cpu"))

    @property
    def values(self) -> Mapping[str, Any]:
        """The checkpoint's JSON values."""
        return self._checkpoint.values

    def load_module(self, module: nn.Module) -> None:
        """The weights and buffers. Raises where the checkpoint has none, or those of another model."""
        if "module" not in self.values:
            raise CheckpointError("the checkpoint holds no weights: it was saved without module=")
        run_state.unpack_module(self.values["module"], self._checkpoint.tensors, module)


@dataclass(frozen=True)
class Continuation:
    """How a run begins: its randomness, and if it resumes another, which one and at which attempt.

    `number` counts the runs of an engine. `made_with` are the numbers of its clipping before the first lot. `digests`
    are those of its sums, where it has a seed and may go on with it.
    """

    number: int
    randomness: Randomness
    made_with: tuple[object, ...]
    resumes: str | None = None
    attempt: int | None = None
    digests: Attempt | None = None
    assumptions: tuple[str, ...] = ()
    resumed: Resumed | None = None

    def load(self, module: nn.Module, optimizer: Optimizer, clipping: Clipping) -> None:
        """Put in what the checkpoint holds, if there is one."""
        if self.resumed is not None:
            self.resumed.load(module, optimizer, clipping)

    def settle(self, optimizer: PrivateOptimizer) -> PrivateOptimizer:
        """Let the private optimizer go on where the checkpoint was made."""
        optimizer.began = self
        if self.resumed is not None:
            optimizer._loader.lots.begin_at(self.resumed.lot)
        if self.digests is not None:
            _write_digests(optimizer, self.digests)
        return optimizer


def begin_digests(optimizer: PrivateOptimizer) -> None:
    """From the first checkpoint of a run with a seed on, digests of its sums are kept: it may be resumed from there."""
    step, ledger, run = optimizer._step, optimizer._ledger, optimizer._run
    if step.attempt is not None or not step._randomness.seeded or ledger.path is None or not on_cpu(step._parameters):
        return
    if not step.agreement.group.alone:  # each process has only its part of the sums
        return
    digests = Attempt(path_of(ledger.path), step._randomness)
    digests.start(optimizer._loader.lots.next, steps_in(run.charged()))
    _write_digests(optimizer, digests)


def _write_digests(optimizer: PrivateOptimizer, digests: Attempt) -> None:
    optimizer._step.attempt = digests
    optimizer._run.before_close = digests.close


def _steps_of(runs: Iterable[RunSummary]) -> Counter[Event]:
    """How many steps of each kind the ledger holds for these runs."""
    found: Counter[Event] = Counter()
    for run in runs:
        found.update({event: count for event, count in run.reserved.items() if is_step(event)})
    return found


def _complete(runs: list[RunSummary]) -> bool:
    """Whether every digest that these runs wrote is there: they ended, or the system was not restarted since."""
    return all(run.closed or (run.boot is not None and run.boot == boot_id()) for run in runs)


def _of_state(state: Mapping[str, Any]) -> Checkpoint:
    try:
        return Checkpoint(dict(state["values"]), dict(state["tensors"]))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            "resume= is neither the path of a checkpoint nor what PrivacyEngine.state_dict() returned"
        ) from None


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"the checkpoint's {name} is {value!r}, not a number")
    return value
