"""Fingerprints of weights: whether two worlds have the same ones, without keeping both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

ALIKE = 1e-5
"""Relative: what rounding may do to equal work."""


def named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Everything that a module's state holds."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@lru_cache(maxsize=256)
def _weights(count: int) -> Tensor:
    return torch.cos(torch.arange(count, dtype=torch.float64))


def prints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, ...]]:
    """A fingerprint of each tensor: its sum, a weighted one and that of absolute values, whatever its size."""
    found: dict[str, tuple[float, ...]] = {}
    for name, tensor in tensors:
        flat = tensor.detach().double().cpu().flatten()
        found[name] = (float(flat.sum()), float(flat @ _weights(len(flat))), float(flat.abs().sum()))
    return found


def unlike(one: Mapping[str, tuple[float, ...]], other: Mapping[str, tuple[float, ...]]) -> str:
    """The name of a tensor that differs; "" if none does."""
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


__all__ = ["ALIKE", "named", "prints", "unlike"]
