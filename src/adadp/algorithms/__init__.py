"""Algorithms by name: what the paper compares, each with what may be said about its privacy.

    algorithm = algorithms.create("adadp")            # or "dpsgd", "adal", "adan", "agd", "dpopt", "sgd"
    algorithm.guarantee, algorithm.settings           # in words, in numbers
    algorithm.clipping(task), algorithm.optimizer(model.parameters())

A new algorithm is one file here, one line below and one entry in `defaults`.
"""

from adadp.algorithms import adadp, adal, adan, agd, dpopt, dpsgd, sgd  # noqa: F401 - they register themselves
from adadp.algorithms.algorithm import ALGORITHMS, Algorithm, Task, algorithm, create
from adadp.algorithms.schedules import SCHEDULES, schedule

__all__ = ["ALGORITHMS", "SCHEDULES", "Algorithm", "Task", "algorithm", "create", "schedule"]
