"""Principal components of a noisy second-moment matrix ("Analyze Gauss", Dwork and others, 2014)."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.errors import ConfigurationError
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

# Divisor that makes a normalised row shorter than 1 in spite of rounding: a float64 norm of d squares is off
# by at most about d * 2^-53, so this covers d up to 2^20.
_SHRINK = 1.0 + 2.0**-32


def unit_rows(rows: Array) -> Array:
    """Scale each row to norm 1 (at most, after rounding). Zero rows and rows with NaN or Inf become zero.

    Shape (n, d) in and out, float64. Each row depends on itself alone.
    """
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.where(finite, rows, 0.0)
    # Divide by the largest entry first: squares of 1e200 overflow and those of 1e-200 vanish.
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    scaled = rows / np.where(largest > 0, largest, 1.0)
    norm = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    return np.asarray(scaled / (np.where(norm > 0, norm, 1.0) * _SHRINK), dtype=np.float64)


def second_moments(rows: Array, weights: Array | None = None) -> Array:
    """Upper triangle, diagonal included, of Z'Z where Z holds the unit rows: a vector of d (d + 1) / 2.

    Sensitivity: adding or removing a row z adds or removes zz'. The part of it that is released has

        sum_i z_i^4 + sum_{i<j} z_i^2 z_j^2  =  ( (sum_i z_i^2)^2 + sum_i z_i^4 ) / 2  <=  (1 + 1) / 2  =  1,

    since sum z_i^4 <= (sum z_i^2)^2 <= 1. So independent noise of deviation sigma on each of these numbers,
    and a mirror image below the diagonal (post-processing), is one Gaussian event of noise multiplier sigma.
    The bound is reached by z = e_1. Rows are not centred: the mean depends on every row, and centring would
    make it 4. With `weights` [n] of rows, those whose weights add up to 1 count together for no more than one.
    """
    z = unit_rows(rows)
    if weights is not None:
        z = z * np.sqrt(weights)[:, None]
    return np.asarray((z.T @ z)[np.triu_indices(rows.shape[1])], dtype=np.float64)


class DPPCA(TakesMissing, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Project rows on the top eigenvectors of a noisy, uncentred second-moment matrix of the unit-norm rows.

    Formal guarantee: `fit` is one `Gaussian(noise_multiplier)` event under add-or-remove-one neighbours; it
    is in `events_`. `components_` and `eigenvalues_` are post-processing of it. `transform` maps each row by
    itself.

    Parameters
    ----------
    n_components : how many directions to keep, 1..d.
    noise_multiplier : standard deviation of the noise over the sensitivity, which is 1.
    isometric : False draws independent noise of one deviation for all entries on and above the diagonal, as
        published. True halves the variance off the diagonal at the same cost: with those entries counted as
        sqrt(2) z_i z_j the released vector is as long as zz' in Frobenius norm, exactly |z|^2 <= 1, and
        dividing by sqrt(2) afterwards is post-processing.
    random_state : None for the system's entropy; an int for tests and papers.

    Edge cases: rows that are zero or hold NaN or Inf contribute nothing to the fit; `transform` scales no row
    (unit norm is for the second moments only) and lets NaN through in the row that holds it.
    """

    def __init__(
        self,
        n_components: int = 60,
        noise_multiplier: float = 16.0,
        *,
        isometric: bool = False,
        random_state: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.noise_multiplier = noise_multiplier
        self.isometric = isometric
        self.random_state = random_state

    def fit(self, X: Any, y: object = None, *, ledger: Charges | None = None, persons: Any = None) -> Self:  # noqa: N803
        """Learn the directions from rows of shape (n, d). `ledger` is charged before anything is released.

        `persons`: one id for each row. Neighbours then differ in all rows of one person.
        """
        del y
        rows = as_rows(X, "DPPCA")
        weights = person_weights(persons, len(rows), ledger)
        features = rows.shape[1]
        seed = check_random_state(self.random_state)
        if not 1 <= self.n_components <= features:
            raise ConfigurationError(
                f"n_components must be in 1..{features} (the number of columns), not {self.n_components!r}"
            )
        upper = np.triu_indices(features)
        # Lengths of the released coordinates: see `isometric` above.
        weight = np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0) if self.isometric else 1.0)
        noisy, event = release(
            second_moments(rows, weights) * weight,
            sensitivity=1.0,
            noise_multiplier=self.noise_multiplier,
            random_state=seed,
            purpose="DPPCA",
            ledger=ledger,
        )
        matrix = np.zeros((features, features))
        matrix[upper] = noisy / weight
        matrix = matrix + np.triu(matrix, 1).T
        eigenvalues, vectors = np.linalg.eigh(matrix)
        top = np.argsort(eigenvalues)[::-1][: self.n_components]
        components = vectors[:, top].T
        # An eigenvector's sign is arbitrary; fixing it makes runs with one seed equal across LAPACK builds.
        peak = components[np.arange(len(top)), np.abs(components).argmax(axis=1)]
        self.components_ = components * np.where(peak < 0, -1.0, 1.0)[:, None]
        self.eigenvalues_ = eigenvalues[top]
        self.n_features_in_ = features
        self.events_ = (event,)
        self.assumptions_ = (neighbours_differ(persons), *seed_assumption(seed))
        return self

    def transform(self, X: Any) -> Array:  # noqa: N803
        """Coordinates of rows (n, d) along the components, shape (n, n_components), float64."""
        check_is_fitted(self)
        rows = as_rows(X, "DPPCA")
        require_columns(rows, self.n_features_in_, "DPPCA")
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(rows @ self.components_.T, dtype=np.float64)

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])
