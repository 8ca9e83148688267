"""A lot as one batch of Lightning's loop, in whatever parts it is worked on.

Lightning counts batches: steps, schedulers, validation and progress follow from how many there were. How many parts a
lot comes in depends on how many examples were drawn, so Lightning is given each lot as one batch, and parts are cut
here. All parts but the last are done before Lightning's own backward pass and step, which then complete the lot.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from adadp.errors import TrainingLoopError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.recording import backward
from adadp.mechanism.replay import TrainingStep
from adadp.out_of_memory import advising
from adadp.sampling.lot import Microbatch


class LotStep(TrainingStep):
    """Runs `training_step` on a lot, part by part, and tries it as the engine tries any loss that it is given.

    Args:
        optimizer: the private optimizer.
        module: the LightningModule.
        precision: its trainer's plugin, in whose context `training_step` runs (autocast).

    Attributes:
        trying: whether `training_step` runs in a trial, and not for a release.

    """

    def __init__(self, optimizer: PrivateOptimizer, module: Any, precision: Any) -> None:
        super().__init__(optimizer, self._losses)
        self._module, self._precision = module, precision
        self._more: tuple[Any, ...] = ()  # what training_step is given besides the batch: its number
        self._last: tuple[Any, ...] = ()  # the last part of the lot
        self._output: Any = None
        self._given: list[tuple[Any, int]] = []  # leaves of the lot's batch, and how often each was written to
        self.trying = False

    def handed_out(self, batch: Any) -> None:
        """Note a lot's batch before hooks and callbacks see it."""
        self._given = _leaves(batch)

    def training_step(self, batch: Any, *more: Any) -> Any:
        """In place of the strategy's `training_step`; returns what the module's returns for the lot's last part."""
        self._refuse_changed(batch)
        self._more, self.trying = more, True
        try:
            self(batch)  # a trial where one is due, and all parts but the last
        finally:
            self.trying = False
        losses = self._completing(*self._last)
        if self._tries:
            self.optimizer._rules.refuse_foreign_leaves(losses)
        output, self._output, self._last = self._output, None, ()
        return output

    def backward(self, losses: Tensor, *_: Any, **__: Any) -> None:
        """In place of the precision plugin's `backward`: from one loss for each row, or a scalar."""
        backward(self.optimizer, losses)

    def _refuse_changed(self, batch: Any) -> None:
        given, self._given = self._given, []
        now = _leaves(batch)
        same = len(given) == len(now) and all(
            a is b and before == after for (a, before), (b, after) in zip(given, now, strict=True)
        )
        if same:
            return
        self.optimizer._run.note_once_charged(reasons=["on_train_batch_start changed a batch"])
        raise TrainingLoopError(
            "on_train_batch_start of the module or a callback changed the batch of a whole lot, where what it does to "
            "one example because of others (mixup) cannot be tried. Do it in training_step, or in the dataset item by "
            "item."
        )

    def _one(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        self.trying = False
        if microbatch is not self.optimizer._loader.lots.whole:
            # A copy: products of rows that begin in the middle of a tensor are rounded otherwise on some processors.
            batch = tree_map_only(Tensor, Tensor.clone, batch)
        if microbatch.last:
            self._last = batch
        else:
            self._ordinarily(batch)

    def _completing(self, batch: Any) -> Tensor:
        """The losses of the last part, whose backward pass and step are Lightning's."""
        count = self.optimizer._current().count
        self.optimizer._trial.by_function = self.optimizer._current()
        with advising(count, lambda size: self._fits((batch,), count, size)):
            return self._losses(batch)

    def _losses(self, batch: Any) -> Tensor:
        context: AbstractContextManager[Any] = self._precision.train_step_context()
        with context:
            self._output = self._module.training_step(batch, *self._more)
        losses = self._output.get("loss") if isinstance(self._output, Mapping) else self._output
        if not isinstance(losses, Tensor):
            self.optimizer._run.note_once_charged(
                reasons=["training_step returned no loss for a batch: its lot was skipped"]
            )
            raise TrainingLoopError(
                "training_step returned no loss, by which Lightning skips a batch: where that depends on the batch, "
                "one example decides whether all others count. Return one loss for each row of every batch, [n], or "
                "{'loss': losses}: examples whose gradients are not finite count for nothing by themselves."
            )
        return losses


def _leaves(batch: Any) -> list[tuple[Any, int]]:
    return [(leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in tree_leaves(batch)]
