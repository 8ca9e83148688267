"""Whether a loss, with the model and the collate function before it, is a plain mean (or sum) over examples.

Each example's gradient may not change when others are replaced, left out or made longer. Norms of gradients are
compared: everything that a loss does to an example's share shows in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from adadp.checks.comparison import coarse
from adadp.checks.containers import Parts
from adadp.checks.gradient_norms import (
    CROSSED,
    Norms,
    crossing_parameter,
    example_norms,
    module_of,
    norms_alike,
    scales,
)
from adadp.checks.module_state import ModuleState
from adadp.checks.padding import REACHES, Padded, evaluating
from adadp.checks.seeds import Draws, halves, redraws, seed_of, seeded
from adadp.checks.unlike_rows import KINDS, Row, replaced, splits, unlike_rows, with_rows
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
    """One trial of `loss(*batch)`, on rows of the batch."""

    def __init__(
        self,
        capture: Capture,
        loss: Callable[..., Tensor],
        parts: Parts,
        dims: Sequence[int | None],
        mean: bool,
        trial: int = 0,
    ) -> None:
        self._capture, self._loss, self._mean, self._trial = capture, loss, mean, trial
        self._draws = Draws()
        self.scalar = False  # whether the loss is one number for all examples, once it was tried
        self._parts, self._dims = parts, dims
        self._before = ModuleState(capture.module)
        self._coarse = coarse(capture.module)

    def refuse(self, count: int, lengths: Padded | None) -> None:
        """Refuse a loss that mixes examples."""
        rows = [Row(index) for index in unlike_rows(self._parts.leaves, self._dims, count, 4)]
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
        # Other numbers are drawn for other shapes: without them then.
        drawn = self._draws.any or not norms_alike(base, redrawn, range(len(rows)), 1e-3)
        with evaluating(self._capture.module) if drawn else nullcontext():
            whole = self._norms(rows) if drawn else base
            decided = not norms_alike(whole, self._norms(rows[1:]), range(1, len(rows)), self._coarse, missing=1)
            if decided and not (drawn and self._still_drawn(rows, whole)):
                raise TrainingLoopError(_MIXES)
            if lengths is not None:
                self._refuse_padding(lengths)

    def _still_drawn(self, rows: Sequence[Row], whole: Norms) -> bool:
        """Whether random numbers decide the gradients in evaluation mode too, as those of numpy may."""
        return any(not norms_alike(whole, self._norms(rows, seed), range(len(rows)), 1e-3) for seed in range(1, 6))

    def _redraw(self, rows: Sequence[Row]) -> None:
        """What happens with some probability only is met by more draws."""
        kept = [place for place in range(len(rows)) if place % 2]
        for seed in range(2, 2 + redraws(self._draws, own=bool(self._before.generators))):
            self._compare(self._norms(rows, seed), rows, kept, "large", seed)

    def refuse_whole(self, count: int) -> None:
        """Refuse a scalar loss that mixes the rows of a whole batch: half of them are replaced."""
        kept, others = halves(count, self._trial)
        base = self._norms([Row(place) for place in range(count)])
        for kind in ("large", "own"):
            rows = [Row(kept[0], kind) if place in others else Row(place) for place in range(count)]
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

    def _compare(self, base: Norms, rows: Sequence[Row], kept: Sequence[int], first: str, seed: int = 0) -> None:
        for kind in dict.fromkeys((first, "own")):
            try:
                other = self._norms(replaced(rows, kept, kind), seed)
            except PrivacyError:
                raise
            except Exception:  # the model does not take such an example: another one is tried
                continue
            if not norms_alike(base, other, kept, self._coarse):
                raise TrainingLoopError(_MIXES)
            return

    def _refuse_crossing(self, rows: Sequence[Row], base: Norms) -> None:
        factors = scales(len(rows))
        scaled = self._norms(rows, factors=factors)
        crossing = crossing_parameter(base, scaled, factors) if scaled else None
        if crossing is not None:
            raise UnsupportedModuleError(CROSSED.format(module_of(crossing, self._capture)))

    def _refuse_padding(self, lengths: Padded) -> None:
        base = self._of(lengths.base, lengths.count)
        if not any(
            norms_alike(base, self._of(one, lengths.count), lengths.kept, self._coarse) for one in lengths.longer
        ):
            raise TrainingLoopError(REACHES.format("the loss"))

    def _norms(self, rows: Sequence[Row], seed: int = 0, factors: Sequence[float] | None = None) -> Norms:
        leaves = [
            with_rows(leaf, dim, rows, name)
            for leaf, dim, name in zip(self._parts.leaves, self._dims, self._parts.names, strict=True)
        ]
        return self._of(leaves, len(rows), seed, factors)

    def _of(self, leaves: Sequence[Any], count: int, seed: int = 0, factors: Sequence[float] | None = None) -> Norms:
        """Squared norms of the examples' own gradients. With `factors`, nothing where the loss is not per example."""
        try:
            with seeded(seed_of(self._trial, seed)) as draws, self._capture.aside(), torch.enable_grad():
                value = self._loss(*self._parts.rebuilt(leaves))
                self.scalar = value.ndim == 0
                if value.ndim == 0:
                    if factors is not None:
                        return {}
                    total = value * (count if self._mean else 1)
                elif value.shape == (count,):
                    total = (value * value.new_tensor(factors if factors is not None else [1.0] * count)).sum()
                else:
                    raise TrainingLoopError(_SHAPE)
                self._capture.differentiate(total)
                norms = example_norms(self._capture, count)
            self._draws.plain |= draws.plain
            self._draws.tensors |= draws.tensors
            return norms
        finally:
            self._before.restore()


def refuse_crossing_rows(capture: Capture, losses: Tensor) -> None:
    """Refuse losses [n] of a pass that has run, if the gradient of one reaches another example. The graph stays."""
    if capture.recorded or not losses.requires_grad:
        return  # a pass before this one is not to be disturbed
    early, capture.bound_early = capture.bound_early, None
    try:
        plain = _through(capture, losses, [1.0] * len(losses))
        factors = scales(len(losses))
        crossing = crossing_parameter(plain, _through(capture, losses, factors), factors)
    finally:
        capture.bound_early = early
    if crossing is not None:
        raise UnsupportedModuleError(CROSSED.format(module_of(crossing, capture)))


def _through(capture: Capture, losses: Tensor, factors: Sequence[float]) -> Norms:
    capture.differentiate((losses * losses.new_tensor(factors)).sum(), retain_graph=True)
    return example_norms(capture, len(losses))
