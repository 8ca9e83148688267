"""The words of a verdict, and what each of them takes.

- *consistent*: the first set of trials does not contradict the claim at the confidence of the report.
- *violated*: it does, and so does a second set at `CONFIRMED`, 99.9%.
- *suspicious*: it does, and the second set does not. `settled_by` says what to run.

The second set is made only where the first contradicts the claim. Its trials are fresh, and canary, statistic,
threshold and kind of bound are those that were chosen before the first set was counted.

Guarantee: where the claim holds, an audit says *violated* with a chance of at most 1 - CONFIRMED = 0.1%. However many
canaries, statistics and thresholds were tried, nothing has to be divided by their number: they were compared on pilot
trials that are never counted, one attack came out, and each set tests that one alone, once. Given that attack the
second set is independent of everything before it, so its Clopper-Pearson bounds (or its p-values, in one run) hold as
for an attack that was fixed from the start. That the first set had to contradict the claim too only makes the word
rarer: since the sets are independent, by another factor of 1 - confidence. This is about one audit: of a thousand
audits of sound targets one may say *violated*, and `confidence` has to be raised for them to be tested as a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

CONFIRMED = 0.999
"""The confidence that the word *violated* takes."""

MORE = 10
"""How many times the trials settle a suspicion.

What barely contradicts a claim at 95% is 1.6 standard errors off. In 10 times the trials the same leak is 5.2 off,
and 3.1 are asked for at 99.9%: it is found with a chance of about 98%.
"""

VIOLATED, SUSPICIOUS, CONSISTENT = "violated", "suspicious", "consistent"


def confirming(confidence: float) -> float:
    """The confidence of the second set: that of the first where it is higher, as for audits tested as a family."""
    return max(CONFIRMED, confidence)


class Judged(ABC):
    """An audit of one or two sets of trials. What one set says is its own matter; the verdict is decided here."""

    command: str | None
    """The command line that settles a suspicion, where the audit was started by one."""

    @property
    @abstractmethod
    def contradicted(self) -> bool:
        """Whether the first set contradicts the claim at the report's confidence."""

    @property
    @abstractmethod
    def confirmed(self) -> bool:
        """Whether there was a second set, and it contradicts the claim at `confirming` of that confidence."""

    @property
    @abstractmethod
    def confirmation(self) -> dict[str, Any] | None:
        """The second set in plain values; None where there was none."""

    @property
    @abstractmethod
    def more(self) -> dict[str, float]:
        """The options, and their values, with which the same audit would settle a suspicion."""

    @property
    def verdict(self) -> str:
        """In one word: violated, suspicious or consistent."""
        if not self.contradicted:
            return CONSISTENT
        return VIOLATED if self.confirmed else SUSPICIOUS

    @property
    def violated(self) -> bool:
        """Whether both sets contradict the guarantee (or the claim): of a sound target, in at most 0.1% of audits."""
        return self.verdict == VIOLATED

    @property
    def suspicious(self) -> bool:
        """Whether only the first set does: most likely an accident, which up to 1 - confidence of sound audits have."""
        return self.verdict == SUSPICIOUS

    @property
    def settled_by(self) -> str | None:
        """What to run where the verdict is *suspicious*."""
        if not self.suspicious:
            return None
        options = ", ".join(f"{name}={value!r}" for name, value in self.more.items())
        return self.command or f"the same audit with {options} and another seed, or none"
