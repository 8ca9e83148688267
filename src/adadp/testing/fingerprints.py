"""Fingerprints of tensors: whether two worlds have the same weights, without keeping both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

ALIKE = 1e-5
"""Relative difference that rounding may cause in equal computations."""

LENGTHS_ALIKE = 1e-2
"""Relative difference of a gradient's norm that rounding may cause with one more row, in half precision."""


def named_state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """A module's parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@lru_cache(maxsize=256)
def _weights(count: int) -> Tensor:
    return torch.cos(torch.arange(count, dtype=torch.float64))


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, ...]]:
    """A fingerprint of each tensor: the sum, a weighted sum, and the sum of absolute values."""
    found: dict[str, tuple[float, ...]] = {}
    for name, tensor in tensors:
        flat = tensor.detach().double().cpu().flatten()
        found[name] = (float(flat.sum()), float(flat @ _weights(len(flat))), float(flat.abs().sum()))
    return found


def differing(one: Mapping[str, tuple[float, ...]], other: Mapping[str, tuple[float, ...]]) -> str:
    """The name of a tensor whose fingerprints differ; "" if none do."""
    for name in [*one, *other]:
        first, second = one.get(name), other.get(name)
        if first is None or second is None:
            return name
        size = max(first[2], second[2], 1e-30)
        if not all(
            a == b or (a != a and b != b) or abs(a - b) <= ALIKE * size for a, b in zip(first, second, strict=True)
        ):
            return name
    return ""


def unmatched(one: Sequence[float], other: Sequence[float], least: float) -> int:
    """How many numbers of `one` have no partner of the same size in `other`. Both are sorted; each is used once.

    Numbers are the same where they differ by less than `LENGTHS_ALIKE`, relative, plus `least`.
    """
    place, missing = 0, 0
    for value in one:
        slack = 0.0 if math.isinf(value) else LENGTHS_ALIKE * value + least
        while place < len(other) and other[place] < value - slack:
            place += 1
        if place < len(other) and (other[place] == value or other[place] <= value + slack):
            place += 1
        else:
            missing += 1
    return missing


__all__ = ["ALIKE", "differing", "fingerprints", "named_state", "unmatched"]
