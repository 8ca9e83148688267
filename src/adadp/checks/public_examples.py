"""Public examples in the place of private ones: what the collate function makes of them, as a module is given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from adadp.checks.containers import Parts, take_apart
from adadp.checks.dataset_items import fetched
from adadp.checks.padding import matched
from adadp.errors import ConfigurationError

#: The most that are used: as large as batches that models are run on as a rule.
_MOST = 256


@dataclass(frozen=True)
class PublicExamples:
    """Public items, and the batch that the loader's collate function makes of them."""

    items: list[Any]
    batch: Parts

    @property
    def count(self) -> int:
        return len(self.items)

    def arguments(self, parts: Parts, dims: Sequence[int | None], real: Parts) -> Parts | None:
        """Arguments made of the public batch as the loop made `parts` of its own, `real`.

        None where that is not known: an argument with a row for each example is none of the batch's tensors.
        """
        if len(real.leaves) != len(self.batch.leaves):
            return None
        leaves: list[Any] = []
        for leaf, dim in zip(parts.leaves, dims, strict=True):
            if dim is None:
                leaves.append(leaf)
                continue
            match = matched(leaf, real)
            public = None if match is None else self.batch.leaves[match[0]]
            if match is None or not isinstance(public, Tensor):
                return None
            made = match[1](public).to(leaf.device, leaf.dtype)
            if made.ndim != leaf.ndim or made.shape[dim] != self.count:
                return None
            leaves.append(made)
        return replace(parts, leaves=leaves)


def public_examples_of(examples: Any, collate: Callable[..., Any]) -> PublicExamples | None:
    """The public examples that a user gave: a list of items, or a Dataset of them."""
    if examples is None:
        return None
    try:
        items = fetched(examples, range(min(len(examples), _MOST)))
    except (TypeError, AttributeError, KeyError, IndexError):
        raise ConfigurationError("public_examples must be a list of a dataset's items, or a Dataset") from None
    if len(items) < 2:
        raise ConfigurationError("public_examples must be at least two: one example has nothing to mix with")
    return PublicExamples(items, take_apart(collate(items), len(items)))


__all__ = ["PublicExamples", "public_examples_of"]
