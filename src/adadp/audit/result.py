"""What an audit found, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adadp.audit.bounds import Errors
from adadp.audit.many_runs import Finding
from adadp.audit.promise import Promise
from adadp.audit.verdict import MORE, Judged, confirming

SYNTHETIC_NOTE = "canaries and all other examples are synthetic: this output says nothing about anybody"


@dataclass(frozen=True)
class Audit(Judged):
    """The outcome of a many-run audit. `to_dict` is what `adadp audit --json` prints.

    `trials` does not count those of the second set, where there was one.
    """

    target: str
    threat: str
    promise: Promise
    finding: Finding
    trials: int
    seconds: float
    setting: dict[str, Any] = field(default_factory=dict)
    privacy: str = SYNTHETIC_NOTE
    command: str | None = None

    @property
    def contradicted(self) -> bool:
        """Whether the counted trials contradict the claim at this confidence."""
        return self.finding.errors.contradicts(self.promise.claim)

    @property
    def confirmed(self) -> bool:
        """Whether the second set does, at 99.9% or more."""
        second = self.finding.confirmation
        return second is not None and second.contradicts(self.promise.claim)

    @property
    def confirmation(self) -> dict[str, Any] | None:
        """The second set in plain values; its `epsilon_lower` is at its own confidence."""
        second = self.finding.confirmation
        if second is None:
            return None
        return {
            "confidence": second.confidence,
            "contradicts": self.confirmed,
            "epsilon_lower": self._lower(second),
            **_counted(second),
        }

    @property
    def more(self) -> dict[str, float]:
        """More trials, and a first set that up to 0.1% of sound audits get past."""
        return {"trials": MORE * self.trials, "confidence": confirming(self.finding.errors.confidence)}

    @property
    def epsilon_lower(self) -> float:
        """A lower bound on epsilon at the promise's delta, at the audit's confidence; `bound` says what it rests on."""
        return self._lower(self.finding.errors)

    def _lower(self, errors: Errors) -> float:
        delta = self.promise.delta
        return max(errors.epsilon(delta), errors.gaussian_epsilon(delta) if self.promise.gaussian else 0.0)

    @property
    def bound(self) -> str:
        """What `epsilon_lower` rests on."""
        if self.promise.gaussian:
            return "mu-GDP: a bound for plain Gaussian releases, which these are said to be"
        return "(epsilon, delta) by Clopper-Pearson, whatever the mechanism is"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        attack, errors = self.finding.attack, self.finding.errors
        return {
            "epsilon_lower": self.epsilon_lower,
            "guaranteed_epsilon": self.promise.guaranteed,
            "claimed_epsilon": self.promise.claimed,
            "verdict": self.verdict,
            "confidence": errors.confidence,
            "trials": self.trials,
            "delta": self.promise.delta,
            "bound": self.bound,
            "epsilon_lower_any_mechanism": errors.epsilon(self.promise.delta),
            "epsilon_estimate": None if self.promise.gaussian else errors.gaussian_epsilon(self.promise.delta),
            "target": self.target,
            "threat": self.threat,
            "canary": attack.canary,
            "statistic": attack.statistic,
            "threshold": attack.threshold,
            "counted": _counted(errors),
            "confirmation": self.confirmation,
            "settled_by": self.settled_by,
            "why_no_guarantee": list(self.promise.why),
            "setting": self.setting,
            "privacy": self.privacy,
            "seconds": self.seconds,
        }


def _counted(errors: Errors) -> dict[str, Any]:
    counts = errors.counts
    return {
        "trials": counts.trials,
        "without": counts.out,
        "false_positives": counts.false_positives,
        "with": counts.inside,
        "false_negatives": counts.false_negatives,
        "bounded": "together" if errors.together else "apart",
    }
