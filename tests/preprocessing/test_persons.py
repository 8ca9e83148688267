"""Statistics of tables in which persons have several rows: a person counts for no more than one row does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adadp import Ledger
from adadp.errors import ConfigurationError
from adadp.persons import row_weights
from adadp.preprocessing import DPPCA, DPStandardScaler, TablePreprocessor, moments
from adadp.preprocessing.pca import second_moments

CELLS = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0, -1.0, 1e300, 5e-324]))
ZERO, ONE = np.zeros(2), np.ones(2)

STATISTICS = {
    "histogram": (lambda rows, w: moments.signed_histogram(rows, ZERO, w), moments.histogram_sensitivity(2)),
    "means": (lambda rows, w: moments.bounded_sums(rows, ZERO, ONE, w), moments.mean_sensitivity(2)),
    "moments": (lambda rows, w: moments.bounded_moments(rows, ZERO, ONE, w), moments.moments_sensitivity(2)),
    "second moments": (second_moments, 1.0),
}


@pytest.mark.parametrize("name", STATISTICS)
@given(cells=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6), others=st.integers(0, 3))
def test_all_rows_of_a_person_move_a_statistic_by_what_one_row_may(
    name: str, cells: list[tuple[float, float]], others: int
) -> None:
    statistic, sensitivity = STATISTICS[name]
    rows = np.array([*[(0.5, -2.0)] * others, *cells])
    ids = [*range(others), *["somebody"] * len(cells)]
    weights = np.array(row_weights(ids))
    moved = statistic(rows, weights) - statistic(rows[:others], np.array(row_weights(ids[:others])))
    assert np.linalg.norm(moved) <= sensitivity * (1 + 1e-9)


def test_a_person_of_a_hundred_rows_would_count_a_hundred_times_without_weights() -> None:
    rows = np.ones((100, 2))
    for statistic, sensitivity in STATISTICS.values():
        assert np.linalg.norm(statistic(rows, None)) > 50 * sensitivity
        assert np.linalg.norm(statistic(rows, np.array(row_weights(["somebody"] * 100)))) <= sensitivity


def test_scales_are_those_of_persons() -> None:
    generator = np.random.default_rng(0)
    many = np.full((20_000, 1), 1000.0)  # one person
    rows = np.concatenate([generator.normal(50.0, 10.0, (4000, 1)), many])
    ids = [*range(4000), *["somebody"] * 20_000]
    fitted = DPStandardScaler(2.0, random_state=1).fit(rows, persons=ids)
    assert fitted.mean_[0] == pytest.approx(50, abs=5)
    assert fitted.scale_[0] == pytest.approx(10, rel=0.5)
    assert DPStandardScaler(2.0, random_state=1).fit(rows).mean_[0] > 500
    assert any("all rows of one person" in text for text in fitted.assumptions_)


@pytest.mark.parametrize("make", [DPStandardScaler, DPPCA, TablePreprocessor])
def test_the_unit_is_the_runs(make: type) -> None:
    rows = {"a": np.arange(6.0), "b": np.ones(6)} if make is TablePreprocessor else np.ones((6, 2))
    estimator = make(1, 2.0) if make is DPPCA else make(2.0)
    ids = list("aabbcc")
    with Ledger(dataset="visits").start({"unit": "one person"}) as run:
        estimator.fit(rows, persons=ids, ledger=run)
        with pytest.raises(ConfigurationError, match="persons=ids"):
            estimator.fit(rows, ledger=run)
        with pytest.raises(ConfigurationError, match="5 ids"):
            estimator.fit(rows, persons=ids[:5], ledger=run)
    with Ledger(dataset="visits").start({}) as run, pytest.raises(ConfigurationError, match="one unit"):
        estimator.fit(rows, persons=ids, ledger=run)
