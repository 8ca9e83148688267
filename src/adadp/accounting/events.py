"""What one release costs, as plain values.

An event says which mechanism touched the data and with how much noise. It knows nothing of epsilons: the
accountants read it. `noise_multiplier` is always the noise's standard deviation over the bound on what *one
example* contributes, so replacing an example moves the release by up to 2 / noise_multiplier standard deviations
while adding or removing one moves it by 1 / noise_multiplier.

This module needs neither torch nor dp-accounting, so that the training engine can record events without them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from adadp.errors import ConfigurationError


class Neighbours(enum.StrEnum):
    """Which pairs of datasets the guarantee compares."""

    ADD_REMOVE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


def _require_noise(noise_multiplier: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ConfigurationError(
            f"noise_multiplier must be a finite number above 0, not {noise_multiplier!r}: without noise "
            "there is no guarantee"
        )


@dataclass(frozen=True)
class Gaussian:
    """One Gaussian release computed on the whole dataset (DP-PCA, a private mean)."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _require_noise(self.noise_multiplier)


@dataclass(frozen=True)
class PoissonGaussian:
    """A Gaussian release on a lot in which each example is included independently with probability `rate`.

    Covered under add-or-remove-one neighbours only.
    """

    noise_multiplier: float
    rate: float

    def __post_init__(self) -> None:
        _require_noise(self.noise_multiplier)
        if not 0 < self.rate <= 1:
            raise ConfigurationError(f"rate must be in (0, 1], not {self.rate!r}")


@dataclass(frozen=True)
class FixedSizeGaussian:
    """A Gaussian release on a lot of exactly `lot` of `examples`, drawn without replacement.

    Covered under replace-one neighbours only.
    """

    noise_multiplier: float
    examples: int
    lot: int

    def __post_init__(self) -> None:
        _require_noise(self.noise_multiplier)
        if not 1 <= self.lot <= self.examples:
            raise ConfigurationError(f"lot must be in 1..{self.examples} (the dataset), not {self.lot!r}")


@dataclass(frozen=True)
class Uncovered:
    """A release that no proof covers. One of these in a ledger makes its guarantee *none*.

    `claimed` is the event that a published text accounts for in its place, if any: it may be shown beside the
    reason as "claimed, not guaranteed".
    """

    reason: str
    claimed: Gaussian | PoissonGaussian | FixedSizeGaussian | None = None


CoveredEvent = Gaussian | PoissonGaussian | FixedSizeGaussian
Event = CoveredEvent | Uncovered
