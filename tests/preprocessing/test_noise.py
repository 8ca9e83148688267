"""The noise has the variance that is charged for, and a wrong variance does not pass these tests."""

import math

import numpy as np
import pytest
from scipy import stats

from adadp.accounting import gaussian
from adadp.accounting.events import Gaussian
from adadp.errors import BudgetExhaustedError, ConfigurationError
from adadp.preprocessing import DPPCA, DPStandardScaler, noise_multiplier_for_share, release
from adadp.preprocessing.scaler import SHARES


def has_variance(noise, deviation):
    """Two-sided chi-square test of mean 0 and the given deviation, at 1 in a million."""
    flat = np.ravel(noise) / deviation
    p = stats.chi2.cdf(np.square(flat).sum(), len(flat))
    return min(p, 1 - p) > 5e-7 and abs(flat.mean()) * math.sqrt(len(flat)) < 5


@pytest.mark.parametrize("seed", [None, 7])
def test_draws_are_standard_normal(seed):
    draws = release.standard_normal((200, 1000), seed, "test")
    assert has_variance(draws, 1.0)
    assert not has_variance(draws, 1.02)
    assert not has_variance(draws, 0.98)
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert np.isfinite(draws).all()


def test_system_entropy_differs_and_seeds_repeat():
    assert not np.array_equal(*(release.standard_normal((5,), None, "a") for _ in range(2)))
    assert np.array_equal(*(release.standard_normal((5,), 3, "a") for _ in range(2)))
    assert not np.array_equal(release.standard_normal((5,), 3, "a"), release.standard_normal((5,), 3, "b"))
    assert not np.array_equal(release.standard_normal((5,), 3, "a"), release.standard_normal((5,), 2**32 + 3, "a"))


@pytest.mark.parametrize("isometric", [False, True])
def test_pca_noise_is_symmetric_and_of_the_declared_variance(isometric):
    # Of no rows at all, the release is noise alone; all eigenvectors together give it back.
    d, sigma = 200, 3.0
    pca = DPPCA(d, sigma, isometric=isometric).fit(np.zeros((0, d)))
    noise = pca.components_.T @ np.diag(pca.eigenvalues_) @ pca.components_
    above = noise[np.triu_indices(d, 1)]
    expected = sigma / math.sqrt(2) if isometric else sigma
    assert has_variance(above, expected)
    assert not has_variance(above, expected * 1.05)
    assert has_variance(np.diag(noise), sigma)


def test_scaler_noise_is_of_the_declared_variance(monkeypatch):
    seen = []

    def spy(statistic, **settings):
        released, event = real(statistic, **settings)
        seen.append((released - statistic, settings["sensitivity"] * event.noise_multiplier))
        return released, event

    real = release.release
    monkeypatch.setattr("adadp.preprocessing.scaler.release", spy)
    d = 2_000
    fitted = DPStandardScaler(4.0).fit(np.full((3, d), 2.5))
    deviations = [math.sqrt(x) for x in (d, 1.25 * d, d, 2 * d)]
    for (noise, declared), event, sensitivity in zip(seen, fitted.events_, deviations, strict=True):
        assert declared == pytest.approx(event.noise_multiplier * sensitivity)
        assert has_variance(noise, declared)
        assert not has_variance(noise, declared * 1.15)


def test_shares_add_up_to_the_total():
    events = DPStandardScaler(3.0).planned_events()
    assert sum(1 / e.noise_multiplier**2 for e in events) == pytest.approx(1 / 9)
    assert sum(SHARES) == pytest.approx(1)
    given = DPStandardScaler(noise_multipliers=(1.0, 2.0, 3.0, 4.0)).planned_events()
    assert [e.noise_multiplier for e in given] == [1, 2, 3, 4]


class Ledger:
    def __init__(self, allow):
        self.allow, self.charged = allow, []

    def charge(self, event):
        if len(self.charged) == self.allow:
            raise BudgetExhaustedError("no more")
        self.charged.append(event)


@pytest.mark.parametrize(("estimator", "events"), [(DPPCA(2, 5.0), 1), (DPStandardScaler(5.0), 4)])
def test_every_event_is_charged_before_noise_is_drawn(estimator, events, monkeypatch):
    order = []
    real = release.standard_normal
    monkeypatch.setattr(release, "standard_normal", lambda *a: (order.append("noise"), real(*a))[1])
    ledger = Ledger(events)
    monkeypatch.setattr(ledger, "charge", lambda e: (order.append("charge"), Ledger.charge(ledger, e))[1])
    estimator.fit(np.ones((5, 3)), ledger=ledger)
    assert tuple(ledger.charged) == estimator.events_
    assert all(isinstance(e, Gaussian) for e in ledger.charged)
    assert order == ["charge", "noise"] * events


@pytest.mark.parametrize("estimator", [DPPCA(2, 5.0), DPStandardScaler(5.0)])
def test_a_refused_charge_releases_nothing(estimator):
    with pytest.raises(BudgetExhaustedError):
        estimator.fit(np.ones((5, 3)), ledger=Ledger(0))
    assert not [name for name in vars(estimator) if name.endswith("_")]


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("make", [lambda s: DPPCA(1, s), lambda s: DPStandardScaler(s)])
def test_no_noise_is_refused(make, sigma):
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        make(sigma).fit(np.ones((3, 2)))


def test_share_of_a_budget():
    whole = noise_multiplier_for_share(1.0, 1e-5, share=1.0)
    assert gaussian.delta(1 / whole, 1.0) == pytest.approx(1e-5, rel=1e-6)
    assert whole == pytest.approx(3.7304, abs=1e-3)  # the analytic Gaussian mechanism's published value
    assert noise_multiplier_for_share(1.0, 1e-5, share=0.1) == pytest.approx(whole * math.sqrt(10))
