"""Whether padding reaches a result: the same examples are run while another example of their batch is made longer.

The collate function is called on a few items, and again with one of them longer. A module or a loss is run on both
batches, put in the place of the lot's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adadp.checks.collate import Recollated
from adadp.checks.containers import Arguments, Parts, chosen
from adadp.checks.inputs import matched
from adadp.checks.module_trial import refuse_unlike
from adadp.checks.result_comparison import coarse, example_axes, padded_alike
from adadp.checks.trial_runs import TrialRuns, evaluating
from adadp.errors import PrivacyError, UnsupportedModuleError

REACHES = (
    "{}: padding reaches the result: what it gives for an example changes where another one of the batch is longer. "
    "Mask the padding (attention_mask, src_key_padding_mask, pack_padded_sequence, a mean over an example's own "
    "tokens), or pad all items to one fixed length in the dataset."
)
UNTRIED = (
    "whether padding to the longest of a batch reaches the result was not tried: what the model is given is not what "
    "the collate function made"
)


@dataclass(frozen=True)
class Padded:
    """Leaves of arguments for a few items, and for the same items with one (`changed`) longer.

    `longer` has two lists where random numbers are involved: padded at the end, and at the start.
    """

    base: list[Any]
    longer: list[list[Any]]
    count: int
    changed: int

    @property
    def kept(self) -> list[int]:
        """The rows whose items did not change."""
        return [row for row in range(self.count) if row != self.changed]


class Unmatched(Exception):  # noqa: N818 - no error: it says that there is nothing to try
    """An argument is as long as the lot's batch, and is no tensor that the collate function made."""


def padded(arguments: Arguments, batch: Parts, made: Recollated) -> Padded | None:
    """The leaves to run on. None where nothing is padded; raises Unmatched where that cannot be known."""
    if made.longer is None or len(made.base.leaves) != len(batch.leaves):
        return None
    lengths = _padded_lengths(batch, made)
    if not lengths:
        return None
    count = made.rows
    found = [matched(leaf, batch) for leaf in arguments.leaves]
    base: list[Any] = []
    longer: list[list[Any]] = [[], []]
    for (leaf, dim), match in zip(arguments.pairs(), found, strict=True):
        if match is None:
            if isinstance(leaf, Tensor) and any(size in lengths for d, size in enumerate(leaf.shape) if d != dim):
                raise Unmatched
            base.append(chosen(leaf, dim, range(count)))
            for one in longer:
                one.append(base[-1])
            continue
        place, change = match
        one, other = made.base.leaves[place], made.longer.leaves[place]
        base.append(change(one).to(leaf.device, leaf.dtype))
        for side, leaves in enumerate(longer):
            whole = _completed(one, other, made.changed, side) if made.random[place] else other
            leaves.append(change(whole).to(leaf.device, leaf.dtype))
    if not any(match is not None and made.random[match[0]] for match in found):
        longer = longer[:1]
    return Padded(base, longer, count, made.changed)


def _padded_lengths(batch: Parts, made: Recollated) -> set[int]:
    """Those lengths of the lot's batch that depend on its items, and one less (inputs and targets shifted by one)."""
    assert made.longer is not None
    lengths = set()
    for leaf, one, other in zip(batch.leaves, made.base.leaves, made.longer.leaves, strict=True):
        if isinstance(leaf, Tensor) and isinstance(one, Tensor) and leaf.ndim == one.ndim == other.ndim:
            lengths |= {leaf.shape[d] for d in range(leaf.ndim) if one.shape[d] != other.shape[d]}
    return lengths | {length - 1 for length in lengths if length > 2}


def _completed(one: Tensor, other: Tensor, changed: int, side: int) -> Tensor:
    """Rows drawn for the shorter batch, with the longer one's padding at the end (side 0) or the start (side 1)."""
    if one.shape == other.shape or one.ndim != other.ndim:
        return one
    whole = other.clone()
    places = tuple(
        slice(0, a) if side == 0 else slice(b - a, b) for a, b in zip(one.shape[1:], other.shape[1:], strict=True)
    )
    if any(a > b for a, b in zip(one.shape, other.shape, strict=True)):
        return other
    for row in range(len(one)):
        if row != changed:
            whole[row][places] = one[row]
    return whole


def refuse_padding(runs: TrialRuns, given: Padded, dimensions: Sequence[int]) -> bool:
    """Raise where a module's result for an example changes with the length of others. False where that is not known."""
    with evaluating(runs.module):
        try:
            first, second = runs.observe_leaves(given.base), runs.observe_leaves(given.base, seed=1)
            others = [runs.observe_leaves(leaves) for leaves in given.longer]
        except PrivacyError:
            raise
        except Exception:
            return False
    for other in others:
        refuse_unlike(first, other)
    base, redrawn, longer = first.outputs, second.outputs, [other.outputs for other in others]
    halves = coarse(runs.module)
    relative = 1e-4 if halves <= 1e-2 else halves / 4  # rounding with other shapes: 1e-5 in float32

    def agree(results: list[Tensor], kept: Sequence[int]) -> bool:
        for one, two in zip(base, results, strict=False):
            place = example_axes(one, two, given.count, tuple(dimensions) == (0,))
            if place is not None:
                one, two = place[0].unfolded(one), place[1].unfolded(two)
                if not all(padded_alike(one[row], two[row], relative, 1e-7) for row in kept):
                    return False
        return True

    if not agree(redrawn, range(given.count)):
        return False  # it draws random numbers in evaluation mode, and others for other lengths
    if not any(agree(other, given.kept) for other in longer):
        raise UnsupportedModuleError(REACHES.format(runs.name))
    return True
