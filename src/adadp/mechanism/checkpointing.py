"""What an engine offers for runs that are interrupted: checkpoints, and going on from them."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from adadp.accounting.ledger import Ledger
from adadp.checkpoint import Checkpoint, write
from adadp.checks.weights import note_paid
from adadp.clipping.base import Clipping, settings_of
from adadp.distributed.sharded import refuse_checkpoint
from adadp.errors import CheckpointError, ConfigurationError
from adadp.mechanism import observation, run_state
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.resuming import Continuation, Resumed, begin_digests

if TYPE_CHECKING:
    from adadp.accounting.budget import Budget
    from adadp.accounting.events import Event
    from adadp.accounting.run import Run
    from adadp.distributed.together import Together
    from adadp.randomness import Randomness


class Checkpointing:
    """The part of `PrivacyEngine` that opens its ledger, saves runs and resumes them."""

    resumed: Resumed | None = None
    """The checkpoint that this engine goes on from (`resume=`): `resumed.lot`, `resumed.extra`, `resumed.refused`."""

    _private: list[weakref.ref[PrivateOptimizer]]

    seed: int | None
    budget: Budget | None
    _target: Budget | None
    _dataset: str | None
    _ledger: Ledger | None
    _ledger_path: str | Path | None
    _randomness: Randomness
    _runs: list[Run]

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a run between two lots, so that `PrivacyEngine(resume=path)` goes on from here.

        The file is written beside `path`, synced and moved there; what was at `path` is kept as `path`.before. It is
        safetensors with JSON in its header (no pickle), and knows its own digest.

        Args:
            path: the file.
            module: its parameters and buffers are saved.
            optimizer: the private optimizer; None is that of the run that was made private last.
            scheduler: a learning-rate scheduler, or anything with `state_dict()` of plain values.
            extra: JSON values of the caller's own; they come back as `engine.resumed.extra`.

        Raises:
            TrainingLoopError: a lot is out. Call it after `optimizer.step()`, where `optimizer.stepped` is True.
            NotFiniteError: a weight is NaN or infinite. The checkpoints that are there stay.
            CheckpointError: it cannot be written, or something in it is no plain value; earlier ones are as they were.

        Guarantee:
            The file holds weights, state that follows from released values, and the position: no sum of a lot before
            its noise, no seed, key or state of a generator. A run that resumes from it is charged for every lot that it
            releases, also for those that were released after the checkpoint was made; only a release that is repeated
            bit for bit with the same seed is not charged twice.

        """
        private = self._private_optimizer(optimizer)
        begun = self._state_of(private)
        run_state.refuse_unless_finite(module, begun.values["lot"])
        values, tensors = {**begun.values, "extra": run_state.plain_extra(extra)}, dict(begun.tensors)
        values["module"] = run_state.pack_module(module, tensors)
        values["optimizer"] = run_state.pack_state(private.original_optimizer.state_dict(), tensors, "optimizer")
        if scheduler is not None:
            values["scheduler"] = run_state.pack_state(scheduler.state_dict(), tensors, "scheduler")
        if private._step.agreement.group.first:  # all processes may call this; they have the same to save
            write(path, Checkpoint(values, tensors))

    def state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """The run's position and what its clipping keeps, for frameworks that save weights and optimizer themselves.

        `PrivacyEngine(resume=state)` goes on from it; weights and optimizer are then loaded by the framework.

        Args:
            optimizer: the private optimizer; None is that of the run that was made private last.

        Returns:
            {"values": JSON values, "tensors": tensors by name}: `torch.load(weights_only=True)` reads it.

        Raises:
            TrainingLoopError, CheckpointError: as `save_checkpoint`.

        """
        begun = self._state_of(self._private_optimizer(optimizer))
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in begun.tensors.items()}
        # Enumerations become the texts that they are: `torch.load(weights_only=True)` knows no class of ours.
        return {"values": json.loads(json.dumps(begun.values)), "tensors": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, with the next `make_private`, from what `state_dict` returned: as `PrivacyEngine(resume=state)`.

        Raises:
            ConfigurationError: this engine has made something private already.
            CheckpointError: it is no such state.

        """
        if self._private:
            raise ConfigurationError(
                "load_state_dict comes before make_private: which run of the ledger is gone on with is settled there"
            )
        self.resumed = Resumed(state)

    def restore(self, scheduler: Any) -> None:
        """Put a learning-rate scheduler where the checkpoint left it; nothing where there is none.

        Making a scheduler changes the optimizer's rates: they are put back too.

        Args:
            scheduler: newly made, over the optimizer that `make_private` returned (or the one that it wraps).

        """
        if self.resumed is None or self.resumed.scheduler_state is None:
            return
        private = self._private_optimizer(None)
        scheduler.load_state_dict(self.resumed.scheduler_state)
        self.resumed.load_optimizer(private.original_optimizer, private._step.capture.module)
        private._rules.state_loaded()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
    ) -> dict[str, Any]:
        """Load weights, optimizer and schedule of a checkpoint into what is there, with what was spent on them.

        This begins a run of its own that builds on those weights. To go on with the interrupted run (its plan, its next
        lot, its clipping's state), give `PrivacyEngine(resume=path)` instead.

        Args:
            path: written by `save_checkpoint`.
            module: of the same architecture; private or not.
            optimizer: private or not; None leaves it.
            scheduler: a learning-rate scheduler; None leaves it.

        Returns:
            What was saved as `extra`.

        Raises:
            CheckpointError: it cannot be read, or is of something else.
            ConfigurationError: the module was made private by another engine.
            LedgerError, BudgetExhaustedError: this engine's ledger does not take what was spent.

        """
        refuse_checkpoint(module)
        found, ledger = Resumed(path), self._open()
        note_paid(module, ledger)
        ledger.inherit(found.values["spending"])
        found.load_module(module)
        if optimizer is not None:
            found.load_optimizer(getattr(optimizer, "original_optimizer", optimizer), module)
        if scheduler is not None and found.scheduler_state is not None:
            scheduler.load_state_dict(found.scheduler_state)
        for private in self._alive():
            if private._step.capture.module is module:
                private._rules.settle()
                private._rules.state_loaded()
        return found.extra

    # ---- in parts -------------------------------------------------------------------------------------------------

    def _open(self) -> Ledger:
        """The ledger; one in memory that went into the checkpoint, as it was then."""
        if observation.under_test() and getattr(self._ledger, "path", None) is not None:
            raise ConfigurationError(
                "a loop under test must not write into a ledger's file: give the engine the path, ledger='runs.jsonl', "
                "in place of a Ledger, and the test keeps it in memory"
            )
        if self._ledger is None:
            # Its relation is what the file says, or what the first run's plan says. A budget is fixed when a ledger is
            # made: then it holds for all runs together, however each was chosen.
            path = None if observation.under_test() else self._ledger_path  # a test charges nobody's budget
            new = path is None or not Path(path).exists()
            budget = self.budget if new and self.budget is not self._target else None
            self._ledger = Ledger(path, dataset=self._dataset, neighbours=None, budget=budget)
            if self.resumed is not None:
                self.resumed.load_ledger(self._ledger)
        return self._ledger

    def _line(
        self, number: int, event: Event, module: nn.Module, clipping: Clipping, together: Together
    ) -> Continuation:
        """How the next run begins: anew, or where a checkpoint was made."""
        if self.resumed is None or (self._runs and self.seed is None):
            return Continuation(number, self._randomness.spawn(f"run {number}"), tuple(settings_of(clipping)))
        if self._runs:
            raise ConfigurationError(
                "an engine with a seed that resumes a run makes no second run: a run of this number may have used the "
                "same noise before. Use another engine."
            )
        refuse_checkpoint(module)
        if not together.group.alone:
            return self.resumed.together(together.group, self._open(), self._randomness, self.seed, clipping)
        return self.resumed.continuation(self._open(), self._randomness, self.seed, event, module, clipping)

    def _private_optimizer(self, optimizer: Optimizer | None) -> PrivateOptimizer:
        if optimizer is None:
            if not self._alive():
                raise ConfigurationError("nothing was made private yet: there is no run to save")
            return self._alive()[-1]
        if not isinstance(optimizer, PrivateOptimizer) or not any(optimizer is each for each in self._alive()):
            raise ConfigurationError("optimizer= is not one that this engine's make_private returned")
        return optimizer

    def _alive(self) -> list[PrivateOptimizer]:
        return [optimizer for each in self._private if (optimizer := each()) is not None]

    def _state_of(self, optimizer: PrivateOptimizer) -> Checkpoint:
        refuse_checkpoint(optimizer._step.capture.module)
        began = optimizer.began
        state = run_state.of_run(optimizer, self._open(), list(began.made_with), began.number)
        begin_digests(optimizer)
        return state


__all__ = ["CheckpointError", "Checkpointing"]
