"""The many-run audit: choose an attack on some trials, count its errors on others.

Each trial is a run of the real engine of its own, with fresh noise, lots and state, so trials are independent. Whether
it holds the canary is a fair coin. Nothing of the trials that are counted goes into the choice of the attack. Where
they contradict the claim a second set, of as many trials again, tests the same attack once more: see `verdict`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from adadp.audit.attack import Attack, Transcript, choose
from adadp.audit.bounds import Claim, Counts, Errors, trials_needed
from adadp.audit.verdict import confirming
from adadp.errors import ConfigurationError
from adadp.randomness import derived

PILOT = 0.3
"""The part of the trials that chooses the attack."""

_LEAST_PILOT = 10  # for each canary


class Threat(Protocol):
    """Runs trials. `canaries` are the ones to choose from."""

    @property
    def name(self) -> str: ...

    @property
    def canaries(self) -> tuple[str, ...]: ...

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript: ...


@dataclass(frozen=True)
class Finding:
    """The attack, its errors on the counted trials, and the scores of these trials for a plot.

    `confirmation` are its errors on the second set; None where the first did not contradict the claim.
    """

    attack: Attack
    errors: Errors
    out: tuple[float, ...]
    inside: tuple[float, ...]
    confirmation: Errors | None = None


def least_trials(canaries: int, claim: Claim, confidence: float) -> int:
    """How many trials an audit needs to have a chance: twice what a faultless attack would, since real ones err."""
    needed = max(_LEAST_PILOT * canaries / PILOT, 2 * trials_needed(claim, confidence) / (1 - PILOT))
    return int(needed) + 1


def confirming_trials(trials: int, claim: Claim, confidence: float) -> int:
    """How many trials the second set has: as many as the whole audit, or twice what a faultless attack would need."""
    return max(trials, 2 * trials_needed(claim, confirming(confidence)))


def confirm(errors: Errors, claim: Claim, again: Callable[[], Counts]) -> Errors | None:
    """What the second set, counted by `again`, says of an attack with these errors on the first.

    None, and `again` is not called, where the first set does not contradict the claim.
    """
    if not errors.contradicts(claim):
        return None
    return Errors(again(), confirming(errors.confidence), errors.together)


def check_confidence(confidence: float) -> None:
    """Refuse what is no confidence."""
    if not 0.5 < confidence < 1:
        raise ConfigurationError(f"confidence must be above 0.5 and below 1, not {confidence!r}")


def check_trials(trials: int, canaries: int, claim: Claim, confidence: float) -> None:
    """Refuse an audit that could not find anything, whatever there is to find."""
    check_confidence(confidence)
    least = least_trials(canaries, claim, confidence)
    if trials < least:
        raise ConfigurationError(
            f"{trials} trials are too few to contradict anything at confidence {confidence:g}: at least "
            f"{least} are needed ({PILOT:.0%} of them choose among {canaries} canaries and are not counted)"
        )


def run(
    threat: Threat,
    claim: Claim,
    *,
    trials: int,
    confidence: float,
    seed: int | None = None,
    report: Callable[[int], None] | None = None,
) -> Finding:
    """Attack `trials` times, and `confirming_trials` more if these contradict the claim.

    `report` is called with the number of trials done, those of the second set included.
    """
    check_trials(trials, len(threat.canaries), claim, confidence)
    series = _Series(threat, seed, report)
    pilot = int(PILOT * trials)
    counted = trials - pilot
    each = max(_LEAST_PILOT, 2 * pilot // (3 * len(threat.canaries)))
    first = {name: series.of(name, each) for name in threat.canaries}

    def chosen(name: str, known: list[tuple[bool, Transcript]], screening: bool) -> Attack:
        members, transcripts = zip(*known, strict=True)
        return choose(name, transcripts, members, claim, trials=counted, confidence=confidence, screening=screening)

    tried = [chosen(name, known, True) for name, known in first.items()]
    best = max(tried, key=lambda attack: attack.promise).canary
    attack = chosen(best, first[best] + series.of(best, pilot - series.done), False)
    out, inside = _scores(attack, series.of(best, trials - series.done))
    errors = Errors(_counts(attack, out, inside), confidence, attack.together)
    more = confirming_trials(trials, claim, confidence)
    second = confirm(errors, claim, lambda: _counts(attack, *_scores(attack, series.of(best, more))))
    return Finding(attack, errors, tuple(out), tuple(inside), second)


def _scores(attack: Attack, known: list[tuple[bool, Transcript]]) -> tuple[list[float], list[float]]:
    """The attack's statistic without the canary and with it."""
    out: list[float] = []
    inside: list[float] = []
    for member, transcript in known:
        (inside if member else out).append(attack.judge(transcript))
    return out, inside


def _counts(attack: Attack, out: list[float], inside: list[float]) -> Counts:
    return Counts(
        sum(attack.guess(score) for score in out), len(out),
        sum(not attack.guess(score) for score in inside), len(inside),
    )  # fmt: skip


class _Series:
    """Trials one after the other, each with a seed of its own where there is one for all."""

    def __init__(self, threat: Threat, seed: int | None, report: Callable[[int], None] | None) -> None:
        self._threat, self._seed, self._report = threat, seed, report
        self._coins = random.SystemRandom() if seed is None else random.Random(seed)
        self.done = 0

    def of(self, canary: str, count: int) -> list[tuple[bool, Transcript]]:
        found = []
        for _ in range(count):
            inside = self._coins.random() < 0.5
            seed = derived(self._seed, f"trial {self.done} of audit")
            found.append((inside, self._threat.trial(canary, inside, seed)))
            self.done += 1
            if self._report is not None:
                self._report(self.done)
        return found
