"""Bounds on attackers: against attacks whose power is known, and against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from adadp.accounting.events import Gaussian, Neighbours, PoissonGaussian, RenyiBlock
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.report.attacker import ACCUSED, Attacker, attacker, fits
from adadp.report.wording import attacks, percent

STEPS = ((PoissonGaussian(1.1, 0.05), 200),)


def bounds(releases: tuple[tuple[Gaussian | PoissonGaussian | RenyiBlock, int], ...], delta: float = 1e-5) -> Attacker:
    found = attacker(make_guarantee(releases, delta), releases)
    assert found is not None
    return found


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
def test_of_one_gaussian_release_they_are_what_the_best_attack_reaches(sigma: float) -> None:
    """N(0, sigma) against N(1, sigma): the likelihood-ratio test's power is known exactly."""
    found = bounds(((Gaussian(sigma), 1),))
    best = norm.cdf(0.5 / sigma)
    assert best <= found.right <= best + 1e-6
    for rate in ACCUSED:
        power = norm.cdf(norm.ppf(rate) + 1 / sigma)
        assert power <= found.found[rate] + 1e-12, "never below what an attack reaches"
        assert found.found[rate] <= power * 1.1 + 1e-3, "and not far above"


def test_no_simulated_attack_on_sampled_steps_is_better() -> None:
    """An attack that sees every step's noised sum, with the example's gradient 1 if it was drawn, else 0."""
    steps, sigma, rate = 50, 1.0, 0.2
    releases = ((PoissonGaussian(sigma, rate), steps),)
    found = bounds(releases, 1e-4)
    generator = np.random.default_rng(5)
    trials = 20_000

    def score(there: bool) -> np.ndarray:
        drawn = generator.random((trials, steps)) < rate
        seen = sigma * generator.standard_normal((trials, steps)) + (drawn if there else 0)
        ratio = 1 - rate + rate * np.exp((2 * seen - 1) / (2 * sigma**2))
        return np.log(ratio).sum(1)

    out, within = score(False), score(True)
    threshold = 0.0
    right = ((within > threshold).mean() + (out <= threshold).mean()) / 2
    assert 0.55 < right <= found.right + 3 / math.sqrt(trials)
    assert found.right < right + 0.03, "the bound is near what this attack, the best there is, reaches"
    for accused in (0.01, 0.05, 0.1):
        power = (within > np.quantile(out, 1 - accused)).mean()
        assert power <= found.found[accused] + 4 / math.sqrt(trials)


def test_the_whole_curve_says_more_than_epsilon_and_delta() -> None:
    guarantee = make_guarantee(STEPS, 1e-5)
    whole, point = attacker(guarantee, STEPS), attacker(guarantee, None)
    assert whole is not None
    assert point is not None
    assert (whole.from_releases, point.from_releases) == (True, False)
    assert whole.right < point.right
    assert all(whole.found[rate] <= point.found[rate] for rate in ACCUSED)
    epsilon = guarantee.require()
    assert point.right == pytest.approx((math.exp(epsilon) + 1e-5) / (1 + math.exp(epsilon)))
    assert point.found[0.01] == pytest.approx(
        min(math.exp(epsilon) * 0.01 + 1e-5, 1 - math.exp(-epsilon) * 0.99), rel=0.01
    )


def test_a_curve_goes_up_from_luck_and_stays_concave() -> None:
    found = bounds(STEPS)
    rates, shares = map(np.array, zip(*found.curve, strict=True))
    assert (rates[0], rates[-1]) == (0.0, 1.0)
    assert (shares >= rates - 1e-12).all()
    assert (np.diff(shares) >= -1e-12).all()
    slopes = np.diff(shares) / np.diff(rates)
    assert (np.diff(slopes) <= 1e-9).all()


def test_a_privacy_filter_is_bounded_too() -> None:
    found = bounds(((RenyiBlock(8.0, 0.4, Neighbours.ADD_REMOVE), 1),))
    assert 0.5 < found.right < 1


def test_nothing_is_bounded_without_a_guarantee() -> None:
    none = Guarantee(None, 1e-5, Neighbours.ADD_REMOVE, "pld", "x", reasons=("r",))
    assert attacker(none, STEPS) is None


def test_releases_of_another_run_do_not_fit() -> None:
    guarantee = make_guarantee(STEPS, 1e-5)
    assert fits(guarantee, STEPS)
    assert not fits(guarantee, ((STEPS[0][0], 201),))


def test_bounds_are_rounded_up_in_words() -> None:
    assert [percent(part) for part in (0.5, 0.50001, 0.0381, 0.9999, 1.0)] == ["50%", "50.1%", "3.9%", "100%", "100%"]
    guarantee = make_guarantee(STEPS, 1e-5, unit="one person")
    found = attacker(guarantee, STEPS)
    assert found is not None
    said = attacks(found, guarantee)
    assert "whether one person was in the data" in said[0]
    assert f"right at most {percent(found.right)} of the time" in said[0]
    assert len(said) == 1 + len(ACCUSED)
