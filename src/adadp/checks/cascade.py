"""One trial of a module or a loss, cheapest check first.

1. Synthetic rows (`trial_rows.synthetic`): a refusal here tells nothing about private data.
2. A few rows of the batch: the short trial, and the long one where the short one does not pass.
3. The whole batch, with half of its rows replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from adadp.checks.containers import Arguments
from adadp.checks.loss_trial import UNKNOWN, LossTrial
from adadp.checks.module_trial import ModuleTrial
from adadp.checks.notes import say_through_func
from adadp.checks.padding import Padded
from adadp.checks.result_comparison import ExampleAxis
from adadp.checks.running_statistics import refusing_statistics
from adadp.checks.short_trial import ShortTrial, largest_differences
from adadp.checks.trial_rows import SYNTHETIC, Row, replaced, synthetic
from adadp.checks.trial_runs import LossRuns, TrialRuns
from adadp.checks.whole_batch import refuse_whole
from adadp.errors import PrivacyError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.capture.meetings import UnruledError
from adadp.gradients.capture.readings import UnlearntError
from adadp.out_of_memory import out_of_memory

Result = TypeVar("Result")


def learnt(runs: TrialRuns, attempt: Callable[[], Result], learn: bool = False) -> Result:
    """The attempt's result. Where it meets something whose examples are not known, they are learnt and it is repeated.

    With `learn` they are learnt first. What has no rule goes through torch.func from then on, with one notice for all
    of it.
    """
    capture = runs.capture
    before, noted = capture.readings.known(), len(capture.notices)
    while True:
        try:
            if learn:
                runs.learn()
            result = attempt()
            say_through_func(capture.module, capture.notices[noted:], capture.chunk, stacklevel=2)
            return result
        except UnlearntError as error:
            if learn:
                raise UnsupportedModuleError(str(error)) from None
            learn = True
        except UnruledError as error:
            capture.send_through_func(error)
            learn = True
        except BaseException:
            capture.readings.forget_since(before)
            raise


class Cascade:
    """The checks of one trial of a run.

    Args:
        capture: that of the private model.
        dimensions: where examples may be in a tensor, in this order: (0,), or (1, 0) for batch_first=False.
        mean: whether a scalar loss is a mean over examples, or a sum.
        trial: the number of this trial; each has random numbers of its own.
        largest: the most rows that a model is run on (the physical batch size), None for no limit.

    """

    def __init__(
        self, capture: Capture, dimensions: Sequence[int], mean: bool, trial: int, largest: int | None
    ) -> None:
        self._capture, self._dimensions, self._mean = capture, dimensions, mean
        self._trial, self._largest = trial, largest
        self._synthetic = SYNTHETIC if largest is None else max(4, min(SYNTHETIC, largest))  # rows

    def of_module(self, module: nn.Module, arguments: Arguments, *, synthetic_first: bool) -> bool:
        """Raise where a module mixes examples. False if these examples are too much alike to tell."""
        runs = TrialRuns(self._capture, module, arguments, self._trial)
        if synthetic_first:
            self._refuse_synthetic(runs)

        def attempt() -> bool:
            short = ShortTrial(runs, self._dimensions)
            decided, places = short.passes(), short.places
            if not decided:
                long = ModuleTrial(runs, self._dimensions, self._mean)
                decided, places = long.conclusive(), long.places
            refuse_whole(self._limited(runs), places)
            return decided

        return learnt(runs, attempt, learn=not self._capture.readings.covers())

    def of_loss(
        self, loss: Callable[..., Tensor], arguments: Arguments, lengths: Padded | None, *, synthetic_first: bool
    ) -> bool:
        """Raise where a loss mixes examples. Whether the modules that it calls were checked with it, layer by layer."""
        runs = LossRuns(self._capture, loss, arguments, self._trial)
        with refusing_statistics(runs.module):
            return self._of_loss(runs, lengths, synthetic_first=synthetic_first)

    def _of_loss(self, runs: LossRuns, lengths: Padded | None, *, synthetic_first: bool) -> bool:
        if synthetic_first:
            self._refuse_synthetic(runs)

        def attempt() -> bool:
            if lengths is None and ShortTrial(runs, self._dimensions).passes():
                refuse_whole(self._limited(runs), [ExampleAxis(0)])
                return True
            long = LossTrial(runs, self._mean)
            long.refuse(lengths)
            if not long.scalar:
                refuse_whole(self._limited(runs), [ExampleAxis(0)])
            else:
                self._refuse_whole_scalar(runs)
            return False

        return learnt(runs, attempt)

    def recorded(self, loss: Callable[..., Tensor], arguments: Arguments) -> None:
        """Raise where a loss mixes the rows of the batch on which a CUDA graph of it is about to be recorded."""
        runs = LossRuns(self._capture, loss, arguments, self._trial)

        def attempt() -> None:
            if not refuse_whole(self._limited(runs), [ExampleAxis(0)]):
                self._refuse_whole_scalar(runs)

        with refusing_statistics(runs.module):
            learnt(runs, attempt)

    # ---- synthetic rows ------------------------------------------------------------------------------------------

    def _refuse_synthetic(self, runs: TrialRuns) -> None:
        """Raise where synthetic rows are mixed. Where they cannot be run, private rows decide."""
        arguments = synthetic(runs.arguments, self._synthetic)
        if arguments is None:
            return
        made = runs.on(arguments)

        def attempt() -> None:
            if self._bitwise_equal(made):
                return
            if isinstance(made, LossRuns):
                LossTrial(made, self._mean).refuse(None)
            else:
                ModuleTrial(made, self._dimensions, self._mean).conclusive()

        try:
            learnt(made, attempt)
        except PrivacyError as error:
            if not str(error).startswith(UNKNOWN):
                raise
        except Exception as error:
            if out_of_memory(error):
                raise

    def _bitwise_equal(self, runs: TrialRuns) -> bool:
        """Whether no output of any layer changes for every second row where the others are replaced."""
        count = runs.arguments.count
        rows = [Row(place) for place in range(count)]
        base = runs.observe(rows, read_state=False)
        other = runs.observe(replaced(rows, range(1, count, 2), "large"), read_state=False)
        pairs = list(zip(base.tensors(), other.tensors(), strict=True))
        if any(one.shape != two.shape for one, two in pairs):
            return False
        ours, theirs = [], []
        for one, two in pairs:
            dims = [d for d, size in enumerate(one.shape) if size == count]
            if len(dims) == 1 and one.numel():
                rows_kept = (*[slice(None)] * dims[0], slice(1, None, 2))
                ours.append(one[rows_kept])
                theirs.append(two[rows_kept])
        if not ours:
            return True
        differences = [value.double().to(ours[0].device) for value in largest_differences(ours, theirs)]
        return bool((torch.stack(differences) == 0).all())

    # ---- the whole batch -----------------------------------------------------------------------------------------

    def _refuse_whole_scalar(self, runs: LossRuns) -> None:
        if runs.arguments.count > 4:
            limited = runs.on(self._first_rows(runs.arguments))
            LossTrial(limited, self._mean).refuse_whole()

    def _limited(self, runs: TrialRuns) -> TrialRuns:
        """The runs on no more rows than a model is given otherwise: there may be no memory for more."""
        arguments = self._first_rows(runs.arguments)
        return runs if arguments is runs.arguments else runs.on(arguments)

    def _first_rows(self, arguments: Arguments) -> Arguments:
        if self._largest is None or arguments.count <= self._largest:
            return arguments
        return arguments.chosen(range(self._largest))
