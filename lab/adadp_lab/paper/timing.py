"""Table 2: time per iteration at the paper's batch sizes, 120 on MNIST and 32 on CIFAR-10.

What counts are ratios to DPSGD in one process: every algorithm takes a step in turn, round after round. Inputs are
random numbers of the right form, since a step's time does not depend on what they show.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms, models
from adadp.engine import PrivacyEngine
from adadp.shapes.probes import PinkNoise, Vectors
from adadp_lab.bench.clock import milliseconds
from adadp_lab.paper.bench import Bench
from adadp_lab.paper.item import Item, Job, Options, Record, Report, register

WHO = ("sgd", "dpsgd", "adadp/sound", "adadp/lot", "adadp/example", "agd", "dpopt/sound", "dpopt/published")
BATCH = {"mnist": 120, "cifar10": 32}
_FORM: dict[str, tuple[int, ...]] = {"mnist": (60,), "cifar10": (3, 32, 32)}


def measure(settings: Mapping[str, Any], seed: int, bench: Bench) -> dict[str, Any]:
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


def stepper(
    name: str,
    reading: str | None,
    model_name: str,
    form: tuple[int, ...],
    batch: int,
    device: str = "cpu",
    replayed: bool = False,
) -> Callable[[], None]:
    """A whole step of an algorithm, optimizer included, on random inputs of shape `form`.

    With `replayed` the steps that can be are replayed on a GPU, as in training; neither plain SGD's nor AGD's can.
    """
    inputs, targets = torch.rand(batch, *form, device=device), torch.randint(10, (batch,), device=device)
    module = models.build(model_name, form, 10).to(device)
    made = algorithms.create(name, reading, {"lr": 1e-4})
    optimizer = made.optimizer([p for p in module.parameters() if p.requires_grad])

    if not made.private:
        work = made.training_step(optimizer, module)
        return lambda: work(inputs, targets)
    probes = PinkNoise(form) if len(form) == 3 else Vectors(form[0])
    _, private, lots = made.make_private(
        PrivacyEngine(seed=0), module=module, optimizer=optimizer, noise_multiplier=8.0,
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=batch),
        task=algorithms.Task(batch, 100_000, probes), pad_lots=replayed and not made.looks,
    )  # fmt: skip
    work = made.training_step(private, module)

    def step() -> None:
        lots.open_for(batch)
        work(inputs, targets)

    return step


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
    from adadp_lab.paper.timing_report import timing_report

    return timing_report(records)


register(Item("table2", "Time per iteration", "Table II", _jobs, _report, by_device=True))
