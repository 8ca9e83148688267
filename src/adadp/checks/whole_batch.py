"""The check of a whole batch: half of its rows are replaced, and the results of the others must not change.

Some modules and losses mix examples only where there are many: they keep the sixteen largest losses, give each expert a
limited capacity, or work on blocks of rows. A trial on a few rows does not show that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adadp.checks.result_comparison import ExampleAxis, differs
from adadp.checks.seeds import halves
from adadp.checks.trial_rows import Row
from adadp.checks.trial_runs import LossRuns, TrialRuns
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


def half_replaced(count: int, trial: int) -> tuple[list[int], list[list[Row]]]:
    """Which half of the rows is kept, and two batches to run on in turn, if the model does not take the first.

    The others become copies of one example, larger than any or as it is: many of a kind exceed a limited capacity.
    """
    kept, others = halves(count, trial)
    return kept, [
        [Row(kept[0], kind) if place in others else Row(place) for place in range(count)] for kind in ("large", "own")
    ]


def refuse_whole(runs: TrialRuns, places: Sequence[ExampleAxis | None]) -> bool:
    """Raise where the module or the loss mixes the rows of its batch. `places` says where examples are in its results.

    Returns:
        False where no result has a row for each example, so that nothing was compared.

    """
    count = runs.arguments.count
    if count <= 4:
        return True  # the trial on a few rows had them all
    kept, (large, own) = half_replaced(count, runs.trial)
    base = _outputs(runs, [Row(place) for place in range(count)])
    try:
        other = _outputs(runs, large)
    except PrivacyError:
        raise
    except Exception as error:  # the model does not take such examples
        if out_of_memory(error):
            raise
        other = _outputs(runs, own)
    compared = False
    for one, two, place in zip(base, other, places, strict=False):
        if place is None or one.shape != two.shape or not _holds(one, place, count):
            continue
        compared = True
        if differs(place.unfolded(one), place.unfolded(two), 0, kept):
            if isinstance(runs, LossRuns):
                raise TrainingLoopError(LOSS)
            raise UnsupportedModuleError(MANY.format(runs.name))
    return compared


def _outputs(runs: TrialRuns, rows: Sequence[Row]) -> list[Tensor]:
    return runs.outputs(runs.leaves(rows), _SEED)


def _holds(tensor: Tensor, place: ExampleAxis, count: int) -> bool:
    return tensor.ndim > place.dim and tensor.shape[place.dim] == count * (place.each if place.each > 1 else 1)
