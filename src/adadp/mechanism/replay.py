"""A training step that a GPU replays: recorded once as a CUDA graph, then started by one call instead of hundreds.

A GPU finishes a small model's step faster than Python can launch it. A recording contains no Python, so whatever Python
decides must be the same for every lot that is replayed: batches have one size (`pad_lots=True`). What the host must do
for a lot happens before the replay: the lot is charged and counted, and a shape that is due is refreshed and its
numbers are copied into the recording's.

This file decides when a step is made ordinarily, recorded or replayed; `recording` is one recorded step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adadp.errors import BudgetExhaustedError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.recording import Losses, Recording, backward, keeper, losses_alone, signature_of
from adadp.mechanism.step import PrivateStep
from adadp.out_of_memory import advising, out_of_memory
from adadp.sampling.batches import some_rows
from adadp.sampling.lot import Microbatch

#: Ordinary steps before the first recording: in them libraries choose algorithms and kernels are compiled.
WARM_UP = 2
#: Before this lot, a trial that is due waits for the first recording: what is recorded is tried then.
_SOON = 8
#: The first lot of the schedule of trials (`adadp.checks.schedule`) that is tried though steps are replayed.
FIRST_BESIDE_REPLAYS = 1000


class TrainingStep:
    """Everything between two batches: `step(inputs, targets)` is zero_grad, losses, backward and optimizer.step().

    Lots larger than `max_physical_batch_size` are cut here: the loop sees one batch for each lot. On a CPU, and
    wherever a step cannot be recorded, the same work is done step by step. Nothing is returned: no guarantee covers a
    loss over private examples.

    Args:
        optimizer: the private optimizer.
        loss: `loss(*batch)` runs the private module and returns one loss for each row of the batch, [n] (or the scalar
            that `make_private(loss_reduction=)` was told of); or (losses, figures) for a clipping that releases means
            of figures (`PaidFigures`). It is called once for each recording, so it must do the same for every batch
            and read the batch from its arguments alone: anything else that it reads stays as it was recorded, and that
            lot would be used again with every other.

    Attributes:
        replays: how many steps were replayed.
        why_not: why steps are not replayed; None where they are.

    """

    def __init__(self, optimizer: PrivateOptimizer, loss: Callable[..., Losses]) -> None:
        self.optimizer, self.loss = optimizer, loss
        self.replays = 0
        self.why_not: str | None = _obstacle(optimizer)
        self._recording: Recording | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._ordinary = 0
        self._tries = False  # whether module and loss are tried on this lot
        optimizer._loader.whole_lots = True

    def __call__(self, *batch: Any) -> None:
        optimizer = self.optimizer
        lots, loader, whole = optimizer._loader.lots, optimizer._loader, optimizer._current()
        lots.refuse_other_batches(tree_leaves(batch))
        # What a recording does is fixed: Python, which could change it, does not run. So it is tried less often.
        due = optimizer._trial.due(whole.lot) and (self._recording is None or whole.lot >= FIRST_BESIDE_REPLAYS)
        optimizer._trial.postponed = due and self._records_soon(whole)
        self._tries = due and not optimizer._trial.postponed
        if self._tries:
            with advising(whole.count, lambda size: self._fits(batch, whole.count, size)):
                optimizer._trial.of_loss(self._losses_alone, batch, whole)
        size = loader.max_physical_batch_size
        if size is None or whole.fits(size) or not (whole.index == 0 and whole.last):
            self._one(whole, batch)
            return
        for part in whole.cut(size):
            rows = some_rows(batch, whole.count, part.start, part.count, loader.batch_first)
            lots.work_on(part)
            self._one(part, rows)
            if lots.stopped:
                return

    def _one(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        """The work on one microbatch, recorded or replayed where it can be."""
        if self._outdated():  # by a step that was made elsewhere: what that left is completed by an ordinary one
            self._ordinary = min(self._ordinary, WARM_UP - 1)
        if self._tries:  # the module is tried where it is called, and the host waits for what comes out
            self._ordinarily(batch)
            return
        if self.why_not is None and self._replayable(microbatch):
            try:
                self._replay(microbatch, batch)
            except BudgetExhaustedError as spent:
                self.optimizer.stop(spent)
            return
        steady = self.optimizer._step.clipping.steady()
        if self.why_not is None and steady and self._ordinary == WARM_UP - 1:
            self._rehearse(batch)
        else:
            self._ordinarily(batch)
        outdated = self._outdated()
        if steady:
            self._ordinary += 1
        elif outdated or self._recording is None:  # what a refresh leaves is completed by the first lot that uses it
            self._ordinary = min(self._ordinary, WARM_UP - 1)

    def _records_soon(self, whole: Microbatch) -> bool:
        """Whether this step was tried and is recorded now or in a few lots: what is recorded is tried then."""
        if self.why_not is not None or not self.optimizer._trial.passed_once() or whole.lot >= FIRST_BESIDE_REPLAYS:
            return False
        return 0 < whole.lot < _SOON or (self._recording is None and self._replayable(whole))

    def _outdated(self) -> bool:
        """Whether the recording works on what the clipping no longer keeps, nor can take over; it is then dropped."""
        if self._recording is None or self._recording.current(self.optimizer):
            return False
        self._recording = None
        return True

    def _ordinarily(self, batch: tuple[Any, ...]) -> None:
        count = self.optimizer._current().count
        self.optimizer.zero_grad()
        self.optimizer._trial.by_function = self.optimizer._current()
        with advising(count, lambda size: self._fits(batch, count, size)):
            found = self.loss(*batch)
            if self._tries:
                self.optimizer._rules.refuse_foreign_leaves(losses_alone(found))
            backward(self.optimizer, found)
        self.optimizer.step()

    def _losses_alone(self, *batch: Any) -> Tensor:
        return losses_alone(self.loss(*batch))

    def _fits(self, batch: tuple[Any, ...], count: int, size: int) -> bool:
        """Whether the gradients of `size` of the batch's examples can be made and measured; they are then forgotten."""
        step = self.optimizer._step
        step.capture.discard()
        try:
            rows = some_rows(batch, count, 0, size, self.optimizer._loader.batch_first)
            with step.capture.aside(size):
                self._losses_alone(*rows).sum().backward()  # type: ignore[no-untyped-call]
                for form in step.capture.take(size).values():
                    form.squared_norms()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            self.optimizer.zero_grad()
        return True

    def _rehearse(self, batch: tuple[Any, ...]) -> None:
        """An ordinary step that notes where the host waits for the GPU: a recording would break off there."""
        before = torch.cuda.get_sync_debug_mode()
        with _as_if_recorded(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._ordinarily(batch)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                self.why_not = f"the host waits for the GPU ({warning.filename}, line {warning.lineno})"
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _replayable(self, microbatch: Microbatch) -> bool:
        step = self.optimizer._step
        checked = not self.optimizer._trial.undecided  # the model is tried out by the host
        whole = microbatch.index == 0 and microbatch.last
        steady = step.clipping.steady() or (self._recording is not None and step.clipping.steady(begun=True))
        return whole and checked and self._ordinary >= WARM_UP and steady

    def _replay(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        optimizer, step = self.optimizer, self.optimizer._step
        step.refuse_misuse(microbatch)
        optimizer._rules.refuse_changes(microbatch)
        optimizer._rules.say_untried()
        step.charge(microbatch.of)
        begun = not step.clipping.steady()
        if begun:
            step.begin(microbatch)
            self._outdated()
        signature = signature_of(optimizer, microbatch, batch)
        if begun and (self._recording is None or self._recording.signature != signature):
            self._recording, self._ordinary = None, WARM_UP - 1
            self._ordinarily(batch)
            return
        if self._recording is None or self._recording.signature != signature:
            self._recording = None  # its memory is free for the next
            self._recording = self._record(signature, microbatch, batch)
        if self._recording is None:
            self._ordinarily(batch)
            return
        self._recording.play(microbatch, batch)
        step.replayed(microbatch)
        self.replays += 1
        optimizer.step_with(self._recording.gradients)

    def _record(self, signature: Any, microbatch: Microbatch, batch: tuple[Any, ...]) -> Recording | None:
        with advising(microbatch.count, lambda size: self._fits(batch, microbatch.count, size)):
            self.optimizer._trial.before_recording(self._losses_alone, batch, microbatch)
        try:
            if self._keeper is None:
                self._keeper = keeper()
            return Recording(self.optimizer, self.loss, signature, microbatch, batch, self._keeper.pool())
        except Exception as error:  # whatever it is, an ordinary step is tried next, and says what is wrong
            self.why_not = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"steps are not replayed on the GPU, but made one by one: {self.why_not}", stacklevel=4)
        return None


def _obstacle(optimizer: PrivateOptimizer) -> str | None:
    """What stands in the way of recording any step of this run."""
    step, loader = optimizer._step, optimizer._loader
    parameter = next(iter(optimizer._parameters.values()))
    foreign = [type(part).__name__ for part in step.clipping.objects() if not _ours(part)]
    if parameter.device.type != "cuda":
        return f"the model is on {parameter.device.type}: only CUDA replays"
    if not loader.pad_lots:
        return "lots have different sizes: make_private(..., pad_lots=True) gives them one"
    if type(step) is not PrivateStep or foreign:
        return f"{', '.join(foreign) or type(step).__name__} may do on the host what a replay would leave out"
    if loader.grouping is not None:
        return "rows of one contribution (unit=, augmentations=) are put together by the host"
    if step._randomness.secure:
        return "secure_mode takes its noise from the operating system, on the host"
    if step.sharded is not None:
        return "weights are gathered for each lot (fully_shard)"
    if not step.agreement.group.alone:
        return "several processes agree on each lot, on the host, before its sums are added up"
    if step._count_nonfinite:
        return "expose_raw counts on the host"
    if step.observer is not None:
        return "an observer looks at releases on the host"
    return None


def _ours(part: object) -> bool:
    return type(part).__module__.partition(".")[0] == "adadp"


@contextmanager
def _as_if_recorded() -> Iterator[None]:
    """Have libraries that ask whether a CUDA graph is recorded believe so.

    Models of Hugging Face read their masks back to the host otherwise, and do not where they are recorded.
    """
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
