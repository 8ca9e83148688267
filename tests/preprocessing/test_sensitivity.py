"""Removing any one row moves each un-noised statistic by at most its declared sensitivity."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adadp.preprocessing import DPStandardScaler, scaler
from adadp.preprocessing.moments import (
    LOWER,
    UPPER,
    bounded_moments,
    bounded_sums,
    histogram_sensitivity,
    mean_sensitivity,
    moments_sensitivity,
    signed_histogram,
)
from adadp.preprocessing.pca import second_moments, unit_rows

# Slack for the rounding of a sum of a few rows, each of length about 1.
ROUNDING = 1e-12

CELLS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 2.0**-1022, 1e308, -1e308, 3e-200, 1e200]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.floats(-2, 2),
)
TABLES = st.tuples(st.integers(1, 6), st.integers(1, 5)).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=CELLS)
)
ATTACKS = [
    np.array([[1.0, 0.0, 0.0]]),
    np.array([[1.0, 1.0, 1.0]]),
    np.array([[1e308, 1e308, -1e308], [1.0, 2.0, 3.0]]),
    np.array([[5e-324, 5e-324, 0.0], [0.0, 0.0, 0.0]]),
    np.array([[math.nan, 1.0, 2.0], [math.inf, -math.inf, 1.0]]),
]


def moves(statistic, rows):
    whole = statistic(rows)
    assert np.isfinite(whole).all()
    return [np.linalg.norm(whole - statistic(np.delete(rows, i, axis=0))) for i in range(len(rows))]


def attacked(test):
    for rows in ATTACKS:
        test = example(rows)(test)
    return test


@attacked
@settings(max_examples=150, deadline=None)
@given(TABLES)
def test_second_moments(rows):
    assert max(moves(second_moments, rows)) <= 1.0 + ROUNDING


def test_second_moments_reach_their_bound():
    assert moves(second_moments, np.array([[0.0, 7.0, 0.0]])) == pytest.approx([1.0])


def test_rounding_makes_no_row_longer_than_one():
    rows = np.random.default_rng(0).normal(size=(5_000, 300))
    assert (np.square(unit_rows(rows)).sum(axis=1) <= 1.0).all()


def test_rows_without_a_direction_contribute_nothing():
    rows = np.array([[0.0, 0.0], [math.nan, 1.0], [1.0, math.inf]])
    assert not unit_rows(rows).any()


@attacked
@settings(max_examples=150, deadline=None)
@given(TABLES)
def test_unit_rows_have_norm_zero_or_one(rows):
    norms = np.linalg.norm(unit_rows(rows), axis=1)
    assert ((norms == 0) | (np.abs(norms - 1) < 1e-9)).all()
    assert (norms <= 1.0).all()


@attacked
@settings(max_examples=150, deadline=None)
@given(TABLES)
def test_histogram(rows):
    d = rows.shape[1]
    for centre in (np.zeros(d), np.linspace(-1e300, 3.0, d)):
        assert max(moves(lambda x, c=centre: signed_histogram(x, c), rows)) <= histogram_sensitivity(d) + ROUNDING


@settings(max_examples=150, deadline=None)
@given(TABLES, st.sampled_from([0.0, -3.5, 1e300]), st.sampled_from([5e-324, 1e-300, 1.0, 2.0, 1e308]))
def test_sums_and_moments(rows, centre, bound):
    d = rows.shape[1]
    c, b = np.full(d, centre), np.full(d, bound)
    assert max(moves(lambda x: bounded_sums(x, c, b), rows)) <= mean_sensitivity(d) + ROUNDING
    assert max(moves(lambda x: bounded_moments(x, c, b), rows)) <= moments_sensitivity(d) + ROUNDING


@pytest.mark.parametrize("rows", ATTACKS)
def test_moments_under_attack(rows):
    d = rows.shape[1]
    assert max(moves(lambda x: bounded_moments(x, np.zeros(d), np.ones(d)), rows)) <= math.sqrt(2 * d) + ROUNDING


def test_moments_reach_their_bound():
    rows = np.array([[9.0, -9.0, 1.0]])
    move = moves(lambda x: bounded_moments(x, np.zeros(3), np.ones(3)), rows)
    assert move == pytest.approx([math.sqrt(6)])


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 2.0000001, -3.0, 1e-30, 1e30, 2.0**-126, 2.0**128])
def test_bins_hold_what_they_count(value):
    (index,) = np.flatnonzero(signed_histogram(np.array([[value]]), np.zeros(1))[0])
    if value > 0:
        assert LOWER[index] < value <= UPPER[index]
    else:
        assert LOWER[index] <= value < UPPER[index]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), hnp.arrays(np.float64, 4, elements=CELLS))
def test_every_release_of_the_scaler_is_bounded_by_what_it_declares(seed, odd):
    """The whole of fit, on neighbours, with the first run's releases played back to the second run."""
    rng = np.random.default_rng(seed)
    rows = rng.normal([0.0, 2000.0, 1e-6, 0.5], [1.0, 3.0, 1e-9, 10.0], size=(200, 4))
    rows[-1] = odd
    recorded = []

    def record(statistic, *, sensitivity, noise_multiplier, **rest):
        released, event = real(statistic, sensitivity=sensitivity, noise_multiplier=noise_multiplier, **rest)
        recorded.append((statistic, sensitivity, released, event))
        return released, event

    def play_back(statistic, *, sensitivity, noise_multiplier, **rest):
        before, declared, released, event = recorded.pop(0)
        assert sensitivity == declared
        assert np.linalg.norm(before - statistic) <= declared * (1 + ROUNDING)
        return released, event

    real = scaler.release
    try:
        scaler.release = record
        DPStandardScaler(0.5, random_state=seed).fit(rows)
        assert len(recorded) == 4
        scaler.release = play_back
        DPStandardScaler(0.5, random_state=seed).fit(rows[:-1])
    finally:
        scaler.release = real
    assert not recorded
