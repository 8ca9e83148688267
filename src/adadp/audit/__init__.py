"""Attacks on the real engine, and what they say about its guarantee.

    target = audit.for_algorithm("dpsgd", epsilon=2.0, delta=1e-5)
    found = audit.audit(target, trials=1000)
    found.verdict, found.epsilon_lower
"""

from adadp.audit.auditing import THREATS, audit, for_algorithm, for_clipping
from adadp.audit.bounds import Claim, Counts, Errors, clopper_pearson_upper
from adadp.audit.result import Audit
from adadp.audit.target import Setting, Target

__all__ = [
    "THREATS",
    "Audit",
    "Claim",
    "Counts",
    "Errors",
    "Setting",
    "Target",
    "audit",
    "clopper_pearson_upper",
    "for_algorithm",
    "for_clipping",
]
