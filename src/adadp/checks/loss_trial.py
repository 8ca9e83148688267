"""The long trial of a loss, with the model and the collate function before it: is it a plain mean (or sum)?

The gradient of each example's share may not change where others are replaced, left out or made longer. Norms of
gradients are compared: whatever scales or mixes an example's share changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from adadp.checks.gradient_norms import (
    CROSSED,
    Norms,
    crossing_parameter,
    example_norms,
    module_of,
    norms_alike,
    scales,
)
from adadp.checks.padding import REACHES, Padded
from adadp.checks.result_comparison import coarse
from adadp.checks.seeds import redraws
from adadp.checks.trial_rows import KINDS, Row, replaced, splits, unlike_rows
from adadp.checks.trial_runs import LossRuns, evaluating
from adadp.checks.whole_batch import half_replaced
from adadp.errors import PrivacyError, TrainingLoopError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.out_of_memory import out_of_memory

_MIXES = (
    "the loss mixes examples: the gradient of one example's share changes with the others (a mean over all tokens of a "
    "batch, weights that are divided by their sum, examples that are compared). Return a loss for each example, [n]: "
    "with reduction='none', and a mean over an example's own tokens."
)
UNKNOWN = "the loss cannot be tried on a few examples of a batch, so it is not known whether it keeps them apart"
_SHAPE = "the loss must be one number for each example of the batch, [n], or their plain mean (or sum), a scalar"


class LossTrial:
    """One long trial of a loss. `mean` says what a scalar loss is over examples: a mean, or a sum."""

    def __init__(self, runs: LossRuns, mean: bool) -> None:
        self._runs, self._mean = runs, mean
        self.scalar = False  # whether the last run's loss was one number for all examples
        self._coarse = coarse(runs.module)

    def refuse(self, lengths: Padded | None) -> None:
        """Raise where the loss mixes examples, or where `lengths` are given and padding changes it."""
        rows = [Row(index) for index in unlike_rows(self._runs.arguments, 4)]
        try:
            base, redrawn = self._norms(rows), self._norms(rows, seed=1)
        except PrivacyError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise TrainingLoopError(f"{UNKNOWN}. Let it take batches of any size.") from None
        self._refuse_crossing(rows, base)
        for run, kept in enumerate(splits(len(rows))):
            self._compare(base, rows, kept, KINDS[(run + 1) % len(KINDS)])
        self._redraw(rows)
        # With another number of rows other random numbers are drawn: evaluation mode draws none, as a rule.
        drawn = self._runs.draws.any or not norms_alike(base, redrawn, range(len(rows)), 1e-3)
        with evaluating(self._runs.module) if drawn else nullcontext():
            whole = self._norms(rows) if drawn else base
            changed = not norms_alike(whole, self._norms(rows[1:]), range(1, len(rows)), self._coarse, missing=1)
            if changed and not (drawn and self._still_drawn(rows, whole)):
                raise TrainingLoopError(_MIXES)
            if lengths is not None:
                self._refuse_padding(lengths)

    def refuse_whole(self) -> None:
        """Raise where a scalar loss mixes the rows of the whole batch: half of them are replaced."""
        kept, batches = half_replaced(self._runs.arguments.count, self._runs.trial)
        base = self._norms([Row(place) for place in range(self._runs.arguments.count)])
        for rows in batches:
            try:
                other = self._norms(rows)
            except PrivacyError:
                raise
            except Exception as error:
                if out_of_memory(error):
                    raise
                continue
            if not norms_alike(base, other, kept, self._coarse):
                raise TrainingLoopError(_MIXES)
            return

    def _still_drawn(self, rows: Sequence[Row], whole: Norms) -> bool:
        """Whether random numbers change the gradients in evaluation mode too, as those of numpy may."""
        return any(not norms_alike(whole, self._norms(rows, seed), range(len(rows)), 1e-3) for seed in range(1, 6))

    def _redraw(self, rows: Sequence[Row]) -> None:
        """Compare with more seeds, to meet what happens with some probability only."""
        kept = [place for place in range(len(rows)) if place % 2]
        for seed in range(2, 2 + redraws(self._runs.draws, own=bool(self._runs.before.generators))):
            self._compare(self._norms(rows, seed), rows, kept, "large", seed)

    def _compare(self, base: Norms, rows: Sequence[Row], kept: Sequence[int], first: str, seed: int = 0) -> None:
        for kind in dict.fromkeys((first, "own")):
            try:
                other = self._norms(replaced(rows, kept, kind), seed)
            except PrivacyError:
                raise
            except Exception:  # the model does not take such an example: the next kind is tried
                continue
            if not norms_alike(base, other, kept, self._coarse):
                raise TrainingLoopError(_MIXES)
            return

    def _refuse_crossing(self, rows: Sequence[Row], base: Norms) -> None:
        factors = scales(len(rows))
        scaled = self._norms(rows, factors=factors)
        crossing = crossing_parameter(base, scaled, factors) if scaled else None
        if crossing is not None:
            raise UnsupportedModuleError(CROSSED.format(module_of(crossing, self._runs.capture)))

    def _refuse_padding(self, lengths: Padded) -> None:
        try:
            base = self._norms_of(lengths.base, lengths.count)
            others = [self._norms_of(leaves, lengths.count) for leaves in lengths.longer]
        except PrivacyError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            return  # the model takes no longer rows: the trial of the module, which comes next, says that
        if not any(norms_alike(base, other, lengths.kept, self._coarse) for other in others):
            raise TrainingLoopError(REACHES.format("the loss"))

    def _norms(self, rows: Sequence[Row], seed: int = 0, factors: Sequence[float] | None = None) -> Norms:
        return self._norms_of(self._runs.leaves(rows), len(rows), seed, factors)

    def _norms_of(
        self, leaves: Sequence[Any], count: int, seed: int = 0, factors: Sequence[float] | None = None
    ) -> Norms:
        """Squared norms of each example's own gradient, times its factor squared. {} for a scalar with `factors`."""

        def total(outputs: list[Tensor]) -> Tensor | None:
            value = outputs[0]
            self.scalar = value.ndim == 0
            if self.scalar:
                return value * (count if self._mean else 1) if factors is None else None
            if value.shape != (count,):
                raise TrainingLoopError(_SHAPE)
            return (value * value.new_tensor(factors if factors is not None else [1.0] * count)).sum()

        return self._runs.norms_of(leaves, count, total, seed)


def refuse_crossing_rows(capture: Capture, losses: Tensor) -> None:
    """Raise where the gradient of one of the losses [n] of a finished pass reaches another example. The graph stays."""
    if capture.recorded or not losses.requires_grad:
        return  # gradients of an earlier pass are still held, and must not be overwritten
    early, capture.bound_early = capture.bound_early, None
    try:
        plain = _differentiated(capture, losses, [1.0] * len(losses))
        factors = scales(len(losses))
        crossing = crossing_parameter(plain, _differentiated(capture, losses, factors), factors)
    finally:
        capture.bound_early = early
    if crossing is not None:
        raise UnsupportedModuleError(CROSSED.format(module_of(crossing, capture)))


def _differentiated(capture: Capture, losses: Tensor, factors: Sequence[float]) -> Norms:
    capture.differentiate((losses * losses.new_tensor(factors)).sum(), retain_graph=True)
    return example_norms(capture, len(losses))
