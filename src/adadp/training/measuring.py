"""Time and memory of a plan's steps, measured on made-up rows by private steps of the same engine.

Everything here is a stand-in: rows of noise in the form of the data, a copy of the model, a ledger in memory. Nothing
of the user's data is read, and nothing is written.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms, models
from adadp.data import Dataset, Table, outline
from adadp.engine import PrivacyEngine
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.units import Units
from adadp.training import held_out
from adadp.training import preparation as prepared
from adadp.training.lot_loop import ShuffledLots, each_lot
from adadp.training.planning import Plan

_MADE = 64 * 2**20  # bytes of made-up rows, unless two lots are more
_REFRESH = 4  # steps between two refreshes of a shape while measuring: so that few steps show what one costs
_STEPS = 2 * _REFRESH
_MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """What steps of a plan took, on this machine, on made-up rows.

    Attributes:
        device: on which.
        step: seconds of a step.
        first: seconds of the first step, which tries the loop and compiles.
        refresh: seconds that a step takes longer if it computes a shape anew; 0 where none does.
        refreshes: how many of the plan's steps do.
        evaluation: seconds of the model on one row.
        memory: MiB at the highest, of this process or on the GPU, without the data; None where that is not known.
        data: MiB of the data as the run holds it, reckoned from its shape. Reading a file takes more for a while.

    """

    device: str
    step: float
    first: float
    refresh: float
    refreshes: int
    evaluation: float
    memory: float | None
    data: float

    def seconds(self, steps: int, evaluated: int) -> float:
        """Of a run of so many steps, which evaluates so many rows in all."""
        return self.first + (steps - 1) * self.step + self.refreshes * self.refresh + evaluated * self.evaluation


def measure(plan: Plan, *, limit: float = 10.0) -> Measured:
    """Do a few steps of the plan on made-up rows.

    Args:
        plan: made from an outline or from data; of data only the form is used.
        limit: after so many seconds no further step is begun, but for the first two.

    Returns:
        What the steps took. Rows of persons are one for each: with k rows each, a step takes up to k times as long.

    Guarantee:
        Nothing is released: the rows are made up, and neither the plan's data nor its ledger is touched.

    """
    generator = torch.Generator().manual_seed(0)  # no noise and no lot is drawn from it
    model, inputs, labels = _stand_ins(plan, generator)
    settings = dict(plan.algorithm.settings)
    refresh = settings.get("refresh")
    if refresh is not None:
        settings["refresh"] = min(_REFRESH, refresh)
    algorithm = algorithms.create(plan.algorithm.name, plan.algorithm.reading, settings)
    with _peak(plan.device) as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about made-up rows, and the run says them again
        times = _steps(plan, algorithm, model, inputs, labels, limit)
        evaluation = _evaluation(model, inputs)
        memory = peak()
    made = inputs.numel() * inputs.element_size() / _MIB
    ordinary = [seconds for number, seconds in enumerate(times) if number % _REFRESH] or times
    step = statistics.median(ordinary)
    longer = times[_REFRESH] - step if len(times) > _REFRESH else times[0] - step
    return Measured(
        device=str(plan.device),
        step=step,
        first=times[0],
        refresh=0.0 if refresh is None else max(0.0, longer),
        refreshes=0 if refresh is None else math.ceil(plan.steps / refresh) - 1,
        evaluation=evaluation,
        memory=None if memory is None else max(0.0, memory - made),
        data=_data_mib(plan),
    )


def _stand_ins(plan: Plan, generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    """A copy of what is trained, and rows for it: at least two lots, where there are as many."""
    row = 4 * math.prod(plan.input_shape)
    count = min(plan.population, max(2 * plan.lot, _MADE // row))
    made = outline.made_up(plan.train, count, generator)
    model, labels = copy.deepcopy(plan.model), made.labels
    if isinstance(model, models.PaperCifarNet):  # its convolutions are applied once, before the first step
        width = next(layer for layer in model.head if isinstance(layer, nn.Linear)).in_features
        return model.head.to(plan.device), torch.rand(count, width, generator=generator).to(plan.device), labels
    inputs = prepared.rows(made, _fitted(plan, made))
    return model.to(plan.device), inputs.to(plan.device), labels.to(plan.device)


def _fitted(plan: Plan, made: Dataset | Table) -> prepared.Estimator | None:
    """The plan's preprocessing, fitted on made-up rows."""
    if plan.estimator is None:
        return None
    return prepared.fit(copy.deepcopy(plan.estimator), made, ledger=None)


def _steps(
    plan: Plan, algorithm: algorithms.Algorithm, model: nn.Module, inputs: Tensor, labels: Tensor, limit: float
) -> list[float]:
    """Seconds of each of a few steps."""
    optimizer: torch.optim.Optimizer = algorithm.optimizer(p for p in model.parameters() if p.requires_grad)
    lots: PrivateLoader | ShuffledLots
    if plan.noise_multiplier is None:
        lots = ShuffledLots(inputs, labels, plan.lot, None)
    else:

        def probes(count: int, generator: torch.Generator) -> Tensor:
            return inputs[torch.randint(len(inputs), (count,), generator=generator).to(inputs.device)]

        units = None if plan.units is None else Units(range(len(inputs)), max_rows=plan.units.max_rows)
        _, optimizer, lots = algorithm.make_private(
            PrivacyEngine(accountant="rdp"),
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=plan.lot),
            noise_multiplier=plan.noise_multiplier,
            task=algorithms.Task(plan.lot, _STEPS, probes, plan.delta),
            max_physical_batch_size=plan.settings.microbatch,
            pad_lots=plan.device.type == "cuda" and not algorithm.looks and units is None,
            unit=units,
        )
    work = algorithm.training_step(optimizer, model)
    times: list[float] = []
    started = last = time.perf_counter()
    for _ in each_lot(lots, work, _STEPS):
        _wait(plan.device)
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if len(times) > 1 and now - started > limit:
            break
    return times


def _evaluation(model: nn.Module, inputs: Tensor) -> float:
    """Seconds of the model on one row."""
    rows = inputs[:2048]
    started = time.perf_counter()
    held_out.outputs_of(model, rows)
    return (time.perf_counter() - started) / len(rows)


def _data_mib(plan: Plan) -> float:
    """Inputs as float32, to train on and held out; and images as they were read."""
    rows = len(plan.train) + len(plan.test)
    raw = math.prod(plan.train.input_shape) if isinstance(plan.train, Dataset) else 0
    return rows * (4 * math.prod(plan.input_shape) + raw) / _MIB


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Within, a function says how many MiB were in use at the highest: of the GPU's, or of this process's memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) / _MIB
        return
    known = sys.platform == "linux"
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    except OSError:
        known = False
    yield _highest if known else lambda: None


def _highest() -> float | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next((line.split() for line in lines if line.startswith("VmHWM")), None)
    return None if found is None else int(found[1]) / 1024
