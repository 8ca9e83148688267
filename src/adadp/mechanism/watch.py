"""What a run is watched for beside its releases: the calls of its modules, and reasons why it has no number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from adadp.accounting.events import Event
from adadp.accounting.ledger import Run
from adadp.checks.trial import Trial
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.lot import Lots


class Record:
    """What a run does beside its charges. Reasons for *none* are written into the ledger once something was released.

    A loop that is refused at its first batch has released nothing: it takes nobody's number away, unless it goes on.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.waiting: list[str] = []

    def note(self, *, reasons: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        if self._run.charged():
            self._run.note(reasons=reasons, notes=notes)
        else:
            self.waiting += reasons
            self._run.note(notes=notes)

    def charge(self, event: Event) -> None:
        if self.waiting:
            self._run.note(reasons=self.waiting)
            self.waiting = []
        self._run.charge(event)


class AroundCalls:
    """Before a module runs on the batch that is out, it must be that batch, and the module is tried."""

    def __init__(self, lots: Lots, trial: Trial, optimizer: PrivateOptimizer) -> None:
        self._lots, self.trial, self._optimizer = lots, trial, optimizer
        self._part: object = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        if self._lots.current is not None:
            if self._part is not self._lots.current:
                self._part = self._lots.current
                self._optimizer.look_at_weights()
                self.trial.handed_out()
            self._lots.refuse_other_batches(tree_leaves((args, kwargs)))
            self.trial.before_call(module, args, kwargs, self._lots.current)

    def after(self, output: Any) -> None:
        if self._lots.current is not None:
            self._optimizer.look_at_weights(settle=True)
            self.trial.after_call(output, self._lots.current)
