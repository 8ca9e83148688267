"""Attacks on what is fitted before training: DP-PCA and private standardisation, release by release."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from adadp.accounting import gaussian
from adadp.accounting.accountant import require_target
from adadp.accounting.composition import canonical
from adadp.accounting.events import Event, Neighbours
from adadp.audit.attack import Transcript
from adadp.audit.promise import Promise, of_guarantee
from adadp.audit.target import require_noise
from adadp.errors import ConfigurationError
from adadp.preprocessing import DPPCA, DPStandardScaler, moments, pca, scaler
from adadp.preprocessing.release import Array
from adadp.preprocessing.release import release as preprocessing_release

ESTIMATORS = ("dp-pca", "dp-scaler")
_COLUMNS = 4
#: Other rows contribute nothing (NaN): whatever moves is the canary.
_OTHERS = np.full((3, _COLUMNS), np.nan)


@dataclass(frozen=True)
class PreprocessingThreat:
    """Fits an estimator to rows with and without one row that moves every release by all that it may."""

    estimator: str
    noise_multiplier: float
    isometric: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ConfigurationError(f"the estimator must be one of {', '.join(ESTIMATORS)}, not {self.estimator!r}")
        require_noise(self.noise_multiplier)

    @classmethod
    def for_epsilon(cls, estimator: str, epsilon: float, delta: float, **options: Any) -> PreprocessingThreat:
        """With the noise at which fitting costs `epsilon`."""
        require_target(epsilon, delta)
        return cls(estimator, 1 / gaussian.mu_for(epsilon, delta), **options)

    def _made(self, seed: int | None) -> DPPCA | DPStandardScaler:
        if self.estimator == "dp-pca":
            return DPPCA(2, self.noise_multiplier, isometric=self.isometric, random_state=seed)
        return DPStandardScaler(self.noise_multiplier, random_state=seed)

    def promise(self, delta: float) -> Promise:
        """What the estimator itself says that fitting cost."""
        events: list[tuple[Event, int]] = [(event, 1) for event in self._made(0).fit(_OTHERS).events_]
        composition = canonical(events)
        mu = gaussian.compose((event.noise_multiplier, count) for event, count in composition)  # type: ignore[union-attr]
        return of_guarantee(composition, gaussian.epsilon(mu, delta), delta, Neighbours.ADD_REMOVE)

    @property
    def name(self) -> str:
        """What the auditor sees."""
        return "every release"

    @property
    def canaries(self) -> tuple[str, ...]:
        """Rows to try: one coordinate, all of them; for the scaler, beyond every bound above or below."""
        return ("peak", "flat") if self.estimator == "dp-pca" else ("above", "below")

    def _row(self, canary: str) -> Array:
        if canary == "peak":
            return np.eye(_COLUMNS)[:1]
        return np.full((1, _COLUMNS), {"flat": 1.0, "above": 1e300, "below": -1e300}[canary])

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        """Fit once, and read every released number."""
        row = self._row(canary)
        rows = np.concatenate([row, _OTHERS]) if inside else _OTHERS
        with _recorded() as released:
            self._made(seed).fit(rows)
        seen = [self._look(step, row, *release) for step, release in enumerate(released)]
        likelihood = sum(length * projection - length**2 / 2 for projection, length in seen)
        return Transcript({"likelihood": likelihood}, tuple(projection for projection, _ in seen))

    def _look(self, step: int, row: Array, noisy: Array, deviation: float) -> tuple[float, float]:
        """A release along what the canary adds to it, in deviations, and how much the canary adds."""
        if self.estimator == "dp-pca":
            upper = np.triu_indices(_COLUMNS)
            weight = np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0) if self.isometric else 1.0)
            shift = pca.second_moments(row) * weight
        else:
            columns = noisy.shape[0] if step in (0, 2) else noisy.shape[1]
            part, zero, one = row[:, :columns], np.zeros(columns), np.ones(columns)
            # Beyond every bound: what it adds does not depend on where the interval is.
            shift = (
                moments.signed_histogram(part, zero) if step in (0, 2)
                else moments.bounded_sums(part, zero, one) if step == 1
                else moments.bounded_moments(part, zero, one)
            )  # fmt: skip
        length = float(np.linalg.norm(shift))
        return float((noisy * shift).sum()) / length / deviation, length / deviation


@contextmanager
def _recorded() -> Iterator[list[tuple[Array, float]]]:
    """Everything that the package's one way out lets out, with its noise's deviation: both are public."""
    released: list[tuple[Array, float]] = []
    original = preprocessing_release

    def release(statistic: Array, **how: Any) -> tuple[Array, Any]:
        noisy, event = original(statistic, **how)
        released.append((noisy, how["noise_multiplier"] * how["sensitivity"]))
        return noisy, event

    scaler.release = pca.release = release  # type: ignore[attr-defined]
    try:
        yield released
    finally:
        scaler.release = pca.release = original  # type: ignore[attr-defined]
