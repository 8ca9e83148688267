"""From a target to a verdict: `audit(for_algorithm("dpsgd", epsilon=2.0))`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from adadp import algorithms
from adadp.algorithms import Algorithm, Task
from adadp.audit import claims, many_runs
from adadp.audit.gradient import GradientThreat
from adadp.audit.many_runs import Threat
from adadp.audit.result import Audit
from adadp.audit.target import Clipped, Setting, Target, calibrated, claimed_epsilon
from adadp.clipping import Clipping
from adadp.errors import ConfigurationError

THREATS = ("gradient", "white-box", "black-box")
TRIALS = 1000


def for_algorithm(
    name: str,
    *,
    reading: str | None = None,
    settings: Mapping[str, Any] | None = None,
    epsilon: float | None = None,
    setting: Setting | None = None,
    **options: Any,
) -> Target:
    """A registered algorithm as a target, its noise calibrated to `epsilon` where that is given."""

    def make() -> Algorithm:
        return algorithms.create(name, reading, settings)

    return _settled(Target(make, setting or Setting(), options), epsilon)


def for_clipping(
    make: Callable[[Task], Clipping], *, epsilon: float | None = None, setting: Setting | None = None, **options: Any
) -> Target:
    """DPSGD with a clipping of one's own as a target; `make` gets the task."""
    return _settled(Target(lambda: Clipped(make), setting or Setting(), options), epsilon)


def _settled(target: Target, epsilon: float | None) -> Target:
    if epsilon is None:
        return target
    return replace(target, setting=replace(target.setting, noise_multiplier=calibrated(target, epsilon)))


def promise_of(target: Target) -> claims.Promise:
    """What the engine itself says of a run of this target, asked of a run on synthetic data."""
    delta = target.setting.delta
    started = GradientThreat(target).finished()
    guarantee = started.guarantee(delta)
    if guarantee.epsilon is None:
        return claims.of_text(claimed_epsilon(target), delta, guarantee.reasons)
    return claims.of_guarantee(started.composition(), guarantee.epsilon, delta, target.neighbours)


def audit(
    target: Target,
    *,
    threat: str | Threat = "gradient",
    trials: int = TRIALS,
    confidence: float = 0.95,
    seed: int | None = None,
    report: Callable[[int], None] | None = None,
) -> Audit:
    """Attack `target` and compare what leaks with what is guaranteed, or claimed where nothing is.

    `seed` makes an audit repeatable. `report` is called with the number of trials done.
    """
    promise = promise_of(target)
    attacked = _threat(threat, target) if isinstance(threat, str) else threat
    begun = time.perf_counter()
    finding = many_runs.run(
        attacked, promise.claim, trials=trials, confidence=confidence, seed=seed, report=report
    )
    seconds = time.perf_counter() - begun
    name = threat if isinstance(threat, str) else type(threat).__name__
    return Audit(str(target.algorithm()), name, promise, finding, trials, seconds, target.describe())


def _threat(name: str, target: Target) -> Threat:
    if name == "gradient":
        return GradientThreat(target)
    raise ConfigurationError(f"threat must be one of {', '.join(THREATS)}, not {name!r}")
