"""What a training run says of itself: where it stands, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adadp.accounting.guarantee import Guarantee, round_up
from adadp.training import held_out
from adadp.training.metrics import Metrics
from adadp.training.planning import Plan


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `accuracy` and `epsilon` are those of the last evaluation, None before the first."""

    step: int
    steps: int
    seconds: float
    examples_per_second: float
    accuracy: float | None
    epsilon: float | None


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Result:
    """What came out. `to_dict` is what `adadp train --json` prints.

    `guarantee` is for everything in the ledger, which all `runs` on this data are charged to: the one to publish.
    `run_guarantee` is for this run as if there had been no other.
    """

    plan: Plan
    metrics: Metrics
    guarantee: Guarantee
    claimed_epsilon: float | None
    steps: int
    seconds: float
    folder: Path
    run_guarantee: Guarantee
    ledger: Path
    runs: int
    class_weights: dict[str, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """Part of held-out rows whose class is right; None where a number is predicted."""
        return self.metrics.values.get("accuracy")

    @property
    def remark(self) -> str | None:
        """What to say of a run that learnt nothing; None for others."""
        balanced = self.class_weights is not None
        return held_out.remark(self.metrics, self.plan.train.classes, balanced=balanced)

    def sentence(self) -> str:
        """The guarantee in one sentence."""
        found = self.guarantee
        if found.epsilon is None:
            return "none: " + "; ".join(found.reasons)
        return (
            f"({round_up(found.epsilon)}, {round_up(found.delta)})-differential privacy for {found.unit} under "
            f"{found.neighbours} neighbours ({found.accountant} accountant)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `epsilon` is None where the guarantee is none."""
        plan = self.plan
        return {
            "accuracy": self.accuracy,
            "metrics": self.metrics.to_dict(),
            "epsilon": self.guarantee.epsilon,
            "run_epsilon": self.run_guarantee.epsilon,
            "dataset_epsilon": self.guarantee.epsilon,
            "dataset_name": plan.dataset_name,
            "dataset_runs": self.runs,
            "ledger": str(self.ledger),
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.guarantee.delta,
            "guarantee": self.sentence(),
            "steps": self.steps,
            "algorithm": plan.algorithm.name,
            "seconds": self.seconds,
            "reading": plan.algorithm.reading or None,
            "dataset": plan.train.name,
            "model": plan.model_name,
            "examples": plan.population,
            "class_weights": self.class_weights,
            "unit": self.guarantee.unit,
            "lot": plan.lot,
            "noise_multiplier": plan.noise_multiplier,
            "gaussian": [event.noise_multiplier for event in plan.events],
            "note": held_out.note(plan.settings.dataset, plan.settings.test, paid=plan.settings.paid_metrics),
            "run": str(self.folder),
        }
