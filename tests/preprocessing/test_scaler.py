"""Columns in any unit come out with mean 0 and deviation 1, as far as the budget allows."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from adadp.errors import ConfigurationError
from adadp.preprocessing import DPStandardScaler


def table(rows=40_000, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack(
        [
            rng.normal(40, 12, rows),
            rng.normal(2005, 5, rows),
            rng.normal(0, 3e-9, rows),
            rng.normal(-1e6, 30, rows),
            rng.uniform(0, 1e12, rows),
            (rng.random(rows) < 0.4).astype(float),
        ],
        axis=1,
    )


def test_units_are_found():
    rows = table()
    scaler = DPStandardScaler(5.0, random_state=3).fit(rows)
    assert scaler.resolved_.all()
    out = scaler.transform(rows)
    assert np.abs(out.mean(axis=0)).max() < 0.1
    assert np.abs(out.std(axis=0) - 1).max() < 0.15


def test_more_noise_is_worse():
    rows = table(4_000)
    exact = rows.std(axis=0)
    errors = [np.abs(np.log(DPStandardScaler(s, random_state=1).fit(rows).scale_ / exact)).max() for s in (0.2, 200.0)]
    assert errors[0] < 0.1 < errors[1]


def test_missing_cells_do_not_bias():
    rows = table()
    rows[np.random.default_rng(1).random(rows.shape) < 0.6] = np.nan
    scaler = DPStandardScaler(2.0, random_state=3).fit(rows)
    out = scaler.transform(rows)
    assert np.isnan(out).tolist() == np.isnan(rows).tolist()
    assert np.abs(np.nanmean(out, axis=0)).max() < 0.1
    assert np.abs(np.nanstd(out, axis=0) - 1).max() < 0.15


def test_a_row_of_infinities_changes_little():
    rows = table()
    plain = DPStandardScaler(2.0, random_state=3).fit(rows)
    attacked = DPStandardScaler(2.0, random_state=3).fit(np.vstack([rows, np.full((1, 6), np.inf)]))
    assert np.allclose(plain.scale_, attacked.scale_, rtol=0.02)
    assert np.isfinite(attacked.transform(np.full((1, 6), -np.inf))).all()


def test_what_cannot_be_seen_is_said():
    rows = np.zeros((5_000, 3))
    rows[:, 0] = np.arange(5_000)
    rows[:4, 1] = 1e6
    scaler = DPStandardScaler(2.0, random_state=0).fit(rows)
    assert scaler.resolved_.tolist() == [True, False, False]
    assert scaler.scale_[1] == 1.0
    assert np.abs(scaler.transform(rows)).max() <= 5.0


def test_the_number_of_rows_is_not_assumed():
    assert any("do not use the number of rows" in a for a in DPStandardScaler().fit(table(100)).assumptions_)


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_conventions():
    check_estimator(
        DPStandardScaler(10.0, random_state=0),
        expected_failed_checks={
            "check_estimators_empty_data_messages": "no rows are a valid data set",
            "check_dtype_object": "says what to do instead",
        },
        on_skip=None,
    )
    assert clone(DPStandardScaler(3.0, clip=None)).get_params()["clip"] is None


def test_text_is_refused_with_a_way_out():
    with pytest.raises(ConfigurationError, match="HashedOneHot"):
        DPStandardScaler().fit(np.array([["red", "1"]]))


def test_three_multipliers_are_refused():
    with pytest.raises(ConfigurationError, match="4 numbers"):
        DPStandardScaler(noise_multipliers=(1.0, 1.0, 1.0)).fit(np.ones((2, 2)))
