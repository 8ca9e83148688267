"""From counts to bounds: exact where they can be, against jax_privacy and against brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from adadp.accounting import gaussian
from adadp.audit import Claim, Counts, Errors, clopper_pearson_upper, one_run
from adadp.audit.bounds import gaussian_claim, trials_needed
from audit.references import make_jax_privacy

REFERENCE = json.loads((Path(__file__).parent / "references" / "jax_privacy.json").read_text())


def test_clopper_pearson_is_where_so_few_become_too_few() -> None:
    for count, trials in ((0, 20), (7, 50), (49, 50)):
        rate = clopper_pearson_upper(count, trials, 0.95)
        assert stats.binom.cdf(count, trials, rate) == pytest.approx(0.05)
    assert clopper_pearson_upper(5, 5, 0.95) == 1


@pytest.mark.parametrize("case", REFERENCE["many_runs"], ids=str)
def test_agrees_with_jax_privacy_on_counts(case: dict[str, object]) -> None:
    errors = Errors(Counts(*case["counts"]), case["confidence"], together=False)
    assert errors.epsilon(case["delta"]) == pytest.approx(case["epsilon"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", REFERENCE["one_run"], ids=str)
def test_agrees_with_jax_privacy_in_one_run(case: dict[str, object]) -> None:
    counts = case["canaries"], case["guesses"], case["correct"]
    found = [one_run.p_value(*counts, epsilon, case["delta"]) for epsilon in (0.0, 0.7, 2.5)]
    assert found == pytest.approx(case["p_values"], rel=1e-9, abs=1e-12)
    assert one_run.epsilon_lower(*counts, case["delta"], 0.95) == pytest.approx(case["epsilon"], abs=1e-5)


def test_the_reference_is_what_jax_privacy_says_today() -> None:
    auditing = pytest.importorskip("jax_privacy.auditing")
    found = make_jax_privacy.compute(auditing)
    for kind in ("many_runs", "one_run"):
        for one, other in zip(found[kind], REFERENCE[kind], strict=True):
            assert one["epsilon"] == pytest.approx(other["epsilon"], abs=1e-5)


def test_one_run_is_exact_for_randomised_response() -> None:
    # Every coin is told with probability e^eps / (1 + e^eps): pure DP, and guessing what was told is the best attack.
    epsilon, count = 1.0, 12
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in range(count + 1):
        exact = sum(stats.binom.pmf(k, count, chance) for k in range(correct, count + 1))
        assert one_run.p_value(count, count, correct, epsilon, 0.0) == pytest.approx(exact)


def test_one_run_holds_where_delta_gives_everything_away() -> None:
    # With chance delta each coin is told outright, else randomised response: (epsilon, delta)-DP. Brute force over it.
    epsilon, delta, count = 0.5, 0.01, 10
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    told = delta + (1 - delta) * chance
    for correct in range(count + 1):
        bound = one_run.p_value(count, count, correct, epsilon, delta)
        assert stats.binom.sf(correct - 1, count, told) <= bound + 1e-12


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("epsilon", [0.5, pytest.param(2.0, marks=pytest.mark.slow), 8.0])
def test_a_mechanism_that_is_what_it_says_is_seldom_contradicted(together: bool, epsilon: float) -> None:
    mu, generator = gaussian.mu_for(epsilon, 1e-5), np.random.default_rng(3)
    claim, alarms, above, repeats = gaussian_claim(mu), 0, 0, 2000
    for _ in range(repeats):
        inside = generator.random(200) < 0.5
        guess = generator.normal(size=200) + mu * inside > mu / 2
        counts = Counts(
            int((guess & ~inside).sum()), int((~inside).sum()), int((~guess & inside).sum()), int(inside.sum())
        )
        errors = Errors(counts, 0.95, together)
        alarms += errors.contradicts(claim)
        above += max(errors.epsilon(1e-5), errors.gaussian_epsilon(1e-5)) > epsilon
    most = stats.binom.isf(1e-6, repeats, 0.05)
    assert alarms <= most
    assert above <= most
    if together:  # and not for being idle: it spends most of what it may
        assert alarms >= 0.02 * repeats


def test_a_claim_is_its_curve() -> None:
    mu = 1.3
    claim = gaussian_claim(mu)
    assert claim.least_error() == pytest.approx(stats.norm.cdf(-mu / 2), abs=1e-4)
    assert claim.least_error() <= stats.norm.cdf(-mu / 2)
    for alpha in (0.01, 0.2, 0.6):
        exact = stats.norm.cdf(stats.norm.isf(alpha) - mu)
        assert exact - 2e-3 < claim.false_negatives(alpha) <= exact
    pair = Claim((0.5,), (1e-5,))
    assert pair.false_negatives(0.1) == pytest.approx(1 - 1e-5 - math.exp(0.5) * 0.1)


def test_no_errors_at_all_give_what_the_number_of_trials_can() -> None:
    errors = Errors(Counts(0, 500, 0, 500), 0.95, together=True)
    assert errors.epsilon(1e-5) == pytest.approx(math.log((1 - errors.mean) / errors.mean), abs=1e-4)
    assert errors.contradicts(Claim((5.0,), (1e-5,)))
    assert not errors.contradicts(Claim((8.0,), (1e-5,)))


def test_trials_needed_are_enough_and_not_one_too_many() -> None:
    claim = Claim((3.0,), (1e-5,))
    needed = trials_needed(claim, 0.95)
    assert Errors(Counts(0, needed, 0, 0), 0.95, together=True).contradicts(claim)
    assert not Errors(Counts(0, needed - 1, 0, 0), 0.95, together=True).contradicts(claim)
