"""What one release costs, as plain values.

An event says which mechanism touched the data and with how much noise. It knows nothing of epsilons: the
accountants read it. `noise_multiplier` is always the noise's standard deviation over the bound on what *one
example* contributes, so replacing an example moves the release by up to 2 / noise_multiplier standard
deviations while adding or removing one moves it by 1 / noise_multiplier.

This module needs neither torch nor dp-accounting, so that the training engine can record events without them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from adadp.errors import ConfigurationError


class Neighbours(enum.StrEnum):
    """Which pairs of datasets the guarantee compares."""

    ADD_REMOVE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"

    @classmethod
    def _missing_(cls, value: object) -> Neighbours:
        names = " or ".join(repr(str(each)) for each in cls)
        raise ConfigurationError(f"neighbours must be {names}, not {value!r}")


LEAST_NOISE = 1e-100
"""A smaller noise multiplier protects nothing, and its square is 0 in floating point."""


def _require_noise(noise_multiplier: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= LEAST_NOISE):
        raise ConfigurationError(
            f"noise_multiplier must be a finite number above 0 (at least {LEAST_NOISE:g}), not {noise_multiplier!r}: "
            "without noise there is no guarantee"
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
class RenyiBlock:
    """Adaptively chosen releases that a privacy filter held to a Renyi divergence of `divergence` at `order`.

    What was released inside may depend on earlier outputs; only the bound, fixed beforehand, is known. It
    says nothing about orders above `order`, so only an accountant that works with Renyi divergences can
    compose it. `neighbours` is the relation that the divergences are about; None in files of version 0.1, which do not
    say it: there it is their ledger's.
    """

    order: float
    divergence: float
    neighbours: Neighbours | None = None

    def __post_init__(self) -> None:
        if self.neighbours is not None:
            object.__setattr__(self, "neighbours", Neighbours(self.neighbours))
        if not (math.isfinite(self.order) and self.order > 1):
            raise ConfigurationError(f"order must be a finite number above 1, not {self.order!r}")
        if not (math.isfinite(self.divergence) and self.divergence >= 0):
            raise ConfigurationError(f"divergence must be finite and not negative, not {self.divergence!r}")


@dataclass(frozen=True)
class Uncovered:
    """A release that no proof covers. One of these in a ledger makes its guarantee *none*.

    `claimed` is the event that a published text accounts for in its place, if any: it may be shown beside the
    reason as "claimed, not guaranteed".
    """

    reason: str
    claimed: Gaussian | PoissonGaussian | FixedSizeGaussian | None = None


CoveredEvent = Gaussian | PoissonGaussian | FixedSizeGaussian | RenyiBlock
Event = CoveredEvent | Uncovered


def with_noise(event: Event, noise_multiplier: float) -> Event:
    """The same release with other noise. Raises `ConfigurationError` where that is none, or not the event's to have."""
    _require_noise(noise_multiplier)
    if isinstance(event, RenyiBlock):
        raise ConfigurationError("a privacy filter's block has no noise multiplier of its own")
    if isinstance(event, Uncovered):
        claimed = None if event.claimed is None else replace(event.claimed, noise_multiplier=noise_multiplier)
        return replace(event, claimed=claimed)
    return replace(event, noise_multiplier=noise_multiplier)


_KINDS: dict[str, type[Event]] = {
    "gaussian": Gaussian,
    "poisson-gaussian": PoissonGaussian,
    "fixed-size-gaussian": FixedSizeGaussian,
    "renyi-block": RenyiBlock,
    "uncovered": Uncovered,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as plain JSON. Floats survive exactly: Python writes text that reads back equal."""
    if isinstance(event, Uncovered):
        claimed = None if event.claimed is None else event_to_json(event.claimed)
        return {"kind": "uncovered", "reason": event.reason, "claimed": claimed}
    return {"kind": _NAMES[type(event)], **{key: value for key, value in asdict(event).items() if value is not None}}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """The inverse of `event_to_json`. Raises `ConfigurationError` for anything that is not an event."""
    fields = dict(value)
    kind = _KINDS.get(fields.pop("kind", ""))
    if kind is None:
        raise ConfigurationError(f"not an event: {value!r}")
    if kind is Uncovered and fields.get("claimed") is not None:
        fields["claimed"] = event_from_json(fields["claimed"])
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigurationError(f"not an event: {value!r} ({error})") from None
