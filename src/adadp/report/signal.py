"""How much of a layer's released gradients is noise, from history.jsonl: post-processing of releases.

The estimate of a gradient's squared length is right on average and may be negative: where it lies within two of its
standard errors of zero, a layer's gradient is not told apart from nothing, and only the ratio's lower bound is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """The length of the noise over the length of the gradient, in one release.

    Attributes:
        value: the estimate; None where the gradient is not told apart from nothing.
        low: the value if the gradient is two standard errors longer.
        high: the value if it is two standard errors shorter; None without a bound.

    """

    value: float | None
    low: float
    high: float | None


def ratios(history: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    """The ratio of each layer over these lines together."""
    if not history:
        return {}
    names = list(dict.fromkeys(name for line in history for name in line["layers"]))
    return {name: _ratio([line for line in history if name in line["layers"]], name) for name in names}


def _ratio(lines: Sequence[Mapping[str, Any]], layer: str) -> Ratio:
    weights = [float(line.get("samples", 1)) for line in lines]
    parts = [line["layers"][layer] for line in lines]
    total = math.fsum(weights)

    def mean(key: str) -> float:
        return math.fsum(weight * float(part[key]) for weight, part in zip(weights, parts, strict=True)) / total

    squares = (weight * float(part["error"]) for weight, part in zip(weights, parts, strict=True))
    error = math.sqrt(math.fsum(square**2 for square in squares)) / total
    noise, signal = mean("noise"), mean("signal")
    shortest, longest = signal - 2 * error, max(signal, 0.0) + 2 * error
    known = shortest > 0
    return Ratio(
        math.sqrt(noise / signal) if known else None,
        math.sqrt(noise / longest) if longest > 0 else 0.0,
        math.sqrt(noise / shortest) if known else None,
    )


def thirds(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """The first and the last third of the lines, with their names; all of them, if they are few."""
    if len(history) < 3:
        return [("all steps", history)] if history else []
    part = len(history) // 3
    return [("first third of the steps", history[:part]), ("last third", history[-part:])]


def distribution(line: Mapping[str, Any]) -> list[tuple[float, float]] | None:
    """(sigma_i at a bin's centre, part of the coordinates) of one line; None where it has none."""
    found = line.get("noise_by_coordinate")
    try:
        low, per_decade, counts = float(found["low"]), float(found["per_decade"]), found["counts"]  # type: ignore[index]
        total = float(sum(counts))
        if total <= 0:
            return None
        return [(10 ** (low + (i + 0.5) / per_decade), count / total) for i, count in enumerate(counts)]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
