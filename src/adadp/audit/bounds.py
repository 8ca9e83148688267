"""From counted errors to a verdict: what a test's errors say about any claim of privacy.

An attack guesses, trial by trial, whether the canary was there. Its false positives (rate alpha) and false negatives
(rate beta) contradict a claim when they lie below the claim's trade-off curve, which no test may. Rates are known by
their counts only, so they are replaced by Clopper-Pearson upper bounds: exact, whatever the rates are.

Guarantee of one set of trials: where the claim holds, `contradicts` is True with a chance of at most 1 - confidence,
and `epsilon` exceeds the true epsilon with at most that chance, provided that trials are independent and that the
attack, its threshold and `together` were fixed before they were counted. What a verdict takes,
which may be two sets, is in `verdict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtri
from scipy.stats import beta as beta_distribution

from adadp.accounting import gaussian
from adadp.accounting.curves import trade_off


def clopper_pearson_upper(count: int, trials: int, confidence: float) -> float:
    """The largest rate at which `count` or fewer of `trials` still have a chance of 1 - confidence."""
    if count >= trials:
        return 1.0
    return float(beta_distribution.ppf(confidence, count + 1, trials - count))


@dataclass(frozen=True)
class Claim:
    """What is claimed: (epsilon, delta) for every pair here. Together they are a trade-off curve."""

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def false_negatives(self, false_positives: float) -> float:
        """The fewest false negatives, as a rate, that the claim leaves to any test with these false positives."""
        return trade_off(self.epsilons, self.deltas, [false_positives])[0]

    def least_error(self) -> float:
        """The smallest (alpha + beta) / 2 of any test: where the curve, which is its own mirror image, meets alpha."""
        pairs = zip(self.epsilons, self.deltas, strict=True)
        return max((1 - delta) / (1 + math.exp(min(epsilon, 700.0))) for epsilon, delta in pairs)


@dataclass(frozen=True)
class Counts:
    """How often an attack erred in trials without the canary (`out`) and with it (`inside`)."""

    false_positives: int
    out: int
    false_negatives: int
    inside: int

    @property
    def trials(self) -> int:
        """All that were counted."""
        return self.out + self.inside


@dataclass(frozen=True)
class Errors:
    """Upper bounds on an attack's error rates that hold at once with `confidence`.

    `together` bounds (alpha + beta) / 2 by one Clopper-Pearson bound on all errors; each trial's membership has to be
    a fair coin. It is the sharper one where both kinds of error are alike. Otherwise alpha and beta are
    bounded apart, with half of 1 - confidence each, which suits canaries that few lots hold.
    """

    counts: Counts
    confidence: float
    together: bool

    @property
    def false_positives(self) -> float:
        """Upper bound on alpha, where bounded apart."""
        return clopper_pearson_upper(self.counts.false_positives, self.counts.out, (1 + self.confidence) / 2)

    @property
    def false_negatives(self) -> float:
        """Upper bound on beta, where bounded apart."""
        return clopper_pearson_upper(self.counts.false_negatives, self.counts.inside, (1 + self.confidence) / 2)

    @property
    def mean(self) -> float:
        """Upper bound on (alpha + beta) / 2, where bounded together."""
        errors = self.counts.false_positives + self.counts.false_negatives
        return clopper_pearson_upper(errors, self.counts.trials, self.confidence)

    def margin(self, claim: Claim) -> float:
        """How far below the claim's curve these errors are, even at their upper bounds. Above 0 contradicts it."""
        if self.together:
            return claim.least_error() - self.mean
        return claim.false_negatives(self.false_positives) - self.false_negatives

    def contradicts(self, claim: Claim) -> bool:
        """Whether no mechanism that keeps the claim could have been attacked so well (at this confidence)."""
        return self.margin(claim) > 0

    def epsilon(self, delta: float) -> float:
        """The largest epsilon for which (epsilon, delta)-DP is contradicted, whatever the mechanism is; 0 if none."""
        if self.together:
            pairs = [(self.mean, self.mean)]
        else:
            alpha, beta = self.false_positives, self.false_negatives
            pairs = [(alpha, beta), (beta, alpha)]
        ratios = [(1 - delta - second) / first for first, second in pairs if first > 0]
        return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0), 0.0)

    def mu(self) -> float:
        """The largest mu for which mu-GDP is contradicted; 0 if none."""
        if self.together:
            return max(0.0, -2 * float(ndtri(min(self.mean, 0.5))))
        alpha, beta = self.false_positives, self.false_negatives
        return max(0.0, float(-ndtri(alpha) - ndtri(beta))) if max(alpha, beta) < 1 else 0.0

    def gaussian_epsilon(self, delta: float) -> float:
        """The epsilon of a Gaussian mechanism of `mu`: a bound where the mechanism is one, else an estimate."""
        return gaussian.epsilon(self.mu(), delta)


def gaussian_claim(mu: float, points: int = 400) -> Claim:
    """The claim of mu-GDP, as pairs from 0 to where hardly any delta is left."""
    top = mu * (mu / 2 + 6)
    epsilons = tuple(top * index / points for index in range(points + 1))
    return Claim(epsilons, tuple(gaussian.delta(mu, epsilon) for epsilon in epsilons))


def trials_needed(claim: Claim, confidence: float) -> int:
    """How many counted trials without a single error it takes to contradict the claim at all."""
    error = claim.least_error()
    return math.ceil(math.log(1 - confidence) / math.log1p(-error)) if error > 0 else 1


def expected(rates: tuple[float, float], trials: int, confidence: float, together: bool) -> Errors:
    """What `trials` trials, half with the canary, would show of an attack with these (alpha, beta)."""
    half = max(1, trials // 2)
    counts = Counts(round(rates[0] * half), half, round(rates[1] * half), half)
    return Errors(counts, confidence, together)
