"""Shaped features: what a row can move, what is charged, and that the noise is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adadp.accounting.events import Gaussian
from adadp.accounting.ledger import Ledger
from adadp.errors import BudgetExhaustedError, ConfigurationError
from adadp.preprocessing import PublicDirections, ShapedFeatures, load, save
from adadp.preprocessing.shaped_features import COUNT, LENGTH, bounded_sum, mean_sensitivity, unit_length

ROWS = np.random.default_rng(0).normal(size=(500, 30)).astype(np.float32) * np.linspace(3, 0.1, 30, dtype=np.float32)
PUBLIC = PublicDirections.of(np.random.default_rng(1).normal(size=(300, 30)).astype(np.float32), 12)


def fitted(**settings: object) -> ShapedFeatures:
    return ShapedFeatures(12, **{"power": 1.0, **settings}).fit(ROWS, public=PUBLIC)


class Charges:
    def __init__(self) -> None:
        self.events: list[object] = []

    def charge(self, event: object) -> None:
        self.events.append(event)


# ---- sensitivity ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "ordinary": np.ones(12), "unit": np.eye(12)[3], "huge": np.full(12, 1e300), "one huge": np.eye(12)[0] * 1e200,
    "tiny": np.full(12, 1e-300), "zero": np.zeros(12), "nan": np.full(12, np.nan), "inf": np.full(12, np.inf),
    "mixed": np.array([np.inf, -np.inf, np.nan, *range(9)]), "subnormal": np.full(12, 5e-324),
    "just above the bound": np.eye(12)[1] * (1 + 1e-15),
}  # fmt: skip


@pytest.mark.parametrize("row", HOSTILE.values(), ids=HOSTILE)
def test_no_row_moves_the_sum_by_more_than_its_sensitivity(row: np.ndarray) -> None:
    others = np.random.default_rng(2).normal(size=(20, 12))
    moved = bounded_sum(np.vstack([others, row])) - bounded_sum(others)
    assert np.linalg.norm(moved) <= mean_sensitivity() * (1 + 1e-12)
    assert moved[-1] == pytest.approx(COUNT)


def test_the_bound_is_reached() -> None:
    assert np.linalg.norm(bounded_sum(np.eye(12)[:1] * 5)) == pytest.approx(math.hypot(1, COUNT))


def test_a_person_with_many_rows_moves_the_sum_no_more_than_one_row() -> None:
    rows = np.random.default_rng(2).normal(size=(100, 12)) * 9
    assert np.linalg.norm(bounded_sum(rows, np.full(100, 0.01))) <= mean_sensitivity()
    assert np.linalg.norm(bounded_sum(np.tile(rows[:1], (100, 1)), np.full(100, 0.01))) == pytest.approx(
        mean_sensitivity()
    )


@pytest.mark.parametrize("what", ["mean", "moments"])
@pytest.mark.parametrize("row", HOSTILE.values(), ids=HOSTILE)
def test_what_is_released_hides_a_row(what: str, row: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics that reach `release` differ by no more than the sensitivity that is said there."""
    from adadp.preprocessing import shaped_features

    seen: list[tuple[np.ndarray, float]] = []

    def watched(statistic: np.ndarray, *, sensitivity: float, **more: object) -> tuple[np.ndarray, Gaussian]:
        seen.append((statistic.copy(), sensitivity))
        return statistic, Gaussian(1.0)

    monkeypatch.setattr(shaped_features, "release", watched)
    settings = {"mean_noise_multiplier": 1.0} if what == "mean" else {"moments_noise_multiplier": 1.0}
    wide = np.zeros((1, 30), dtype=np.float64)
    wide[0, :12] = row
    with np.errstate(over="ignore"):
        for rows in (ROWS, np.vstack([ROWS, wide])):
            ShapedFeatures(12, **settings).fit(rows, public=PUBLIC)
    (without, bound), (with_it, _) = seen
    assert np.isfinite(with_it).all()
    assert np.linalg.norm(with_it - without) <= bound * (1 + 1e-9)


# ---- what is charged ------------------------------------------------------------------------------------------------


def test_each_release_is_charged_before_it_is_made_and_planned_beforehand() -> None:
    for settings in ({}, {"mean_noise_multiplier": 7.0}, {"moments_noise_multiplier": 9.0},
                     {"mean_noise_multiplier": 7.0, "moments_noise_multiplier": 9.0}):  # fmt: skip
        charges, estimator = Charges(), ShapedFeatures(12, **settings)
        estimator.fit(ROWS, public=PUBLIC, ledger=charges)
        assert tuple(charges.events) == estimator.events_ == estimator.planned_events()
        assert [event.noise_multiplier for event in estimator.events_] == list(settings.values())


