"""Attacks on the real engine, and what they say about its guarantee.

target = audit.for_algorithm("dpsgd", epsilon=2.0)
found = audit.audit(target, trials=1000)
found.verdict, found.epsilon_lower
"""

from adadp.audit.auditing import THREATS, audit, audit_one_run, audit_preprocessing, for_algorithm, for_clipping
from adadp.audit.bounds import Claim, Counts, Errors, clopper_pearson_upper
from adadp.audit.examples import Examples, ExampleThreat
from adadp.audit.gradient import GradientThreat
from adadp.audit.preprocessing import ESTIMATORS, PreprocessingThreat
from adadp.audit.result import Audit
from adadp.audit.target import Setting, Target

__all__ = [
    "ESTIMATORS",
    "THREATS",
    "Audit",
    "Claim",
    "Counts",
    "Errors",
    "ExampleThreat",
    "Examples",
    "GradientThreat",
    "PreprocessingThreat",
    "Setting",
    "Target",
    "audit",
    "audit_one_run",
    "audit_preprocessing",
    "clopper_pearson_upper",
    "for_algorithm",
    "for_clipping",
]
