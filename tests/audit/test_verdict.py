"""Three words: *violated* of a sound target in at most one audit in a thousand, and still of one that leaks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import stats

from adadp import Flat, audit
from adadp.accounting import gaussian
from adadp.audit import Audit, Claim, Counts, Errors, PreprocessingThreat, Setting, many_runs, one_run, report
from adadp.audit.attack import Attack, Transcript
from adadp.audit.bounds import gaussian_claim
from adadp.audit.many_runs import Finding, confirm, confirming_trials
from adadp.audit.one_run import OneRunAudit, combined, confirming_runs, p_value
from adadp.audit.promise import Promise
from adadp.errors import ConfigurationError
from audit.planted import HalfTheNoise

DELTA = 1e-5


def promise_of(claim: Claim, epsilon: float) -> Promise:
    return Promise(claim, DELTA, epsilon, epsilon, True)


def decided(claim: Claim, epsilon: float, errors: Errors, second: Errors | None) -> Audit:
    """An audit as `many_runs` would give it, from counts alone."""
    attack = Attack("canary", "statistic", lambda transcript: 0.0, 0.0, errors.together, (0.0, 0.0))
    return Audit("target", "threat", promise_of(claim, epsilon), Finding(attack, errors, (), (), second), 1000, 0.0)


# ---- the null, simulated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("epsilon", [pytest.param(0.5, marks=pytest.mark.slow), 2.0, 8.0])
def test_a_sound_target_is_called_violated_in_at_most_one_audit_in_a_thousand(together: bool, epsilon: float) -> None:
    # The best attack there is on a mechanism that leaks all that it may, at an error rate at which that shows soonest.
    # The second set is drawn whether it is asked for or not: by itself, too, it may be wrong in 0.1% of audits only.
    audits, trials = 3000, 400
    mu, generator = gaussian.mu_for(epsilon, DELTA), np.random.default_rng(5)
    claim, error = gaussian_claim(mu), float(stats.norm.cdf(-mu / 2))
    verdicts: list[str] = []
    second_alone = 0

    def counted(number: int) -> Counts:
        inside = int(generator.binomial(number, 0.5))
        out = number - inside
        return Counts(int(generator.binomial(out, error)), out, int(generator.binomial(inside, error)), inside)

    for _ in range(audits):
        errors = Errors(counted(int(0.7 * trials)), 0.95, together)
        fresh = counted(confirming_trials(trials, claim, 0.95))
        second_alone += Errors(fresh, 0.999, together).contradicts(claim)
        second = confirm(errors, claim, lambda fresh=fresh: fresh)  # type: ignore[misc]
        verdicts.append(decided(claim, epsilon, errors, second).verdict)
    # So many are not surprising in a million such tests, if the chance is what is promised.
    assert verdicts.count("violated") <= second_alone <= stats.binom.isf(1e-6, audits, 0.001)
    assert verdicts.count("violated") <= stats.binom.isf(1e-6, audits, 0.05 * 0.001)  # the sets are independent
    exceeded = audits - verdicts.count("consistent")
    assert exceeded <= stats.binom.isf(1e-6, audits, 0.05)
    if together:  # not for being idle: the first sets alone, which were the verdict once, cry wolf far more often
        assert exceeded > 10 * 0.001 * audits


@dataclass(frozen=True)
class Plain:
    """Gaussian releases that a canary shifts by `mu`, the first one by `leak`, and several statistics of each."""

    mu: float
    canaries: tuple[str, ...] = ("first", "second", "third", "fourth")
    leak: float | None = None
    name: str = "plain"

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        draws = random.Random(seed)
        mu = self.leak if self.leak is not None and canary == "first" else self.mu
        seen = [draws.gauss(mu * inside, 1.0), draws.gauss(0.0, 1.0)]
        scores = {"likelihood": mu * seen[0] - mu**2 / 2, "other": seen[1], "largest": max(seen)}
        return Transcript(scores, tuple(seen))


def test_choosing_among_canaries_and_statistics_leaves_the_counted_trials_clean() -> None:
    # Whole audits: the pilot chooses among 4 canaries, 7 statistics and their thresholds.
    mu = gaussian.mu_for(2.0, DELTA)
    claim, threat, audits = gaussian_claim(mu), Plain(mu), 150
    found = [many_runs.run(threat, claim, trials=136, confidence=0.95, seed=seed) for seed in range(audits)]
    words = [decided(claim, 2.0, each.errors, each.confirmation).verdict for each in found]
    assert words.count("violated") == 0  # one is due in 133 such tests at most: 150 x 5% x 0.1%
    assert 1 <= words.count("suspicious") <= stats.binom.isf(1e-4, audits, 0.05)


def test_a_leak_is_still_violated_and_the_second_set_is_fresh_trials_of_the_same_attack() -> None:
    mu = gaussian.mu_for(2.0, DELTA)
    claim, asked = gaussian_claim(mu), []

    @dataclass(frozen=True)
    class Watched(Plain):
        def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
            asked.append((canary, seed))
            return super().trial(canary, inside, seed)

    words = []
    for seed in range(20):
        asked.clear()
        found = many_runs.run(Watched(mu, leak=8 * mu), claim, trials=400, confidence=0.95, seed=seed)
        assert found.confirmation is not None
        assert found.confirmation.counts.trials == confirming_trials(400, claim, 0.95) == len(asked) - 400
        assert {canary for canary, _ in asked[400:]} == {found.attack.canary} == {"first"}
        assert len({seed for _, seed in asked}) == len(asked)
        assert found.confirmation.together == found.errors.together
        words.append(decided(claim, 2.0, found.errors, found.confirmation).verdict)
    assert words == ["violated"] * 20


def test_no_second_set_without_a_suspicion() -> None:
    claim, errors = Claim((2.0,), (DELTA,)), Errors(Counts(50, 100, 50, 100), 0.95, True)

    def never() -> Counts:
        raise AssertionError("a second set was made")

    assert confirm(errors, claim, never) is None
    found = decided(claim, 2.0, errors, None)
    assert (found.verdict, found.confirmation, found.settled_by) == ("consistent", None, None)


def test_the_second_set_can_confirm_even_where_the_first_is_small_or_of_little_confidence() -> None:
    for epsilon in (0.5, 2.0, 8.0):
        claim = Claim((epsilon,), (DELTA,))
        for confidence in (0.6, 0.95, 0.9999):
            trials = many_runs.least_trials(1, claim, confidence)
            half = confirming_trials(trials, claim, confidence) // 2
            faultless = Errors(Counts(0, trials, 0, trials), confidence, True)
            second = confirm(faultless, claim, lambda half=half: Counts(0, half, 0, half))  # type: ignore[misc]
            assert second is not None
            assert second.confidence == max(0.999, confidence)
            assert second.contradicts(claim)
            # And what settles a suspicion is not refused for having too few trials.
            assert 10 * trials >= many_runs.least_trials(1, claim, second.confidence)


def test_a_suspicion_says_what_settles_it() -> None:
    claim = gaussian_claim(gaussian.mu_for(2.0, DELTA))
    first, second = Errors(Counts(110, 350, 115, 350), 0.95, True), Errors(Counts(200, 500, 200, 500), 0.999, True)
    found = decided(claim, 2.0, first, second)
    assert found.verdict == "suspicious"
    assert not found.violated
    assert found.settled_by == "the same audit with trials=10000, confidence=0.999 and another seed, or none"
    assert replace(found, command="adadp audit --trials 10000").settled_by == "adadp audit --trials 10000"
    values = found.to_dict()
    assert values["confidence"] == 0.95
    assert values["confirmation"]["confidence"] == 0.999
    assert values["confirmation"]["contradicts"] is False
    assert values["confirmation"]["false_negatives"] == 200
    assert "This settles it: `the same audit" in report.page(found)
    confirmed = decided(claim, 2.0, first, Errors(Counts(150, 500, 150, 500), 0.999, True))
    assert confirmed.verdict == "violated"
    assert confirmed.to_dict()["settled_by"] is None
    assert "the promise is broken" in report.page(confirmed)


# ---- real engines ---------------------------------------------------------------------------------------------------


def test_a_planted_bug_is_violated_and_confirmed() -> None:
    target = audit.for_clipping(lambda task: HalfTheNoise(1.0), epsilon=2.0, setting=Setting(steps=1))
    found = audit.audit(target, canaries=("flipping",), trials=1000, seed=2)
    assert found.verdict == "violated"
    assert found.confirmation is not None
    assert found.confirmation["contradicts"]
    assert found.confirmation["epsilon_lower"] > 2


def test_preprocessing_has_a_second_set_too() -> None:
    threat = PreprocessingThreat.for_epsilon("dp-scaler", 2.0, DELTA)
    found = [audit.audit_preprocessing(threat, DELTA, trials=200, seed=seed) for seed in (13, 14, 29)]
    assert [each.verdict for each in found] == ["consistent", "suspicious", "suspicious"]  # 3 of seeds 0..39 are
    assert all((each.confirmation is None) == (each.verdict == "consistent") for each in found)


# ---- one run --------------------------------------------------------------------------------------------------------


def one(
    correct: int, again: tuple[int, ...] | None, canaries: int = 120, lot: int = 120, epsilon: float = 1.0
) -> OneRunAudit:
    promise = promise_of(Claim((epsilon,), (DELTA,)), epsilon)
    setting = {"lot": lot}
    return OneRunAudit("target", promise, canaries, 2 * (canaries // 3), correct, 0.95, 0.0, setting, again)


def test_in_one_run_a_sound_target_is_violated_in_at_most_one_audit_in_a_thousand() -> None:
    # Randomised response, which leaks all that epsilon allows: right guesses are binomial.
    audits, generator = 5000, np.random.default_rng(6)
    for epsilon, canaries in ((1.0, 120), (2.0, 60), (3.0, 120)):
        chance, guesses = 1 / (1 + math.exp(-epsilon)), 2 * (canaries // 3)
        runs = confirming_runs(canaries, guesses, epsilon, 0.0, 0.95)
        assert runs is not None
        correct = generator.binomial(guesses, chance, audits)
        again = generator.binomial(guesses, chance, (audits, runs))
        first = {value: p_value(canaries, guesses, value, epsilon, 0.0) for value in range(guesses + 1)}
        chances = [combined([first[int(value)] for value in row]) for row in again]
        assert sum(value < 0.001 for value in chances) <= stats.binom.isf(1e-6, audits, 0.001)
        both = sum(first[int(value)] < 0.05 and second < 0.001 for value, second in zip(correct, chances, strict=True))
        assert both <= stats.binom.isf(1e-6, audits, 0.05 * 0.001)


def test_one_run_has_the_same_three_words() -> None:
    assert one(60, None).verdict == "consistent"
    assert one(75, (80, 78)).verdict == "violated"
    found = one(75, (60, 58))
    assert found.verdict == "suspicious"
    assert found.to_dict()["confirmation"]["contradicts"] is False
    assert found.settled_by == "the same audit with examples=1200, confidence=0.999 and another seed, or none"
    assert one(75, (60, 58), lot=30).more == {"examples": 1200, "lot": 300, "confidence": 0.999}
    # Where delta keeps a single run from 99.9% however many canaries it has, the command must not be refused.
    at_four = one(400, (300, 300), canaries=600, lot=600, epsilon=4.0)
    assert at_four.more == {"examples": 6000, "confidence": 0.95}


def test_the_second_set_of_one_run_could_confirm() -> None:
    for canaries, epsilon in ((120, 3.0), (90, 2.0), (600, 4.0)):
        guesses = 2 * (canaries // 3)
        runs = confirming_runs(canaries, guesses, epsilon, DELTA, 0.95)
        assert runs is not None
        best = p_value(canaries, guesses, guesses, epsilon, DELTA)
        assert combined([best] * runs) < 1e-6
        assert runs == 1 or combined([best] * (runs - 1)) >= 1e-6
    target = audit.for_clipping(lambda task: Flat(1.0), epsilon=3.0, setting=Setting(examples=21, lot=21, steps=1))
    with pytest.raises(ConfigurationError, match="21 canaries are too few to contradict"):
        audit.audit_one_run(target, confidence=0.51)


def test_one_runs_second_set_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    honest = one_run._right_guesses

    def flattered(target: audit.Target, third: int, seed: int | None) -> int:
        seeds.append(seed)
        return 2 * third if len(seeds) == 1 else honest(target, third, seed)

    monkeypatch.setattr(one_run, "_right_guesses", flattered)
    target = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=Setting(examples=90, lot=90, steps=1))
    found = audit.audit_one_run(target, seed=4)
    assert found.verdict == "suspicious"
    assert found.correct_again is not None
    assert len(set(seeds)) == len(seeds) == 1 + len(found.correct_again)
