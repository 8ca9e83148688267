"""What trials cost: the share of 1,000 private steps that is spent on trying modules and losses, for every model of
`adadp bench`, ordinary and (on a GPU) replayed.

    python -m adadp_lab.bench.trials [--device cuda] [--models mlp,transformer] [--out FILE]

Steps on the lots of the schedule below 1,000 are timed beside ordinary ones, in a second run, so that what libraries
choose and compile once for each process is not counted. The share is what the former take longer, over 1,000 of the
latter. Where steps are replayed, the first lots and that of the recording are made ordinarily in any case: what trials
take of them is timed apart, as the time inside the trial's own functions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adadp.checks.schedule import stage
from adadp.checks.trial import Trial
from adadp.engine import PrivacyEngine
from adadp.mechanism.replay import TrainingStep
from adadp_lab.bench.machine import versions
from adadp_lab.bench.methods import BenchTask, open_lot
from adadp_lab.bench.models import MODELS, SIZES, build
from adadp_lab.report.records import write_json

STEPS = 1000
TRIED = [lot for lot in range(STEPS) if lot == 0 or stage(lot) > stage(lot - 1)]


class Inside:
    """Counts the seconds that the trial's own functions take, with all that the GPU does in them."""

    FUNCTIONS = ("before_call", "of_loss", "of_rows", "before_recording")

    def __init__(self, kind: type[Trial]) -> None:
        self.seconds, self._within = 0.0, False
        self._kind, self._own = kind, {name: getattr(kind, name) for name in self.FUNCTIONS}
        for name, function in self._own.items():
            setattr(kind, name, self._timed(function))

    def restore(self) -> None:
        for name, function in self._own.items():
            setattr(self._kind, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                return function(*args, **kwargs)
            self._within = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.seconds += time.perf_counter() - start
                self._within = False

        return timed


def measured(name: str, device: torch.device, replayed: bool, rounds: int) -> dict[str, float]:
    module, inputs, targets = build(name, SIZES[device.type][name], 0, device)
    task = BenchTask(module, inputs, targets, "flat")
    lot = task.lot

    engine = PrivacyEngine(seed=0)

    def private() -> tuple[Callable[[int], None], TrainingStep | None]:
        _, optimizer, loader = engine.make_private(
            module=task.module, optimizer=task.optimizer(), data_loader=task.loader(), noise_multiplier=1.0,
            pad_lots=replayed,
        )  # fmt: skip
        step = TrainingStep(optimizer, task.losses) if replayed else None

        def run(number: int) -> None:
            loader.lots.next = number
            open_lot(loader, lot)
            if step is not None:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                optimizer.backward(task.losses(inputs, targets))
                optimizer.step()

        return run, step

    inside = Inside(Trial)
    run, step = private()
    for number in range(12):  # a run before: libraries choose their ways and kernels are compiled in it
        run(number)
    engine.detach(module)
    run, step = private()

    def timed(number: int) -> float:
        inside.seconds = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    taken: dict[int, float] = {}  # by lot: seconds of the step, and of its trial alone
    tried: dict[int, float] = {}
    for at, number in enumerate(TRIED):
        until = TRIED[at + 1] if at + 1 < len(TRIED) else number + rounds
        for lot_number in range(number, min(until, number + 1 + rounds)):
            taken[lot_number] = timed(lot_number)
            tried[lot_number] = inside.seconds
    plain = [seconds for number, seconds in taken.items() if number not in TRIED]
    ordinary = statistics.median(plain[len(plain) // 2 :])
    inside.restore()
    if step is not None and not step.replays:
        raise RuntimeError(f"nothing was replayed: {step.why_not}")
    if step is None:
        tried = {number: max(0.0, taken[number] - ordinary) for number in TRIED}
    extra, first = sum(tried.values()), tried.pop(0)
    later = [seconds for seconds in tried.values() if seconds > 1e-3 * ordinary]
    return {
        "step_ms": 1e3 * ordinary,
        "first_trial_ms": 1e3 * first,
        "later_trials_ms": 1e3 * statistics.median(later) if later else 0.0,
        "later_trials": len(later),
        "share": extra / (STEPS * ordinary),
        "share_without_the_first": (extra - first) / (STEPS * ordinary),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = {}
    for name in options.models.split(","):
        for replayed in (False, True) if device.type == "cuda" else (False,):
            found = measured(name, device, replayed, options.rounds)
            rows[f"{name}, replayed" if replayed else name] = found
            print(f"{name}{', replayed' if replayed else ''}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()))
    if options.out is not None:
        write_json(options.out, {"machine": versions(device), "tried_lots": TRIED, "models": rows})


if __name__ == "__main__":
    main()
