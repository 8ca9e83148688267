"""A run of several processes: process 0 settles the plan, and the others take it over.

What a plan takes from entropy (the rows that are held out, the initial weights) and from the ledger (the noise) would
come out differently in each process. So process 0 alone makes it, asks whoever has to confirm it, and tells the others
its settings and what it settled. They read the same data and release nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from adadp.data import Table
from adadp.distributed.group import Group
from adadp.distributed.launched import launched_as, refuse_restart
from adadp.distributed.settings import refuse_differences
from adadp.errors import ConfigurationError
from adadp.training.planning import Plan, Settled
from adadp.training.settings import Settings


def settled_together(group: Group, make: Callable[[], Plan]) -> Plan:
    """The plan that `make` settles in process 0, in every process, with the same initial weights.

    Args:
        group: the processes; all of them call this.
        make: called in process 0 alone. What it raises is raised in all of them.

    Raises:
        ConfigurationError: a process does not find the same data, or the run would be paid for twice.

    """
    made: list[Plan] = []

    def settle() -> tuple[Settings, Settled, bool]:
        made.append(make())
        if not (group.alone or made[0].resumed):
            refuse_restart()
        return made[0].settings, made[0].settled, made[0].resumed

    settings, settled, resumed = group.from_first(settle)
    plan = made[0] if made else Plan(settings, settled, resumed=resumed, group=group)
    if not group.alone:
        group.copy_first(list(plan.model.state_dict().values()))
        refuse_differences(group, plan.model, lambda: _look(plan), {"the plan": plan.describe()})
    return plan


def refuse_unshared(plan: Plan) -> None:
    """Raise where this is one of several processes, and each has settled a plan of its own."""
    if plan.group.alone and launched_as() > 1:
        raise ConfigurationError(
            f"WORLD_SIZE says that this is one of {launched_as()} processes, and it made a plan of its own: each would "
            "hold out other rows, and spend by itself. Several processes train together by adadp train or "
            "adadp.training.train, which settle one plan"
        )


def _look(plan: Plan) -> object:
    """The form of the data. Its values are compared where training starts, as they are trained on."""
    kinds = dict(plan.train.kinds) if isinstance(plan.train, Table) else plan.train.input_shape
    return len(plan.train), len(plan.test), plan.train.classes, kinds
