"""Standard normal values from uniform ones, with NumPy alone.

Used wherever noise is not drawn by a generator that has its own normal sampler: `secure_mode`, preprocessing without a
seed, and the keyed draws of `adadp.testing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def uniform_from(draw: Callable[[int], bytes], count: int) -> Numbers:
    """Return `count` uniform values in [0, 1), of 53 bits each; `draw(n)` returns n random bytes."""
    return uniform_of(np.frombuffer(draw(8 * count), dtype=np.uint64))


def uniform_of(words: np.ndarray[Any, np.dtype[np.uint64]]) -> Numbers:
    """Return the first 53 bits of each word as a number in [0, 1)."""
    return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normal_from(draw: Callable[[int], bytes], count: int) -> Numbers:
    """Return `count` independent standard normal values in float64; `draw(n)` returns n random bytes."""
    half = (count + 1) // 2
    return np.concatenate(box_muller(uniform_from(draw, half), uniform_from(draw, half)))[:count]


def box_muller(first: Numbers, second: Numbers) -> tuple[Numbers, Numbers]:
    """Return two independent standard normal values for each pair of uniform ones in [0, 1).

    With u and v uniform, sqrt(-2 log(1 - u)) times the cosine and the sine of 2 pi v are independent and normal.
    1 - u is never zero, so no value is infinite.
    """
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * math.pi * second
    return np.asarray(radius * np.cos(angle)), np.asarray(radius * np.sin(angle))
