"""One training run with many canaries (Steinke, Nasr and Jagielski, 2023).

Each of m canaries is in by a fair coin. After one run the auditor guesses some of the coins. If the run is
(epsilon, delta)-DP, the number of right guesses W is hardly larger than a binomial of chance
e^epsilon / (1 + e^epsilon) (their theorem 5.2):

    P[W >= v] <= beta + 2 m delta max_i (P[v - i <= B < v]) / i,   B ~ binomial(r, e^epsilon / (1 + e^epsilon)),

for r guesses, beta = P[B >= v]. One run is cheap and says less than many.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from scipy.stats import binom
from torch import Tensor
from torch.utils.data import TensorDataset

from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import round_up
from adadp.audit.canaries import LENGTH, Layers
from adadp.audit.claims import Promise
from adadp.audit.many_runs import check_confidence
from adadp.audit.result import SYNTHETIC_NOTE
from adadp.audit.target import Target
from adadp.errors import ConfigurationError


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest chance that an (epsilon, delta)-DP run has of at least `correct` right guesses."""
    chance = float(expit(epsilon))
    beta = float(binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    steps = np.arange(1, correct + 1)
    between = binom.sf(correct - steps - 1, guesses, chance) - beta
    return float(min(1.0, beta + 2 * canaries * delta * max(0.0, float((between / steps).max()))))


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
class OneRunAudit:
    """What one run with many canaries showed."""

    target: str
    promise: Promise
    canaries: int
    guesses: int
    correct: int
    confidence: float
    seconds: float
    setting: dict[str, Any]

    @property
    def epsilon_lower(self) -> float:
        """A lower bound on epsilon at the promise's delta, whatever the mechanism is."""
        return epsilon_lower(self.canaries, self.guesses, self.correct, self.promise.delta, self.confidence)

    @property
    def verdict(self) -> str:
        """Whether the (epsilon, delta) that is guaranteed, or claimed, could have done this."""
        chance = p_value(self.canaries, self.guesses, self.correct, self.promise.epsilon, self.promise.delta)
        return "violated" if chance < 1 - self.confidence else "consistent"

    def to_dict(self) -> dict[str, Any]:
        """Plain values. `trials` is 1: there was one run."""
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
            "why_no_guarantee": list(self.promise.why),
            "setting": self.setting,
            "privacy": SYNTHETIC_NOTE,
            "seconds": self.seconds,
        }


def run(target: Target, promise: Promise, *, confidence: float = 0.95, seed: int | None = None) -> OneRunAudit:
    """One run in which all examples are canaries, each with a coordinate of its own, that flip at every step.

    How many are guessed is fixed beforehand: the third that looks most like being in, and the third that looks least.
    """
    setting = target.setting
    count = setting.examples
    if count < 20:
        raise ConfigurationError(f"one run needs at least 20 canaries, not {count}")
    check_confidence(confidence)
    if target.neighbours is not Neighbours.ADD_REMOVE:
        raise ConfigurationError(f"one run leaves examples out, and {target.neighbours} says nothing about that")
    third = count // 3
    if p_value(count, 2 * third, 2 * third, promise.epsilon, promise.delta) >= 1 - confidence:
        raise ConfigurationError(
            f"{count} canaries are too few to contradict anything at confidence {confidence:g}: not even {2 * third} "
            f"right guesses of {2 * third} would be surprising at epsilon {round_up(promise.epsilon)}"
        )
    started_at = time.perf_counter()
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
    correct = int(inside[order[:third]].sum() + (~inside[order[-third:]]).sum())
    seconds = time.perf_counter() - started_at
    name = str(target.algorithm())
    return OneRunAudit(name, promise, count, 2 * third, correct, confidence, seconds, target.describe())
