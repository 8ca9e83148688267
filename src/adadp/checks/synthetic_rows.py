"""Rows made of a batch's schema alone: of the shape and the dtype of each leaf, and of no value in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adadp.checks.containers import Parts

#: How many rows: unlike the lengths that models have inside.
MADE = 7


def synthetic(parts: Parts, dims: Sequence[int | None], count: int = MADE) -> Parts | None:
    """The same container with `count` made rows in each leaf. None where a leaf with rows is no tensor.

    Floats are normal, integers 0 or 1 (indices that every embedding and every class has), booleans random.
    """
    generator = torch.Generator().manual_seed(0)
    leaves: list[Any] = []
    for leaf, dim in zip(parts.leaves, dims, strict=True):
        if dim is None:
            leaves.append(leaf)
            continue
        if not isinstance(leaf, Tensor):
            return None
        leaves.append(_made(leaf, dim, count, generator))
    return replace(parts, leaves=leaves)


def _made(leaf: Tensor, dim: int, count: int, generator: torch.Generator) -> Tensor:
    shape = [count if d == dim else size for d, size in enumerate(leaf.shape)]
    if leaf.is_floating_point() or leaf.is_complex():
        return torch.randn(shape, generator=generator).to(leaf.device, leaf.dtype)
    return torch.randint(2, shape, generator=generator).to(leaf.device, leaf.dtype)
