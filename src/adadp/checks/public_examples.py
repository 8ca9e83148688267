"""Public examples in the place of private ones (`make_private(public_examples=)`).

They go through the loader's collate function, and the arguments of a call are built from the resulting batch as the
loop built them from its own. A refusal on public examples tells nothing about private ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adadp.checks.containers import Arguments, Parts, take_apart
from adadp.checks.dataset_items import fetched
from adadp.checks.inputs import matched
from adadp.errors import ConfigurationError

#: The most that are used: a usual batch size.
_MOST = 256


@dataclass(frozen=True)
class PublicExamples:
    """Public items, and the batch that the loader's collate function makes of them."""

    items: list[Any]
    batch: Parts

    def arguments(self, private: Arguments, batch: Parts) -> Arguments | None:
        """Arguments made of the public batch as the loop made `private` of the lot's `batch`.

        None where that is not known: an argument with a row for each example is none of the batch's tensors.
        """
        count = len(self.items)
        if len(batch.leaves) != len(self.batch.leaves):
            return None
        leaves: list[Any] = []
        for leaf, dim in private.pairs():
            if dim is None:
                leaves.append(leaf)
                continue
            match = matched(leaf, batch)
            public = None if match is None else self.batch.leaves[match[0]]
            if match is None or not isinstance(public, Tensor):
                return None
            made = match[1](public).to(leaf.device, leaf.dtype)
            if made.ndim != leaf.ndim or made.shape[dim] != count:
                return None
            leaves.append(made)
        return private.with_leaves(leaves, count)


def public_examples_of(examples: Any, collate: Callable[..., Any]) -> PublicExamples | None:
    """The public examples that a user gave: a list of items, or a Dataset of them. None for None."""
    if examples is None:
        return None
    try:
        items = fetched(examples, range(min(len(examples), _MOST)))
    except (TypeError, AttributeError, KeyError, IndexError):
        raise ConfigurationError("public_examples must be a list of a dataset's items, or a Dataset") from None
    if len(items) < 2:
        raise ConfigurationError("public_examples must be at least two: one example has nothing to mix with")
    return PublicExamples(items, take_apart(collate(items), len(items)))
