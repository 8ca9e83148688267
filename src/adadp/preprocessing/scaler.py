"""Standardisation of columns in unknown units, within the budget."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.accounting.events import Gaussian
from adadp.errors import ConfigurationError
from adadp.preprocessing import estimates, moments
from adadp.preprocessing.release import (
    Array,
    Charges,
    TakesMissing,
    as_rows,
    check_random_state,
    neighbours_differ,
    person_weights,
    release,
    require_columns,
    seed_assumption,
)

# Parts of 1 / noise_multiplier^2 for the histogram, the location, its histogram and the moments. The two
# for all columns have most; the two in between serve the few columns far from zero.
SHARES = (0.35, 0.15, 0.15, 0.35)


class DPStandardScaler(TakesMissing, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Subtract a noisy mean and divide by a noisy standard deviation, for columns in any unit.

    Four releases, d columns:
    1. a histogram over fixed power-of-two bins finds the interval of each column (sensitivity sqrt(d));
    2. a mean within it, for the d' columns far from zero such as years (sqrt(5 d' / 4)), and
    3. a histogram around that mean, which narrows their interval (sqrt(d'));
    4. values scaled by the interval and clipped to [-1, 1], and their squares: mean and deviation (sqrt(2
    d)).

    Formal guarantee: `fit` is four `Gaussian` events (`events_`, in order) under add-or-remove-one
    neighbours. All four are charged, whatever they show, so the cost does not depend on the data. What is
    kept is post-processing. Neither bounds nor the number of rows are asked for or assumed public; the number
    and order of columns are public.

    Parameters
    ----------
    noise_multiplier : of all four together; 1 / noise_multiplier^2 is split by fixed shares.
    noise_multipliers : the four, in order, in place of `noise_multiplier`.
    clip : outputs are clipped to [-clip, clip] deviations (a map of each row by itself); None leaves them.
    random_state : None for the system's entropy; an int for tests and papers.

    Attributes: `mean_`, `scale_` (d,), raw units; `resolved_` (d,) bool: False where too few cells stood out
    of the noise to find the column's unit (the column is then left as it is, and clipped).

    Edge cases: NaN cells contribute nothing and stay NaN; infinite cells count as the nearest end of the
    interval.
    """

    def __init__(
        self,
        noise_multiplier: float = 10.0,
        *,
        noise_multipliers: tuple[float, float, float, float] | None = None,
        clip: float | None = 5.0,
        random_state: int | None = None,
    ) -> None:
        self.noise_multiplier = noise_multiplier
        self.noise_multipliers = noise_multipliers
        self.clip = clip
        self.random_state = random_state

    def planned_events(self) -> tuple[Gaussian, ...]:
        """Return what `fit` will charge, before it touches any data."""
        if self.noise_multipliers is None:
            whole = Gaussian(self.noise_multiplier).noise_multiplier
            return tuple(Gaussian(whole / math.sqrt(share)) for share in SHARES)
        if len(self.noise_multipliers) != len(SHARES):
            raise ConfigurationError(
                f"noise_multipliers must be {len(SHARES)} numbers: histogram, location, histogram around it, moments"
            )
        return tuple(Gaussian(sigma) for sigma in self.noise_multipliers)

    def fit(self, X: Any, y: object = None, *, ledger: Charges | None = None, persons: Any = None) -> Self:  # noqa: N803
        """Learn means and deviations from rows (n, d). `ledger` is charged before each release.

        `persons`: one id for each row. Neighbours then differ in all rows of one person; persons weigh alike.
        """
        del y
        rows = as_rows(X, "DPStandardScaler")
        weights = person_weights(persons, len(rows), ledger)
        columns = rows.shape[1]
        seed = check_random_state(self.random_state)
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip must be above 0 or None, not {self.clip!r}")
        events = self.planned_events()

        def noisy(step: int, statistic: Array, sensitivity: float) -> tuple[Array, float]:
            sigma = events[step].noise_multiplier
            released, _ = release(
                statistic,
                sensitivity=sensitivity,
                noise_multiplier=sigma,
                random_state=seed,
                purpose=f"DPStandardScaler/{step}",
                ledger=ledger,
            )
            return released, sigma * sensitivity

        histogram = moments.signed_histogram(rows, np.zeros(columns), weights)
        low, high, resolved = estimates.interval(*noisy(0, histogram, moments.histogram_sensitivity(columns)))

        # Which columns get a second look follows from released values. Where none needs it, all get it: both
        # releases are charged in any case, so that the cost does not depend on the data.
        chosen = estimates.far_from_zero(low, high) & resolved
        if not chosen.any():
            chosen = np.ones(columns, dtype=bool)
        part, few = rows[:, chosen], int(chosen.sum())
        middle, half = (low + high)[chosen] / 2.0, (high - low)[chosen] / 2.0
        sums = moments.bounded_sums(part, middle, half, weights)
        location = middle + half * estimates.mean(*noisy(1, sums, moments.mean_sensitivity(few)))
        around = moments.signed_histogram(part, location, weights)
        left, right, found = estimates.interval(*noisy(2, around, moments.histogram_sensitivity(few)))
        # Never wider than the first interval, which is a bound already.
        low[chosen] = np.where(found, np.maximum(location + left, low[chosen]), low[chosen])
        high[chosen] = np.where(found, np.minimum(location + right, high[chosen]), high[chosen])

        middle, half = (low + high) / 2.0, np.maximum(high - low, np.finfo(np.float64).tiny) / 2.0
        sums = moments.bounded_moments(rows, middle, half, weights)
        mean, deviation = estimates.mean_and_deviation(*noisy(3, sums, moments.moments_sensitivity(columns)))

        self.mean_ = np.where(resolved, middle + mean * half, 0.0)
        self.scale_ = np.where(resolved, deviation * half, 1.0)
        self.resolved_ = resolved
        self.n_features_in_ = columns
        self.events_ = events
        self.assumptions_ = (
            f"{neighbours_differ(persons)}; the scales do not use the number of rows",
            "the number, the order and the types of the columns are public",
            *seed_assumption(seed),
        )
        return self

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Standardise rows (n, d), float64. Each row is mapped by itself."""
        check_is_fitted(self)
        rows = as_rows(X, "DPStandardScaler")
        require_columns(rows, self.n_features_in_, "DPStandardScaler")
        with np.errstate(over="ignore"):
            scaled = (rows - self.mean_) / self.scale_
        return scaled if self.clip is None else np.clip(scaled, -self.clip, self.clip)
