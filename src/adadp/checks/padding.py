"""Whether padding reaches a result: the same examples, with another one of their batch made longer.

A module or a loss is given what the collate function makes of a few items, in the place of what it made of the lot, and
then what it makes of them where one is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.collate import Recollated
from adadp.checks.containers import Parts, chosen

REACHES = (
    "{}: padding reaches the result: what it gives for an example changes where another one of the batch is longer. "
    "Mask the padding (attention_mask, src_key_padding_mask, pack_padded_sequence, a mean over an example's own "
    "tokens), or pad all items to one fixed length in the dataset."
)
UNTRIED = (
    "whether padding to the longest of a batch reaches the result was not tried: what the model is given is not what "
    "the collate function made"
)

#: What loops do to a batch before they give it to a model.
_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t[:, :-1],
    lambda t: t[:, 1:],
    lambda t: t.transpose(0, 1),
)


@dataclass(frozen=True)
class Padded:
    """The leaves of arguments for a few items, and for the same with one (`changed`) longer, padded at either end."""

    base: list[Any]
    longer: list[list[Any]]
    count: int
    changed: int

    @property
    def kept(self) -> list[int]:
        """The rows that did not change."""
        return [row for row in range(self.count) if row != self.changed]


class Unmatched(Exception):  # noqa: N818 - no error: it says that there is nothing to try
    """An argument's length goes with the lot's, and it is not the collate function's."""


def padded(parts: Parts, dims: Sequence[int | None], real: Parts, made: Recollated) -> Padded | None:
    """What to run on. None where nothing is padded; Unmatched where that cannot be known."""
    if made.longer is None or len(made.base.leaves) != len(real.leaves):
        return None
    lengths = _padded_lengths(real, made)
    if not lengths:
        return None
    count = made.rows
    found = [matched(leaf, real) for leaf in parts.leaves]
    base: list[Any] = []
    longer: list[list[Any]] = [[], []]
    for leaf, dim, match in zip(parts.leaves, dims, found, strict=True):
        if match is None:
            if isinstance(leaf, Tensor) and any(size in lengths for d, size in enumerate(leaf.shape) if d != dim):
                raise Unmatched
            base.append(chosen(leaf, dim, range(count)))
            for one in longer:
                one.append(base[-1])
            continue
        place, change = match
        one, other = made.base.leaves[place], made.longer.leaves[place]
        base.append(_like(change(one), leaf))
        for side, leaves in enumerate(longer):
            whole = _completed(one, other, made.changed, side) if made.random[place] else other
            leaves.append(_like(change(whole), leaf))
    if not any(match is not None and made.random[match[0]] for match in found):
        longer = longer[:1]
    return Padded(base, longer, count, made.changed)


def _padded_lengths(real: Parts, made: Recollated) -> set[int]:
    """How long the lot's batch is where the length depends on its items."""
    assert made.longer is not None
    lengths = set()
    for leaf, one, other in zip(real.leaves, made.base.leaves, made.longer.leaves, strict=True):
        if isinstance(leaf, Tensor) and isinstance(one, Tensor) and leaf.ndim == one.ndim == other.ndim:
            lengths |= {leaf.shape[d] for d in range(leaf.ndim) if one.shape[d] != other.shape[d]}
    return lengths | {length - 1 for length in lengths if length > 2}


def matched(leaf: Any, real: Parts) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """Which leaf of the batch an argument is, and what was done to it."""
    if not isinstance(leaf, Tensor):
        return None
    for change in _CHANGES:
        for place, other in enumerate(real.leaves):
            if not isinstance(other, Tensor) or other.ndim < (1 if change is _CHANGES[0] else 2):
                continue
            changed = change(other)
            if changed.shape == leaf.shape and (leaf is other or torch.equal(_plain(leaf), _plain(changed))):
                return place, change
    return None


def is_among(leaf: Tensor, dim: int, real: Parts, dims: Sequence[int | None]) -> bool:
    """Whether an argument is a part of the batch, row by row, whatever the rows' shape and precision."""
    if matched(leaf, real) is not None:
        return True
    rows = leaf.detach().movedim(dim, 0).flatten(1) if leaf.ndim > 1 else leaf.detach().unsqueeze(1)
    for other, own in zip(real.leaves, dims, strict=True):
        if not isinstance(other, Tensor) or own is None or other.numel() != leaf.numel():
            continue
        given = other.detach().movedim(own, 0).flatten(1) if other.ndim > 1 else other.detach().unsqueeze(1)
        if given.shape == rows.shape and torch.equal(_plain(rows), _plain(given.to(rows.device, rows.dtype))):
            return True
    return False


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double().nan_to_num() if tensor.is_floating_point() else tensor


def _like(tensor: Tensor, leaf: Tensor) -> Tensor:
    return tensor.to(leaf.device, leaf.dtype)


def _completed(one: Tensor, other: Tensor, changed: int, side: int) -> Tensor:
    """What was drawn for the shorter batch, with the longer one's padding on one side of it."""
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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode: dropout would draw other numbers for other shapes."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
