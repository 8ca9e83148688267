"""The bounded statistics behind private standardisation, without their noise.

Each is a sum over rows of a function of one row, so adding or removing a row moves it by that row's
contribution. `weights` [n] multiply the contributions: where those of a person's rows add up to at most 1, all of the
person's rows together move the sum by no more than one row does (the triangle inequality). Cells that are NaN
contribute nothing; infinite cells are treated as a number beyond any bound.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from adadp.preprocessing.release import Array

# Magnitudes fall into bins (2^(e-1), 2^e] for these e: the range of float32, fixed and public. What lies
# beyond counts in the last bin, what lies below counts as zero.
EXPONENTS = np.arange(-126, 129)

# Edges of all bins in order of value: negative numbers, zero (from 0 to 0), positive numbers.
_POWERS = np.exp2(EXPONENTS.astype(np.float64))
LOWER = np.concatenate([-_POWERS[::-1], [0.0], _POWERS / 2.0])
UPPER = np.concatenate([-_POWERS[::-1] / 2.0, [0.0], _POWERS])
ZERO_BIN = len(EXPONENTS)


def histogram_sensitivity(columns: int) -> float:
    """L2 bound on one row's part in `signed_histogram`: one count in one bin of each column, sqrt(d)."""
    return math.sqrt(columns)


def signed_histogram(rows: Array, centre: Array, weights: Array | None = None) -> Array:
    """Count, for each column, x - centre by sign and power of two: shape (d, bins).

    `centre`, shape (d,), is public or already released. A cell adds 1 to one bin of its column (a NaN to
    none), so a row adds a vector of norm at most sqrt(d). Knowing the sign as well as the magnitude costs
    nothing.
    """
    columns, bins = rows.shape[1], len(LOWER)
    with np.errstate(over="ignore", invalid="ignore"):
        values = rows - centre
    # frexp: |x| = m 2^e with m in [1/2, 1). A power of two itself (m = 1/2) belongs to the bin that it
    # bounds.
    mantissa, exponent = np.frexp(np.abs(values))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = np.where(np.isinf(values), EXPONENTS[-1], np.minimum(exponent, EXPONENTS[-1]))
    step = exponent.astype(np.int64) - int(EXPONENTS[0]) + 1
    step = np.where((values == 0) | (step < 1), 0, step)
    index = ZERO_BIN + np.where(values < 0, -step, step) + np.arange(columns) * bins
    there = ~np.isnan(rows)
    each = None if weights is None else np.broadcast_to(weights[:, None], rows.shape)[there]
    counts = np.bincount(index[there], each, minlength=columns * bins)
    return counts.astype(np.float64).reshape(columns, bins)


def mean_sensitivity(columns: int) -> float:
    """L2 bound on one row's part in `bounded_sums`: sqrt(5 d / 4)."""
    return math.sqrt(1.25 * columns)


def bounded_sums(rows: Array, centre: Array, bound: Array, weights: Array | None = None) -> Array:
    """Sums over rows of u and of 1/2, for u = clip((x - centre) / bound, -1, 1): shape (2, d).

    A cell adds a vector of squared norm u^2 + 1/4 <= 5/4, so a row adds at most sqrt(5 d / 4).
    """
    u, present = _clipped(rows, centre, bound)
    return np.stack([_total(u, weights), 0.5 * _total(present, weights)])


def moments_sensitivity(columns: int) -> float:
    """L2 bound on one row's part in `bounded_moments`: sqrt(2 d)."""
    return math.sqrt(2.0 * columns)


def bounded_moments(rows: Array, centre: Array, bound: Array, weights: Array | None = None) -> Array:
    """Sums over rows of u, u^2 - 1/2 and sqrt(3)/2, for u = clip((x - centre) / bound, -1, 1): shape (3, d).

    `centre` and `bound` (positive), shape (d,), are public or already released. A NaN cell adds nothing.

    Sensitivity: one cell adds a vector of squared norm u^2 + (u^2 - 1/2)^2 + 3/4 = u^4 + 1 <= 2, so a row
    adds at most sqrt(2 d). That is what u and u^2 alone would need; the constant, whose sum is the number of
    cells that are there, rides along for free, so neither the number of rows nor how many cells are missing
    has to be public.
    """
    u, present = _clipped(rows, centre, bound)
    square = np.where(present, np.square(u) - 0.5, 0.0)
    return np.stack([_total(u, weights), _total(square, weights), math.sqrt(0.75) * _total(present, weights)])


def _total(values: npt.NDArray[Any], weights: Array | None) -> Array:
    return np.asarray(values.sum(axis=0) if weights is None else weights @ values, dtype=np.float64)


def _clipped(rows: Array, centre: Array, bound: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    present = ~np.isnan(rows)
    # A difference or quotient that overflows is infinite and clips to 1 or -1; only a NaN cell gives NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        u = np.clip((rows - centre) / bound, -1.0, 1.0)
    return np.where(present, u, 0.0), present
