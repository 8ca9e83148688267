"""A module or a loss, tried on one batch: on rows made of its schema first, then on a few of its own, then on all.

The short trial passes what is plainly right; what it does not pass is decided by the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.comparison import ExampleAxis
from adadp.checks.containers import Parts
from adadp.checks.loss_trial import UNKNOWN, LossTrial
from adadp.checks.module_trial import ModuleTrial
from adadp.checks.padding import Padded
from adadp.checks.short_trial import ShortTrial, largest
from adadp.checks.synthetic_rows import MADE, synthetic
from adadp.checks.trial_runs import LossRuns, RunResult, TrialRuns
from adadp.checks.unlike_rows import Row, replaced
from adadp.checks.whole_batch import first_rows, refuse_whole
from adadp.errors import PrivacyError
from adadp.gradients import Capture
from adadp.out_of_memory import out_of_memory


class Cascade:
    """What is tried in one trial of a run; `trial` numbers them, and `largest` is the most rows of one batch."""

    def __init__(
        self, capture: Capture, dimensions: Sequence[int], mean: bool, trial: int, largest: int | None = None
    ) -> None:
        self._capture, self._dimensions, self._mean = capture, dimensions, mean
        self._trial, self._largest = trial, largest
        self._made = MADE if largest is None else max(4, min(MADE, largest))  # rows

    def of_module(
        self, module: nn.Module, parts: Parts, dims: Sequence[int | None], count: int, *, schema_first: bool
    ) -> bool:
        """Refuse a module that mixes examples. False if they are too much alike to tell."""
        if schema_first:
            made = synthetic(parts, dims, self._made)
            if made is not None:
                self._refuse_made(TrialRuns(self._capture, module, made, dims, self._trial), None)
        runs = TrialRuns(self._capture, module, parts, dims, self._trial)
        screen = ShortTrial(runs, count, self._dimensions)
        decided = screen.passes()
        places = screen.places
        if not decided:
            long = ModuleTrial(runs, count, self._dimensions, self._mean)
            decided, places = long.conclusive(), long.places
        self._refuse_whole(runs, count, places)
        return decided

    def of_loss(
        self,
        loss: Callable[..., Tensor],
        parts: Parts,
        dims: Sequence[int | None],
        count: int,
        lengths: Padded | None,
        *,
        schema_first: bool,
    ) -> bool:
        """Refuse a loss that mixes examples. Whether all that it calls was tried with it, layer by layer."""
        if schema_first:
            made = synthetic(parts, dims, self._made)
            if made is not None:
                self._refuse_made(LossRuns(self._capture, loss, made, dims, self._trial), loss)
        runs = LossRuns(self._capture, loss, parts, dims, self._trial)
        if lengths is None and ShortTrial(runs, count, self._dimensions).passes():
            self._refuse_whole(runs, count, [ExampleAxis(0)])
            return True
        long = LossTrial(self._capture, loss, parts, dims, self._mean, self._trial)
        long.refuse(count, lengths)
        self.whole_loss(loss, parts, dims, count, scalar=long.scalar)
        return False

    def whole_loss(
        self, loss: Callable[..., Tensor], parts: Parts, dims: Sequence[int | None], count: int, scalar: bool
    ) -> None:
        """Refuse a loss that mixes the rows of a whole batch."""
        if not scalar:
            self._refuse_whole(LossRuns(self._capture, loss, parts, dims, self._trial), count, [ExampleAxis(0)])
        elif count > 4:
            count, cut = self._cut(parts, dims, count)
            LossTrial(self._capture, loss, cut, dims, self._mean, self._trial).refuse_whole(count)

    def recorded(self, loss: Callable[..., Tensor], parts: Parts, dims: Sequence[int | None], count: int) -> None:
        """Refuse a loss that mixes the rows of the batch on which it is about to be recorded."""
        runs = LossRuns(self._capture, loss, parts, dims, self._trial)
        count, cut = self._cut(parts, dims, count)
        if not refuse_whole(runs if cut is parts else runs.on(cut), count, [ExampleAxis(0)]):
            self.whole_loss(loss, parts, dims, count, scalar=True)

    # ---- made rows -----------------------------------------------------------------------------------------------

    def _refuse_made(self, runs: TrialRuns, loss: Callable[..., Tensor] | None) -> None:
        """Refuse on made rows, which tell nothing about anybody. Nothing is known where they cannot be run."""
        try:
            if self._plainly_apart(runs):
                return
            if loss is None:
                ModuleTrial(runs, self._made, self._dimensions, self._mean).conclusive()
            else:
                LossTrial(self._capture, loss, runs.parts, runs.dims, self._mean, self._trial).refuse(self._made, None)
        except PrivacyError as error:
            if not str(error).startswith(UNKNOWN):
                raise
        except Exception as error:
            if out_of_memory(error):
                raise

    def _plainly_apart(self, runs: TrialRuns) -> bool:
        """Whether nothing changes for made rows, anywhere in the model, where the others are replaced."""
        rows = [Row(place) for place in range(self._made)]
        kept = [place for place in range(self._made) if place % 2]
        base = runs.observe(rows, read_state=False)
        other = runs.observe(replaced(rows, kept, "large"), read_state=False)
        pairs = list(_side_by_side(base, other))
        if any(one.shape != two.shape for one, two in pairs):
            return False
        ours, theirs = [], []
        for one, two in pairs:
            dims = [d for d, size in enumerate(one.shape) if size == self._made]
            if len(dims) == 1 and one.numel():
                rows_kept = (*[slice(None)] * dims[0], slice(1, None, 2))
                ours.append(one[rows_kept])
                theirs.append(two[rows_kept])
        if not ours:
            return True
        return bool((torch.stack([v.double().to(ours[0].device) for v in largest(ours, theirs)]) == 0).all())

    # ---- all rows ------------------------------------------------------------------------------------------------

    def _refuse_whole(self, runs: TrialRuns, count: int, places: Sequence[ExampleAxis | None]) -> None:
        count, cut = self._cut(runs.parts, runs.dims, count)
        whole = runs
        if cut is not runs.parts:
            whole = runs.on(cut)
        refuse_whole(whole, count, places)

    def _cut(self, parts: Parts, dims: Sequence[int | None], count: int) -> tuple[int, Parts]:
        """No more rows than a batch may have: there may be no memory for more."""
        if self._largest is None or count <= self._largest:
            return count, parts
        return self._largest, replace(parts, leaves=first_rows(parts.leaves, dims, self._largest))


def _side_by_side(*runs: RunResult) -> Any:
    lists = [[*(leaf for _, leaves in run.seen.outputs for leaf in leaves), *run.outputs] for run in runs]
    return zip(*lists, strict=True)
