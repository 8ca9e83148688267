"""Algorithms by name: what the paper compares, each with what may be said about its privacy.

    algorithm = algorithms.create("adadp")            # or "dpsgd", "adal", "adan", "agd", "dpopt", "sgd"
    algorithm.guarantee, algorithm.settings           # in words, in numbers
    algorithm.clipping(task), algorithm.optimizer(model.parameters())

A new algorithm is one file here, which is found by itself, or a class of your own: a subclass of `Algorithm` with
`@algorithm("name")` and its `defaults`.
"""

import importlib
import pkgutil

from adadp.algorithms.algorithm import ALGORITHMS, Algorithm, Task, algorithm, create
from adadp.algorithms.schedules import SCHEDULES, schedule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")  # algorithms register themselves

__all__ = ["ALGORITHMS", "SCHEDULES", "Algorithm", "Task", "algorithm", "create", "schedule"]
