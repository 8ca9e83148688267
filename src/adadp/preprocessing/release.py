"""The one way out of this package: a bounded sum, its charge, then Gaussian noise."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import scipy.sparse

from adadp.accounting.events import Event, Gaussian
from adadp.accounting.spending import DEFAULT_UNIT
from adadp.errors import ConfigurationError
from adadp.normal import normal_from
from adadp.persons import PERSON, row_weights

Array = npt.NDArray[np.float64]


class Charges(Protocol):
    """Whatever can be charged for a release: a run of a ledger, or a list's `append` behind one method."""

    def charge(self, event: Event) -> object:
        """Record the event durably, or raise because the budget does not allow it."""


# The noise's randomness is drawn per release. A seeded stream is keyed by the estimator's name and the
# position of the release, so that two estimators with the same seed do not add the same noise twice: the
# difference of two releases with equal noise would show the data.
def standard_normal(shape: tuple[int, ...], random_state: int | None, purpose: str) -> Array:
    """Independent N(0, 1) draws in float64: from system entropy, or from a seed for tests."""
    if random_state is not None:
        words = [int(random_state) & 0xFFFFFFFF, int(random_state) >> 32, *purpose.encode()]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words))).standard_normal(shape)
    return normal_from(os.urandom, int(np.prod(shape))).reshape(shape)


def release(
    statistic: Array,
    *,
    sensitivity: float,
    noise_multiplier: float,
    random_state: int | None,
    purpose: str,
    ledger: Charges | None,
) -> tuple[Array, Gaussian]:
    """Charge for a Gaussian release of `statistic`, then make it.

    Guarantee: if adding or removing one row moves `statistic` by at most `sensitivity` in L2 norm, the result
    is one `Gaussian(noise_multiplier)` event. The charge comes first: if it raises, nothing is released.
    """
    event = Gaussian(noise_multiplier)
    if ledger is not None:
        ledger.charge(event)
    noise = standard_normal(statistic.shape, random_state, purpose)
    return statistic + noise * (noise_multiplier * sensitivity), event


def check_random_state(random_state: object) -> int | None:
    """Accept None (system entropy) or a non-negative integer; a generator's state is shared."""
    if random_state is None:
        return None
    if isinstance(random_state, bool) or not isinstance(random_state, int | np.integer) or random_state < 0:
        raise ConfigurationError(
            f"random_state must be None (system entropy) or a non-negative int, not {random_state!r}: a generator "
            "shared with other code could be drawn from twice"
        )
    return int(random_state)


def as_rows(values: Any, who: str) -> Array:
    """View `values` as float64 rows, shape (n, d). Non-finite entries are kept for the caller to bound."""
    if scipy.sparse.issparse(values):
        raise ConfigurationError(f"{who} does not take sparse input; use a dense array")
    given = np.asarray(values)
    if np.iscomplexobj(given):
        raise ConfigurationError(f"{who}: Complex data not supported")
    try:
        rows = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{who} takes numbers only; encode text first with HashedOneHot or DeclaredOneHot ({error})"
        ) from error
    if rows.ndim != 2:
        raise ConfigurationError(f"{who} takes rows of shape (n, d), not {rows.shape}. Reshape your data")
    if rows.shape[1] == 0:
        raise ConfigurationError(f"{who} needs at least one column (0 feature(s) given)")
    return rows


def person_weights(persons: Any, rows: int, ledger: Charges | None) -> Array | None:
    """The weight of each row where rows belong to persons, [n]; None where each row is a unit of its own.

    Raises:
        ConfigurationError: there is not one id for each row, or `ledger` protects another unit than this.

    """
    unit = getattr(ledger, "unit", None)
    if persons is None:
        if unit == PERSON:
            raise ConfigurationError(
                f"this ledger's run protects {PERSON}, and rows weigh alike here: somebody with many rows would count "
                "many times. Give fit(..., persons=ids), one id for each row"
            )
        return None
    if unit == DEFAULT_UNIT:
        raise ConfigurationError(
            f"this ledger's run protects {DEFAULT_UNIT}, and persons= is for {PERSON}: a ledger holds one unit. Start "
            f'the run with {{"unit": "{PERSON}"}} in its plan'
        )
    weights = np.asarray(row_weights(persons), dtype=np.float64)
    if len(weights) != rows:
        raise ConfigurationError(f"persons= has {len(weights):,} ids, but there are {rows:,} rows")
    return weights


def neighbours_differ(persons: Any) -> str:
    """The relation that a statistic's sensitivity is for, in words."""
    if persons is None:
        return "neighbours differ in one row"
    return "neighbours differ in all rows of one person, whose weights add up to 1"


def seed_assumption(random_state: int | None) -> tuple[str, ...]:
    """What a given seed adds to the assumptions of a guarantee."""
    if random_state is None:
        return ()
    return ("the seed of the noise stays secret and is used once",)


def require_columns(rows: np.ndarray[Any, Any], expected: int, who: str) -> None:
    """Refuse rows (n, d) of another number of columns than the estimator was fitted on."""
    if rows.shape[1] != expected:
        raise ConfigurationError(f"X has {rows.shape[1]} features, but {who} is expecting {expected} features as input")


class TakesMissing:
    """Tells scikit-learn that missing numbers (NaN) are taken."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.allow_nan = True
        return tags
