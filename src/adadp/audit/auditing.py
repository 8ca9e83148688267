"""From a target to a verdict: `audit(for_algorithm("dpsgd", epsilon=2.0))`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from adadp import algorithms
from adadp.accounting.composition import Canonical
from adadp.accounting.guarantee import round_up
from adadp.accounting.ledger import Ledger
from adadp.algorithms import Algorithm, Task
from adadp.audit import many_runs, one_run
from adadp.audit.examples import Examples, ExampleThreat
from adadp.audit.gradient import GradientThreat
from adadp.audit.many_runs import Threat
from adadp.audit.preprocessing import PreprocessingThreat
from adadp.audit.promise import Promise, of_guarantee, of_text
from adadp.audit.result import SYNTHETIC_NOTE, Audit
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


def audit(
    target: Target,
    *,
    threat: str | Threat = "gradient",
    canaries: tuple[str, ...] = (),
    others: Examples | None = None,
    trials: int = TRIALS,
    confidence: float = 0.95,
    seed: int | None = None,
    ledger: Ledger | None = None,
    report: Callable[[int], None] | None = None,
) -> Audit:
    """Attack `target` and compare what leaks with what is guaranteed, or claimed where nothing is.

    `threat` is one of `THREATS` or an object of one's own, `canaries` the names of those to try (all). `others` are
    everyone else's examples, synthetic unless given; where they are, all trials are charged to `ledger`, the one of
    their dataset, before the first, and so are those that would confirm a suspicion. `seed` makes an audit repeatable.
    `report` is told how many trials are done.
    """
    promise, composition = promise_of(target)
    attacked = _threat(threat, target, canaries, others) if isinstance(threat, str) else threat
    many_runs.check_trials(trials, len(attacked.canaries), promise.claim, confidence)
    privacy = (
        SYNTHETIC_NOTE
        if others is None
        else _charge(
            ledger, composition, trials, many_runs.confirming_trials(trials, promise.claim, confidence), target
        )
    )
    begun = time.perf_counter()
    finding = many_runs.run(attacked, promise.claim, trials=trials, confidence=confidence, seed=seed, report=report)
    seconds = time.perf_counter() - begun
    return Audit(str(target.algorithm()), attacked.name, promise, finding, trials, seconds, target.describe(), privacy)


def audit_preprocessing(
    threat: PreprocessingThreat,
    delta: float,
    *,
    trials: int = TRIALS,
    confidence: float = 0.95,
    seed: int | None = None,
    report: Callable[[int], None] | None = None,
) -> Audit:
    """Attack what is fitted before training."""
    promise = threat.promise(delta)
    begun = time.perf_counter()
    finding = many_runs.run(threat, promise.claim, trials=trials, confidence=confidence, seed=seed, report=report)
    seconds = time.perf_counter() - begun
    setting = {"noise_multiplier": threat.noise_multiplier, "delta": delta, "isometric": threat.isometric}
    return Audit(threat.estimator, threat.name, promise, finding, trials, seconds, setting)


def audit_one_run(target: Target, *, confidence: float = 0.95, seed: int | None = None) -> one_run.OneRunAudit:
    """One run of `target` in which every example is a canary, and more of them to confirm a suspicion."""
    return one_run.run(target, promise_of(target)[0], confidence=confidence, seed=seed)


def promise_of(target: Target) -> tuple[Promise, Canonical]:
    """What the engine itself says of a run of this target, and what it charged: asked of a run on synthetic data."""
    delta = target.setting.delta
    started = GradientThreat(target).finished()
    guarantee, composition = started.engine.guarantee(delta), started.ledger.composition()
    if guarantee.epsilon is None:
        return of_text(claimed_epsilon(target), delta, guarantee.reasons), composition
    return of_guarantee(composition, guarantee.epsilon, delta, target.neighbours), composition


def _threat(name: str, target: Target, canaries: tuple[str, ...], others: Examples | None) -> Threat:
    if name == "gradient":
        threat = GradientThreat(target) if others is None else GradientThreat.among(target, others)
        return replace(threat, names=canaries) if canaries else threat
    if name in ("white-box", "black-box"):
        known = Examples.synthetic(target.setting.examples - 1) if others is None else others
        return ExampleThreat(target, name == "white-box", known, names=canaries)
    raise ConfigurationError(f"threat must be one of {', '.join(THREATS)}, not {name!r}")


def _charge(ledger: Ledger | None, composition: Canonical, trials: int, second: int, target: Target) -> str:
    """Charge every trial before the first of them, and say what that comes to.

    Whether there is a second set depends on what the first released, so the worst case is charged: both.
    """
    ledger = ledger or Ledger(None, dataset="audited", neighbours=None)
    plan = {
        "audit": str(target.algorithm()), "trials": trials, "confirming": second, "neighbours": str(target.neighbours),
    }  # fmt: skip
    with ledger.start(plan) as charged:
        for event, count in composition:
            charged.charge(event, count * (trials + second))
    spent = ledger.guarantee(target.setting.delta)
    cost = "no finite epsilon" if spent.epsilon is None else f"epsilon {round_up(spent.epsilon)}"
    where = "no ledger was given, so nothing remembers it" if ledger.path is None else f"charged to {ledger.path}"
    return (
        f"all {trials:,} trials were trained on {ledger.dataset}, and {second:,} more are charged that confirm a "
        f"suspicion, made or not ({where}): with all that its ledger holds that comes to {cost} at delta "
        f"{round_up(spent.delta)}. This output depends on that data"
    )
