"""The paper's idea done soundly: noise that follows the shape of the gradient, the shape taken from probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adadp.algorithms.algorithm import Task
from adadp.clipping import Clipping, Ellipsoid
from adadp.shapes import Kronecker


def from_probes(task: Task, settings: Mapping[str, Any]) -> Clipping:
    """An ellipsoid whose axes follow the gradients of synthetic inputs: no data is touched, so it costs nothing."""
    shape = Kronecker(settings["before"], settings["after"], damping=settings["damping"], rank=settings["rank"])
    return Ellipsoid(settings["max_grad_norm"], shape=shape, source=task.probe(settings["probes"], settings["refresh"]))
