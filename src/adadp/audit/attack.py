"""Choosing an attack on trials that are not counted: which canary, which statistic, which threshold.

The statistics are likelihood ratios worked out beforehand, and two that are learnt: a linear discriminant over
everything that a transcript holds, which finds noise that is missing, repeated or correlated between steps, and a
likelihood ratio of two normal distributions fitted to each single score (LiRA's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adadp.audit.bounds import Claim, clopper_pearson_upper, expected

Array = npt.NDArray[np.float64]

_CAUTIOUS, _CURIOUS, _EVEN = 0.9, 0.6, 0.5  # confidence in error rates of the pilot: settling, comparing, at best


@dataclass(frozen=True)
class Transcript:
    """What an auditor took down in one trial: scores that are larger with the canary, and everything it saw."""

    scores: Mapping[str, float]
    seen: tuple[float, ...]


Statistic = Callable[[Transcript], float]


@dataclass(frozen=True)
class Attack:
    """Guesses "the canary was there" where the statistic exceeds the threshold."""

    canary: str
    statistic: str
    score: Statistic
    threshold: float
    together: bool
    promise: tuple[float, float]  # margin below the claim (0 if none), and mu: as far as the pilot can tell

    def judge(self, transcript: Transcript) -> float:
        """The statistic, in whatever state a run ended."""
        return _finite(self.score(transcript))

    def guess(self, score: float) -> bool:
        """Whether the canary was in, says the attack."""
        return score > self.threshold


def choose(
    canary: str,
    transcripts: Sequence[Transcript],
    inside: Sequence[bool],
    claim: Claim,
    *,
    trials: int,
    confidence: float,
    screening: bool = False,
) -> Attack:
    """The attack that promises most for `trials` trials to come.

    What is learnt is learnt from one half of the transcripts, and judged on the other. When canaries are only being
    compared (`screening`) on few trials each, no fine threshold is looked for.
    """
    caution = _CURIOUS if screening else _CAUTIOUS
    member = np.asarray(inside, dtype=bool)
    learn, rest, everything = slice(0, None, 2), slice(1, None, 2), slice(None)
    known: dict[str, Statistic] = {name: _ready(name) for name in transcripts[0].scores}
    candidates = [(name, statistic, everything) for name, statistic in known.items()]
    learnt = _learnt(transcripts[learn], member[learn])
    candidates += [(name, statistic, rest) for name, statistic in learnt.items()]
    best: Attack | None = None
    for name, statistic, select in candidates:
        scores = np.array([_finite(statistic(transcript)) for transcript in transcripts[select]])
        if np.ptp(scores) == 0 and name != candidates[-1][0]:
            continue  # it says nothing, whatever the threshold
        out, within = np.sort(scores[~member[select]]), np.sort(scores[member[select]])
        for threshold, together in _thresholds(out, within):
            if screening and not together:
                continue
            # Few trials flatter whatever is chosen on them. So all but the first, the best test there is against a
            # mechanism that keeps its promise, are judged by upper bounds: they have to stand out to be chosen.
            trust = _EVEN if best is None and not screening else caution
            rates = (
                clopper_pearson_upper(int(np.sum(out > threshold)), len(out), trust),
                clopper_pearson_upper(int(np.sum(within <= threshold)), len(within), trust),
            )
            errors = expected(rates, trials, confidence, together)
            promise = (max(errors.margin(claim), 0.0), errors.mu())
            if best is None or promise > best.promise:
                best = Attack(canary, name, statistic, float(threshold), together, promise)
    assert best is not None
    return best


def _thresholds(out: Array, within: Array) -> Iterator[tuple[float, bool]]:
    """Thresholds, and whether both kinds of error are alike there.

    They are at 0, where a likelihood ratio turns, and halfway between the two worlds. Where one kind of error is to be
    rare, or not to happen at all, they are bounded apart. A finer choice would only follow the pilot's accidents.
    """
    yield 0.0, True
    if not (len(out) and len(within)):
        return
    yield float(out.mean() + within.mean()) / 2, True
    above, below = within[within > out[-1]], out[out < within[0]]
    yield float(out[-1] if not len(above) else out[-1] / 2 + above[0] / 2), False
    yield float(within[0] if not len(below) else within[0] / 2 + below[-1] / 2), False
    yield float(np.quantile(out, 0.95)), False
    yield float(np.quantile(within, 0.05)), False


def _finite(score: float) -> float:
    """A run that broke down (NaN) is as telling as one far off: a world in which that happens gives itself away."""
    return min(max(score, -1e300), 1e300) if score == score else 1e300


def _ready(name: str) -> Statistic:
    return lambda transcript: transcript.scores[name]


def _learnt(transcripts: Sequence[Transcript], inside: npt.NDArray[np.bool_]) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    for name in transcripts[0].scores:
        scores = np.array([transcript.scores[name] for transcript in transcripts])
        found[f"fitted {name}"] = _normal_ratio(name, scores[~inside], scores[inside])
    seen = np.array([transcript.seen for transcript in transcripts])
    if seen.shape[1] > 1:
        found["discriminant"] = _discriminant(seen[~inside], seen[inside])
    return found


def _normal_ratio(name: str, out: Array, within: Array) -> Statistic:
    """LiRA: the log likelihood ratio of normal distributions with the mean and deviation of each world."""
    if min(len(out), len(within)) < 2:
        return _ready(name)
    least = 1e-9 * max(float(np.abs(np.concatenate([out, within])).max()), 1e-300)
    means = out.mean(), within.mean()
    deviations = max(float(out.std(ddof=1)), least), max(float(within.std(ddof=1)), least)

    def ratio(transcript: Transcript) -> float:
        value = transcript.scores[name]
        logs = [-0.5 * ((value - m) / s) ** 2 - np.log(s) for m, s in zip(means, deviations, strict=True)]
        return float(logs[1] - logs[0])

    return ratio


def _discriminant(out: Array, within: Array) -> Statistic:
    """Fisher's: the direction in which the two worlds are furthest apart, in deviations within a world."""
    if min(len(out), len(within)) < 2:
        return lambda transcript: 0.0
    centred = np.concatenate([out - out.mean(0), within - within.mean(0)])
    scale = centred.std(0) + 1e-9 * np.abs(np.concatenate([out, within])).max(0) + 1e-300
    centred = centred / scale
    covariance = centred.T @ centred / len(centred)
    # Of few trials a covariance is not known well: a part of it is taken to be diagonal.
    ridge = 1e-6 + covariance.shape[0] / (covariance.shape[0] + len(centred)) * 0.1
    difference = (within.mean(0) - out.mean(0)) / scale
    weights = np.linalg.solve((1 - ridge) * covariance + ridge * np.diag(covariance.diagonal() + 1e-9), difference)
    weights = weights / scale
    return lambda transcript: float(np.dot(weights, transcript.seen))
