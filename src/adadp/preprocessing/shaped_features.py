"""Fixed features in public directions, and in them a paid mean and paid second moments.

A private linear layer gains from features whose mean is taken off, and from knowing how large they are in each
direction: that is the shape of its gradients. Directions come from synthetic examples, which are public; mean and
second moments of the data inside them are few enough numbers to be released with little of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.accounting.events import Gaussian
from adadp.errors import ConfigurationError
from adadp.preprocessing.pca import second_moments
from adadp.preprocessing.release import (
    Array,
    Charges,
    check_random_state,
    neighbours_differ,
    person_weights,
    release,
    seed_assumption,
)

Floats = npt.NDArray[np.float32]

LENGTH = 5.0
"""Of a typical row after `transform`: so long that biases take little of the bound on an example's gradient."""
COUNT = 0.5
"""What a row adds to the count that is released with the mean, over the bound on the row."""
_AT_A_TIME = 256  # rows, which fit a cache


@dataclass(frozen=True)
class PublicDirections:
    """Principal directions of public rows.

    Attributes:
        mean: of the public rows at unit norm, shape (features,).
        vectors: orthonormal, the largest first, shape (features, count).
        values: variances along them, shape (count,).

    """

    mean: Floats
    vectors: Floats
    values: Floats

    @classmethod
    def of(cls, rows: Floats, count: int, power: float = 1.0) -> PublicDirections:
        """The `count` largest directions of powers of public rows (n, features); fewer, where there are no more."""
        unit: Array = unit_length(rows, power).astype(np.float64)
        mean = unit.mean(axis=0)
        centred = unit - mean
        count = min(count, most_directions(*rows.shape))
        if len(rows) < rows.shape[1]:  # the same from inner products of rows, of which there are fewer
            values, left = np.linalg.eigh(centred @ centred.T / len(rows))
            top = np.argsort(values)[::-1][:count]
            vectors = np.linalg.qr(centred.T @ left[:, top])[0]
        else:
            values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
            top = np.argsort(values)[::-1][:count]
            vectors = vectors[:, top]
        # An eigenvector's sign is arbitrary; fixing it makes runs equal across LAPACK builds.
        peak = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
        vectors = vectors * np.where(peak < 0, -1.0, 1.0)
        return cls(mean.astype(np.float32), vectors.astype(np.float32), np.maximum(values[top], 0).astype(np.float32))


def most_directions(rows: int, features: int) -> int:
    """How many directions so many public rows have about their mean."""
    return min(features, max(1, rows - 1))


def unit_length(rows: npt.NDArray[Any], power: float = 1.0) -> Floats:
    """Signed powers of rows, at norm 1, float32; those that are zero or not finite become zero.

    Each row depends on itself alone.
    """
    wide: npt.NDArray[Any] = np.asarray(rows, dtype=np.float32)
    wide = np.where(np.isfinite(wide).all(axis=1, keepdims=True), wide, np.float32(0))
    largest = np.abs(wide).max(axis=1, keepdims=True, initial=0)
    wide = wide / np.where(largest > 0, largest, 1)
    if power != 1:
        wide = np.copysign(np.sqrt(np.abs(wide)) if power == 0.5 else np.abs(wide) ** power, wide)
    length = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    return np.asarray(wide / np.where(length > 0, length, 1), dtype=np.float32)


def mean_sensitivity() -> float:
    """L2 bound on one row's part in `bounded_sum`: sqrt(1 + COUNT^2)."""
    return math.sqrt(1 + COUNT**2)


def bounded_sum(rows: npt.NDArray[Any], weights: Array | None = None) -> Array:
    """Sum over rows of (u, COUNT), for u = row / max(1, |row|): shape (columns + 1,), float64.

    Sensitivity: adding or removing a row moves it by (u, COUNT), whose squared norm is |u|^2 + COUNT^2 <= 1 + COUNT^2.
    The last number is COUNT times the number of rows, so that need not be public. Rows with NaN or Inf count as zero
    rows. With `weights` [n] of rows, those whose weights add up to 1 move it by no more (the triangle inequality).
    """
    wide = np.asarray(rows, dtype=np.float64)
    wide = np.where(np.isfinite(wide).all(axis=1, keepdims=True), wide, 0.0)
    largest = np.abs(wide).max(axis=1, keepdims=True, initial=1.0)  # squares of 1e200 overflow
    length = largest * np.sqrt(np.square(wide / largest).sum(axis=1, keepdims=True))
    wide = wide / (np.maximum(length, 1.0) * (1 + 2.0**-32))
    each = np.ones(len(wide)) if weights is None else weights
    return np.append(each @ wide, COUNT * each.sum())


class ShapedFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Powers of rows at unit norm, in public directions or paid principal ones among them, less a public or paid mean.

    Formal guarantee: `fit` is at most two Gaussian events under add-or-remove-one neighbours, the mean's of
    `mean_noise_multiplier` and the second moments' of `moments_noise_multiplier`, both in `events_`. Public directions
    cost nothing. `transform` maps each row by itself.

    Parameters
    ----------
    directions : how many of the public directions are used, the largest first.
    mean_noise_multiplier : None takes the mean of the public rows instead, for nothing.
    moments_noise_multiplier : None takes the variances of the public rows instead, for nothing.
    power : of each feature, with its sign, before the row is brought to norm 1.
    random_state : None for the system's entropy; an int for tests and papers.

    Fitted: `moments_`, second moments of the coordinates that `transform` makes, public or released; `events_`.

    The noise of second moments can make eigenvalues negative; those below the noise's own spread count as that.
    """

    def __init__(
        self,
        directions: int = 1500,
        mean_noise_multiplier: float | None = None,
        moments_noise_multiplier: float | None = None,
        *,
        power: float = 0.5,
        random_state: int | None = None,
    ) -> None:
        self.directions = directions
        self.mean_noise_multiplier = mean_noise_multiplier
        self.moments_noise_multiplier = moments_noise_multiplier
        self.power = power
        self.random_state = random_state

    def planned_events(self) -> tuple[Gaussian, ...]:
        """What `fit` will charge."""
        return tuple(
            Gaussian(sigma)
            for sigma in (self.mean_noise_multiplier, self.moments_noise_multiplier)
            if sigma is not None
        )

    def fit(
        self,
        X: Any,  # noqa: N803
        y: object = None,
        *,
        public: PublicDirections,
        ledger: Charges | None = None,
        persons: Any = None,
    ) -> Self:
        """Learn mean and second moments of rows (n, features) in `public` directions. `ledger` is charged first.

        `persons`: one id for each row. Neighbours then differ in all rows of one person.
        """
        del y
        self._check()
        seed, weights = check_random_state(self.random_state), person_weights(persons, len(X), ledger)
        if X.shape[1] != len(public.mean):
            raise ConfigurationError(
                f"X has {X.shape[1]} features, and the public directions are of {len(public.mean)}"
            )
        if self.directions > public.vectors.shape[1]:
            raise ConfigurationError(f"directions must be at most {public.vectors.shape[1]}, not {self.directions}")
        self.mean_, self.vectors_ = public.mean, public.vectors[:, : self.directions]
        self.values_, self.offset_ = public.values[: self.directions].astype(np.float64), np.zeros(self.directions)
        self.events_: tuple[Gaussian, ...] = ()
        if self.mean_noise_multiplier is not None:
            self._learn_mean(X, weights, seed, ledger)
        if self.moments_noise_multiplier is not None:
            self._learn_moments(X, weights, seed, ledger)
        self.scale_ = LENGTH / math.sqrt(max(float(self.values_.sum()), 1e-12))
        self.moments_ = self.values_ * self.scale_**2
        self.n_features_in_ = len(public.mean)
        self.assumptions_ = (neighbours_differ(persons), *seed_assumption(seed))
        return self

    def _learn_mean(self, rows: Any, weights: Array | None, seed: int | None, ledger: Charges | None) -> None:
        """Release the sum in the directions. Rows are bounded and added before they are projected.

        A product of many rows in float32 may round the others differently where one row is left out; a sum of rows
        that were each computed alone, in float64, does not. The directions are orthonormal up to rounding: they
        lengthen no vector by more than `reach`, by Gershgorin's bound on the eigenvalues of their inner products.
        """
        assert self.mean_noise_multiplier is not None
        vectors = self.vectors_.astype(np.float64)
        reach = math.sqrt(np.abs(vectors.T @ vectors).sum(axis=1).max(initial=1.0))
        total = np.sum(
            [bounded_sum(unit - self.mean_, part) for unit, part in _parts(rows, self.power, weights)], axis=0
        )
        noisy, event = release(
            np.append(total[:-1] @ vectors / reach, total[-1]),
            sensitivity=mean_sensitivity(), noise_multiplier=self.mean_noise_multiplier, random_state=seed,
            purpose="mean of features", ledger=ledger,
        )  # fmt: skip
        offset = reach * noisy[:-1] / max(1.0, noisy[-1] / COUNT)
        self.offset_ = offset / max(1.0, float(np.linalg.norm(offset)))  # bounded rows have no longer mean
        self.events_ += (event,)

    def _learn_moments(self, rows: Any, weights: Array | None, seed: int | None, ledger: Charges | None) -> None:
        """Turn the directions to the eigenvectors of noisy second moments of centred rows, each at unit norm."""
        assert self.moments_noise_multiplier is not None
        size = self.vectors_.shape[1]
        upper = np.triu_indices(size)
        # As long as zz' in Frobenius norm, which is |z|^2 <= 1, with half the variance off the diagonal (DPPCA).
        isometric = np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))
        vectors = self.vectors_.astype(np.float64)
        inside = (
            ((unit - self.mean_) @ vectors - self.offset_, each) for unit, each in _parts(rows, self.power, weights)
        )
        noisy, event = release(
            sum(second_moments(part, each) for part, each in inside) * isometric,
            sensitivity=1.0, noise_multiplier=self.moments_noise_multiplier, random_state=seed,
            purpose="second moments of features", ledger=ledger,
        )  # fmt: skip
        matrix = np.zeros((size, size))
        matrix[upper] = noisy / isometric
        matrix = matrix + np.triu(matrix, 1).T
        values, turn = np.linalg.eigh(matrix)
        values, turn = values[::-1], turn[:, ::-1]
        peak = turn[np.abs(turn).argmax(axis=0), np.arange(size)]
        turn = turn * np.where(peak < 0, -1.0, 1.0)
        # Noise alone has eigenvalues up to about sigma sqrt(2 size): what is below says nothing.
        values = np.maximum(values, self.moments_noise_multiplier * math.sqrt(2 * size))
        self.values_ = values / values.sum()
        self.vectors_ = (self.vectors_ @ turn).astype(np.float32)
        self.offset_ = self.offset_ @ turn
        self.events_ += (event,)

    def _check(self) -> None:
        if self.directions < 1:
            raise ConfigurationError(f"directions must be at least 1, not {self.directions}")
        if not 0 < self.power <= 1:
            raise ConfigurationError(f"power must be above 0 and at most 1, not {self.power!r}")

    def transform(self, X: Any) -> Floats:  # noqa: N803
        """Coordinates of rows (n, features), float32, shape (n, directions)."""
        check_is_fitted(self)
        if X.ndim != 2 or X.shape[1] != self.n_features_in_:
            raise ConfigurationError(f"X must have shape (n, {self.n_features_in_}), not {tuple(X.shape)}")
        mean, onto, offset = self.projection()
        return np.concatenate([(unit - mean) @ onto - offset for unit, _ in _parts(X, self.power, None)])

    def projection(self) -> tuple[Floats, Floats, Floats]:
        """`mean`, `onto` and `offset` with which a row u at unit norm becomes (u - mean) @ onto - offset."""
        scaled = self.vectors_ * np.float32(self.scale_)
        return self.mean_, scaled, (self.offset_ * self.scale_).astype(np.float32)

    @property
    def _n_features_out(self) -> int:
        return int(self.vectors_.shape[1])


def _parts(rows: Any, power: float, weights: Array | None) -> Iterator[tuple[Floats, Array | None]]:
    """A few rows at a time at unit norm, with their weights: all at once would be large."""
    for first in range(0, max(1, len(rows)), _AT_A_TIME):
        part = slice(first, first + _AT_A_TIME)
        yield unit_length(np.asarray(rows[part]), power), None if weights is None else weights[part]
