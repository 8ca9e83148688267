"""Table 2: time per iteration at the paper's batch sizes, 120 on MNIST and 32 on CIFAR-10.

What counts are ratios to DPSGD in one process: every algorithm takes a step in turn, round after round. Inputs are
random numbers of the right form, since a step's time does not depend on what they show.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adadp_lab.bench.algorithms import stepper
from adadp_lab.bench.clock import milliseconds
from adadp_lab.paper.item import Item, Job, Options, Record, Report, register
from adadp_lab.paper.workbench import Workbench

WHO = ("sgd", "dpsgd", "adadp/sound", "adadp/lot", "adadp/example", "agd", "dpopt/sound", "dpopt/published")
BATCH = {"mnist": 120, "cifar10": 32}
_FORM: dict[str, tuple[int, ...]] = {"mnist": (60,), "cifar10": (3, 32, 32)}


def measure(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """Milliseconds a step, for every contender: median over rounds, and mean (a shape is refreshed every 50 steps)."""
    torch.manual_seed(seed)
    dataset, batch, rounds = settings["dataset"], settings["batch"], settings["rounds"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        form = _FORM[dataset]
        replayed = settings.get("replayed", False)
        steps = {who: stepper(*_parted(who), "paper", form, batch, bench.device, replayed) for who in WHO}
        times = milliseconds(steps, rounds, bench.device)
    return {
        "median_ms": {who: round(statistics.median(found), 4) for who, found in times.items()},
        "mean_ms": {who: round(statistics.mean(found), 4) for who, found in times.items()},
        "threads": torch.get_num_threads(),
    }


def _parted(who: str) -> tuple[str, str | None]:
    name, _, reading = who.partition("/")
    return name, reading or None


def _jobs(options: Options) -> list[Job]:
    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    rounds = 10 if options.quick else 150 if kind == "cuda" else 50
    ways: list[dict[str, Any]] = [{}, {"replayed": True}] if kind == "cuda" else [{}]
    return [
        Job(measure, {"dataset": name, "batch": batch, "rounds": rounds, "on": kind, **way}, alone=True, cost=20)
        for way in ways
        for name, batch in BATCH.items()
    ]


def _report(records: Sequence[Record]) -> Report:
    from adadp_lab.paper.table2_report import timing_report

    return timing_report(records)


register(Item("table2", "Time per iteration", "Table II", _jobs, _report, by_device=True))
