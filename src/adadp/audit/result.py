"""What an audit found, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adadp.audit.claims import Promise
from adadp.audit.many_runs import Finding

SYNTHETIC_NOTE = "canaries and all other examples are synthetic: this output says nothing about anybody"


@dataclass(frozen=True)
class Audit:
    """The outcome of a many-run audit. `to_dict` is what `adadp audit --json` prints."""

    target: str
    threat: str
    promise: Promise
    finding: Finding
    trials: int
    seconds: float
    setting: dict[str, Any] = field(default_factory=dict)
    privacy: str = SYNTHETIC_NOTE

    @property
    def violated(self) -> bool:
        """Whether the guarantee (or the claim) is contradicted at this confidence."""
        return self.finding.errors.contradicts(self.promise.claim)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "violated" if self.violated else "consistent"

    @property
    def epsilon_lower(self) -> float:
        """A lower bound on epsilon at the promise's delta, at the audit's confidence; `bound` says what it rests on."""
        errors, delta = self.finding.errors, self.promise.delta
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
        counts = errors.counts
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
            "counted": {
                "trials": counts.trials,
                "without": counts.out,
                "false_positives": counts.false_positives,
                "with": counts.inside,
                "false_negatives": counts.false_negatives,
                "bounded": "together" if errors.together else "apart",
            },
            "why_no_guarantee": list(self.promise.why),
            "setting": self.setting,
            "privacy": self.privacy,
            "seconds": self.seconds,
        }
