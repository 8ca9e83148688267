"""One training run with many canaries (Steinke, Nasr and Jagielski, 2023).

Each of m canaries is in by a fair coin. After one run the auditor guesses some of the coins. If the run is
(epsilon, delta)-DP, the number of right guesses W is hardly larger than a binomial of chance
e^epsilon / (1 + e^epsilon) (their theorem 5.2):

    P[W >= v] <= beta + 2 m delta max_i (P[v - i <= B < v]) / i,   B ~ binomial(r, e^epsilon / (1 + e^epsilon)),

for r guesses, beta = P[B >= v]. One run is cheap and says less than many.

Where it contradicts the claim, fresh runs of the same kind are the second set (see `verdict`). Their p-values are
independent, and Fisher's method makes one of them. How many they are is fixed beforehand, so that faultless runs would
be far beyond 99.9%: of few canaries a single run cannot be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from scipy.stats import binom, chi2
from torch import Tensor
from torch.utils.data import TensorDataset

from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import round_up
from adadp.audit.canaries import LENGTH, Layers
from adadp.audit.many_runs import check_confidence
from adadp.audit.promise import Promise
from adadp.audit.result import SYNTHETIC_NOTE
from adadp.audit.target import Target
from adadp.audit.verdict import MORE, Judged, confirming
from adadp.errors import ConfigurationError
from adadp.randomness import derived

_MOST_RUNS = 50  # of the second set: what it would take more for is refused


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest chance that an (epsilon, delta)-DP run has of at least `correct` right guesses."""
    chance = float(expit(epsilon))
    beta = float(binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    steps = np.arange(1, correct + 1)
    between = binom.sf(correct - steps - 1, guesses, chance) - beta
    return float(min(1.0, beta + 2 * canaries * delta * max(0.0, float((between / steps).max()))))


def combined(chances: Sequence[float]) -> float:
    """Fisher: the p-value of independent p-values, none of which is more often small than it says."""
    return float(chi2.sf(-2 * sum(math.log(max(chance, 1e-300)) for chance in chances), 2 * len(chances)))


def confirming_runs(canaries: int, guesses: int, epsilon: float, delta: float, confidence: float) -> int | None:
    """How many runs the second set has; None where not even 50 could confirm anything.

    The fewest which, all guesses right, have a p-value of the square of the one that is asked for: real attacks err.
    """
    best, asked = p_value(canaries, guesses, guesses, epsilon, delta), (1 - confirming(confidence)) ** 2
    return next((runs for runs in range(1, _MOST_RUNS + 1) if combined([best] * runs) < asked), None)


def epsilon_lower(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon at which so many right guesses are rarer than 1 - confidence; 0 if there is none."""
    significance = 1 - confidence
    if p_value(canaries, guesses, correct, 0.0, delta) > significance:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, correct, high, delta) <= significance:
        low, high = high, 2 * high
        if high > 700:
            return low
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        if p_value(canaries, guesses, correct, middle, delta) <= significance:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class OneRunAudit(Judged):
    """What one run with many canaries showed.

    `correct_again` are the right guesses in each run of the second set; None where the first run contradicts nothing.
    """

    target: str
    promise: Promise
    canaries: int
    guesses: int
    correct: int
    confidence: float
    seconds: float
    setting: dict[str, Any]
    correct_again: tuple[int, ...] | None = None
    command: str | None = None

    @property
    def epsilon_lower(self) -> float:
        """A lower bound on epsilon at the promise's delta, whatever the mechanism is."""
        return epsilon_lower(self.canaries, self.guesses, self.correct, self.promise.delta, self.confidence)

    def _chance(self, correct: int) -> float:
        return p_value(self.canaries, self.guesses, correct, self.promise.epsilon, self.promise.delta)

    @property
    def contradicted(self) -> bool:
        """Whether the (epsilon, delta) that is guaranteed, or claimed, could hardly have done this."""
        return self._chance(self.correct) < 1 - self.confidence

    @property
    def _chance_again(self) -> float:
        return 1.0 if self.correct_again is None else combined([self._chance(each) for each in self.correct_again])

    @property
    def confirmed(self) -> bool:
        """Whether it could hardly have done what the second set shows, at 99.9% or more."""
        return self._chance_again < 1 - confirming(self.confidence)

    @property
    def confirmation(self) -> dict[str, Any] | None:
        """The second set in plain values."""
        if self.correct_again is None:
            return None
        return {
            "confidence": confirming(self.confidence),
            "contradicts": self.confirmed,
            "p_value": self._chance_again,
            "trials": len(self.correct_again),
            "guesses": self.guesses * len(self.correct_again),
            "correct": sum(self.correct_again),
        }

    @property
    def more(self) -> dict[str, float]:
        """More canaries, at the same rate."""
        canaries, lot = MORE * self.canaries, int(self.setting["lot"])
        found: dict[str, float] = {"examples": canaries}
        if lot != self.canaries:  # else it is that of all examples, without being given
            found["lot"] = MORE * lot
        guesses = 2 * (canaries // 3)
        best = p_value(canaries, guesses, guesses, self.promise.epsilon, self.promise.delta)
        # However many canaries, delta keeps a single run's p-value away from 0: then only the second set is at 99.9%.
        asked = confirming(self.confidence)
        return {**found, "confidence": asked if best < 1 - asked else self.confidence}

    def to_dict(self) -> dict[str, Any]:
        """Plain values. `trials` is 1: there was one run, before those of the second set."""
        return {
            "epsilon_lower": self.epsilon_lower,
            "guaranteed_epsilon": self.promise.guaranteed,
            "claimed_epsilon": self.promise.claimed,
            "verdict": self.verdict,
            "confidence": self.confidence,
            "trials": 1,
            "delta": self.promise.delta,
            "bound": "one run (Steinke, Nasr, Jagielski), whatever the mechanism is",
            "target": self.target,
            "threat": "gradient, one run",
            "canaries": self.canaries,
            "guesses": self.guesses,
            "correct": self.correct,
            "confirmation": self.confirmation,
            "settled_by": self.settled_by,
            "why_no_guarantee": list(self.promise.why),
            "setting": self.setting,
            "privacy": SYNTHETIC_NOTE,
            "seconds": self.seconds,
        }


def run(target: Target, promise: Promise, *, confidence: float = 0.95, seed: int | None = None) -> OneRunAudit:
    """One run in which all examples are canaries, and `confirming_runs` more if it contradicts the claim."""
    setting = target.setting
    count = setting.examples
    if count < 20:
        raise ConfigurationError(f"one run needs at least 20 canaries, not {count}")
    check_confidence(confidence)
    if target.neighbours is not Neighbours.ADD_REMOVE:
        raise ConfigurationError(f"one run leaves examples out, and {target.neighbours} says nothing about that")
    third = count // 3
    again = confirming_runs(count, 2 * third, promise.epsilon, promise.delta, confidence)
    if again is None or p_value(count, 2 * third, 2 * third, promise.epsilon, promise.delta) >= 1 - confidence:
        raise ConfigurationError(
            f"{count} canaries are too few to contradict anything at confidence {confidence:g}: not even {2 * third} "
            f"right guesses of {2 * third} would be surprising at epsilon {round_up(promise.epsilon)}"
        )
    started_at = time.perf_counter()
    name = str(target.algorithm())
    correct = _right_guesses(target, third, seed)
    found = OneRunAudit(name, promise, count, 2 * third, correct, confidence, 0.0, target.describe())
    if found.contradicted:
        second = tuple(
            _right_guesses(target, third, derived(seed, f"run {run} of audit")) for run in range(1, again + 1)
        )
        found = replace(found, correct_again=second)
    return replace(found, seconds=time.perf_counter() - started_at)


def _right_guesses(target: Target, third: int, seed: int | None) -> int:
    """Of one run whose canaries have a coordinate of their own each, and flip at every step.

    How many are guessed is fixed beforehand: the third that looks most like being in, and the third that looks least.
    """
    setting = target.setting
    count = setting.examples
    coins = torch.Generator()
    coins.seed() if seed is None else coins.manual_seed(seed)
    inside = torch.rand(count, generator=coins) < 0.5

    def probes(number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, count, generator=generator)

    model = Layers(((count, 1),))
    started = target.started(model, TensorDataset(torch.arange(count)), probes, seed)
    started.leave_out((~inside).nonzero().flatten())
    scores = torch.zeros(count, dtype=torch.float64)
    for lot, (index,) in started.lots(setting.attacked):
        sign = 1.0 if lot % 2 else -1.0
        inputs = torch.nn.functional.one_hot(index, count).float() * LENGTH * sign
        started.optimizer.zero_grad()
        model(inputs).sum(1).mean().backward()
        started.optimizer.step()
        released = model.layers[0].weight.grad
        assert started.loader.current is not None
        assert isinstance(released, Tensor)
        if started.loader.current.last:
            scores += sign * released[0].double()
    started.engine.detach(model)
    order = scores.argsort(descending=True)
    return int(inside[order[:third]].sum() + (~inside[order[-third:]]).sum())
