"""What noisy statistics say about a column. Everything here is post-processing of released values."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from adadp.preprocessing.moments import LOWER, UPPER, ZERO_BIN
from adadp.preprocessing.release import Array

Mask = npt.NDArray[np.bool_]

# Chance that noise alone makes any bin of any column look occupied.
_FALSE_BIN = 0.01


def interval(counts: Array, deviation: float) -> tuple[Array, Array, Mask]:
    """Lowest and highest value of each column, from noisy counts (d, bins), and whether there is an interval.

    They are the edges of the outermost bins that stand out of the noise (its `deviation` a bin): what lies
    further out is fewer rows a bin than the noise hides. A column seen to hold nothing but zero has none.
    """
    columns, bins = counts.shape
    occupied = counts > deviation * math.sqrt(2.0 * math.log(columns * bins / _FALSE_BIN))
    lowest = occupied.argmax(axis=1)
    highest = bins - 1 - occupied[:, ::-1].argmax(axis=1)
    found = occupied.any(axis=1) & ~((lowest == ZERO_BIN) & (highest == ZERO_BIN))
    return np.where(found, LOWER[lowest], -1.0), np.where(found, UPPER[highest], 1.0), found


def far_from_zero(low: Array, high: Array) -> Mask:
    """Columns of one sign within two octaves: their offset may be far larger than their spread."""
    near, far = np.minimum(np.abs(low), np.abs(high)), np.maximum(np.abs(low), np.abs(high))
    return np.asarray((np.sign(low) == np.sign(high)) & (4.0 * near >= far), dtype=np.bool_)


def mean(sums: Array, deviation: float) -> Array:
    """Mean of u, shape (d,), from noisy `bounded_sums`; 0 where the number of cells is lost in the noise."""
    known, count = _count(sums[1] / 0.5, deviation / 0.5)
    return np.where(known, np.clip(sums[0] / count, -1.0, 1.0), 0.0)


def mean_and_deviation(sums: Array, deviation: float) -> tuple[Array, Array]:
    """Mean and standard deviation of u, shapes (d,), from noisy `bounded_moments`.

    Variances are kept above their own noise, so that nothing is divided by what was not resolved; where the
    number of cells is lost in the noise they read 0 and 1: unknown.
    """
    known, count = _count(sums[2] / math.sqrt(0.75), deviation / math.sqrt(0.75))
    average = np.where(known, np.clip(sums[0] / count, -1.0, 1.0), 0.0)
    square = (sums[1] + 0.5 * count) / count
    floor = np.minimum(deviation / count, 1.0)
    variance = np.where(known, np.clip(square - np.square(average), floor, 1.0), 1.0)
    return average, np.sqrt(variance)


def _count(noisy: Array, deviation: float) -> tuple[Mask, Array]:
    # Below three deviations of its own noise a count says nothing, and a quotient by it could be anything.
    known = noisy > max(3.0 * deviation, 1.0)
    return known, np.where(known, noisy, 1.0)
