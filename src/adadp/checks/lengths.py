"""Whether padding reaches what a module gives: the same examples, with another one of their batch made longer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adadp.checks.comparison import coarse, example_axes, padded_alike
from adadp.checks.padding import REACHES, Padded, evaluating
from adadp.checks.trial_runs import TrialRuns
from adadp.errors import PrivacyError, UnsupportedModuleError


def refuse_padding(runs: TrialRuns, given: Padded, dimensions: Sequence[int]) -> bool:
    """Refuse a module where an example's result changes with how long the others are. False where that is not known."""
    with evaluating(runs.module):
        try:
            base = runs.observe_leaves(given.base).outputs
            redrawn = runs.observe_leaves(given.base, seed=1).outputs
            longer = [runs.observe_leaves(leaves).outputs for leaves in given.longer]
        except PrivacyError:
            raise
        except Exception:
            return False

    def agree(one: list[Tensor], other: list[Tensor], kept: Sequence[int]) -> bool:
        return _agree(one, other, given.count, kept, coarse(runs.module), examples_first=tuple(dimensions) == (0,))

    if not agree(base, redrawn, range(given.count)):
        return False  # it draws random numbers, and draws others for other lengths
    if not any(agree(base, other, given.kept) for other in longer):
        raise UnsupportedModuleError(REACHES.format(runs.name))
    return True


def _agree(
    base: list[Tensor], other: list[Tensor], count: int, kept: Sequence[int], halves: float, *, examples_first: bool
) -> bool:
    relative = 1e-4 if halves <= 1e-2 else halves / 4  # what other shapes do by rounding: 1e-5 in float32
    for one, two in zip(base, other, strict=False):
        place = example_axes(one, two, count, examples_first)
        if place is not None:
            one, two = place[0].unfolded(one), place[1].unfolded(two)
            if not all(padded_alike(one[row], two[row], relative, 1e-7) for row in kept):
                return False
    return True