def test_a_budget_that_does_not_hold_it_releases_nothing() -> None:
    from adadp.accounting.budget import Budget

    estimator = ShapedFeatures(12, 0.5, 0.5)
    with pytest.raises(BudgetExhaustedError), Ledger().start({}, budget=Budget(0.1, 1e-5)) as charged:
        estimator.fit(ROWS, public=PUBLIC, ledger=charged)
    assert not hasattr(estimator, "scale_")


def test_noise_is_there_and_differs_each_time() -> None:
    one, other = (fitted(mean_noise_multiplier=50.0, moments_noise_multiplier=50.0) for _ in range(2))
    assert not np.allclose(one.offset_, other.offset_)
    assert not np.allclose(one.vectors_, other.vectors_)
    deviation = np.std([fitted(mean_noise_multiplier=5.0).offset_ for _ in range(200)], axis=0).mean()
    assert deviation == pytest.approx(5 * mean_sensitivity() / 500, rel=0.1)


def test_without_paid_parts_nothing_of_the_rows_is_learnt() -> None:
    one, other = fitted(), ShapedFeatures(12).fit(ROWS[:3] * -7, public=PUBLIC)
    for name in ("mean_", "vectors_", "values_", "offset_", "scale_"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


# ---- what it makes --------------------------------------------------------------------------------------------------


def test_with_little_noise_the_mean_is_off_and_coordinates_are_those_of_the_data() -> None:
    estimator = fitted(mean_noise_multiplier=1e-3, moments_noise_multiplier=1e-3)
    made = estimator.transform(ROWS).astype(np.float64)
    assert np.abs(made.mean(axis=0)).max() < 1e-3 * LENGTH
    units = ((unit_length(ROWS) - PUBLIC.mean) @ estimator.vectors_) - estimator.offset_
    directions = units / np.linalg.norm(units, axis=1, keepdims=True)
    second = directions.T @ directions
    assert np.abs(second - np.diag(np.diag(second))).max() < 0.02 * second.max()
    assert (np.diff(np.diag(second)) <= 0.02 * second.max()).all()


@pytest.mark.parametrize("settings", [{}, {"mean_noise_multiplier": 1.0}, {"moments_noise_multiplier": 1.0}])
def test_rows_are_about_equally_long_whatever_their_number(settings: dict[str, float]) -> None:
    for rows in (ROWS, ROWS[:50]):
        made = ShapedFeatures(12, **settings).fit(rows, public=PUBLIC).transform(ROWS)
        assert LENGTH / 2 < np.linalg.norm(made, axis=1).mean() < 2 * LENGTH


def test_a_row_is_mapped_by_itself_whatever_its_length() -> None:
    estimator = fitted()
    assert np.allclose(estimator.transform(ROWS[5:6] * 1000), estimator.transform(ROWS)[5:6], atol=1e-4)
    assert estimator.transform(ROWS[:0]).shape == (0, 12)
    assert np.isfinite(estimator.transform(np.full((1, 30), np.nan))).all()


def test_directions_of_few_rows_are_those_of_their_covariance() -> None:
    rows = np.random.default_rng(4).normal(size=(25, 30)).astype(np.float32)
    few = PublicDirections.of(rows, 40)
    assert few.vectors.shape[1] == 24  # 25 rows about their mean
    assert np.allclose(few.vectors.T @ few.vectors, np.eye(24), atol=1e-4)
    centred = unit_length(rows) - few.mean
    assert np.allclose(np.square(centred @ few.vectors).mean(axis=0), few.values, rtol=1e-3)


def test_it_is_stored_and_read_again(tmp_path) -> None:
    estimator = fitted(mean_noise_multiplier=5.0, moments_noise_multiplier=5.0, random_state=3)
    save(tmp_path / "fitted", estimator)
    again = load(tmp_path / "fitted")
    assert np.array_equal(again.transform(ROWS), estimator.transform(ROWS))
    assert again.events_ == estimator.events_
    assert again.random_state is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="30 features"):
        ShapedFeatures(3).fit(ROWS, public=PublicDirections.of(ROWS[:, :5], 3))
    for settings in ({"power": 0.0}, {"directions": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            ShapedFeatures(**settings).fit(ROWS, public=PUBLIC)
    with pytest.raises(ConfigurationError, match="500 rows"):
        ShapedFeatures(12).fit(ROWS, public=PUBLIC, persons=[1, 2])
    with pytest.raises(ConfigurationError, match="shape"):
        fitted().transform(ROWS[:, :5])
