"""Whether a whole batch keeps its examples apart: half of its rows are replaced, and the others must not change.

Some modules and losses mix only where there are many examples: they keep the hardest sixteen, give each expert a number
of places, or work on blocks of rows. A few rows do not show that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from adadp.checks.comparison import ExampleAxis, differs
from adadp.checks.seeds import halves
from adadp.checks.trial_runs import LossRuns, TrialRuns
from adadp.checks.unlike_rows import Row
from adadp.errors import PrivacyError, TrainingLoopError, UnsupportedModuleError
from adadp.out_of_memory import out_of_memory

MANY = (
    "{} mixes examples: replacing half of the examples of a batch changes the output for the others, so a bound on one "
    "example's gradient does not bound its influence. Use layers that work on each example alone, however many there "
    "are."
)
LOSS = (
    "the loss mixes examples: replacing half of the examples of a batch changes the losses of the others (the hardest "
    "ones are kept, for instance). Return a loss for each example, [n], that is made of that example alone."
)
_SEED = 999  # of the random numbers of these runs


def refuse_whole(runs: TrialRuns, count: int, places: Sequence[ExampleAxis | None]) -> bool:
    """Refuse what mixes the `count` rows that `runs` has. `places` says where examples are in what comes out.

    False where nothing that comes out has a row for each example, so that nothing is known.
    """
    if count <= 4:
        return True  # the trial on a few rows had them all
    known = False
    base, other, kept = _compared(runs, count, lambda leaves: runs.outputs(leaves, _SEED))
    for one, two, place in zip(base, other, places, strict=False):
        if place is None or one.shape != two.shape or not _holds(one, place, count):
            continue
        known = True
        if differs(place.unfolded(one), place.unfolded(two), 0, kept):
            if isinstance(runs, LossRuns):
                raise TrainingLoopError(LOSS)
            raise UnsupportedModuleError(MANY.format(runs.name))
    return known


def _compared(
    runs: TrialRuns, count: int, work: Callable[[list[Any]], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """What comes out for the batch, for the batch with half of its rows replaced, and which rows were kept."""
    kept, others = halves(count, runs.trial)
    base = work(runs.leaves([Row(place) for place in range(count)]))
    for kind in ("large", "own"):
        # One example many times: it crowds what has room for a few of a kind.
        rows = [Row(kept[0], kind) if place in others else Row(place) for place in range(count)]
        try:
            return base, work(runs.leaves(rows)), kept
        except PrivacyError:
            raise
        except Exception as error:  # the model does not take such examples
            if out_of_memory(error) or kind == "own":
                raise
    raise AssertionError("the last kind returns or raises")


def _holds(tensor: Tensor, place: ExampleAxis, count: int) -> bool:
    return tensor.ndim > place.dim and tensor.shape[place.dim] == count * (place.each if place.each > 1 else 1)


def first_rows(leaves: Sequence[Any], dims: Sequence[int | None], count: int) -> list[Any]:
    """The first `count` rows of every leaf that has rows."""
    return [
        leaf if dim is None else leaf[:count] if isinstance(leaf, list) else _narrowed(leaf, dim, count)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _narrowed(leaf: Any, dim: int, count: int) -> Any:
    return leaf.narrow(dim, 0, count) if isinstance(leaf, Tensor) else leaf.take(range(count), dim)
