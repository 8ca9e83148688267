"""What trials cost: the share of 1,000 private steps that is spent on trying modules and losses, for every model of
`adadp bench`, ordinary and (on a GPU) replayed.

    python -m adadp_lab.bench.trials [--device cuda] [--models mlp,transformer] [--out FILE]

Steps on the lots of the schedule below 1,000 are timed beside ordinary ones, in a second run, so that what libraries
choose and compile once for each process is not counted. The share is what the former take longer, over 1,000 of the
latter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from adadp.checks.schedule import stage
from adadp.engine import PrivacyEngine
from adadp.mechanism.replay import TrainingStep
from adadp_lab.bench.machine import versions
from adadp_lab.bench.methods import Task
from adadp_lab.bench.models import MODELS, SIZES, build

STEPS = 1000
TRIED = [lot for lot in range(STEPS) if lot == 0 or stage(lot) > stage(lot - 1)]


def measured(name: str, device: torch.device, replayed: bool, rounds: int) -> dict[str, float]:
    module, inputs, targets = build(name, SIZES[device.type][name], 0, device)
    task = Task(module, inputs, targets, "flat")
    lot = len(inputs)

    engine = PrivacyEngine(seed=0)

    def private() -> tuple[Callable[[int], None], TrainingStep | None]:
        _, optimizer, loader = engine.make_private(
            module=task.module, optimizer=task.optimizer(), data_loader=task.loader(), noise_multiplier=1.0,
            pad_lots=replayed,
        )  # fmt: skip
        step = TrainingStep(optimizer, task.losses) if replayed else None

        def run(number: int) -> None:
            loader.lots.next = number
            loader.open_for(lot)
            if step is not None:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                optimizer.backward(task.losses(inputs, targets))
                optimizer.step()

        return run, step

    run, step = private()
    for number in range(12):  # a run before: libraries choose their ways and kernels are compiled in it
        run(number)
    engine.detach(module)
    run, step = private()

    def timed(number: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    tried: list[float] = []
    plain: list[float] = []
    for at, number in enumerate(TRIED):
        tried.append(timed(number))
        until = TRIED[at + 1] if at + 1 < len(TRIED) else number + rounds
        plain += [timed(between) for between in range(number + 1, min(until, number + 1 + rounds))]
    ordinary = statistics.median(plain[len(plain) // 2 :])
    if step is not None and not step.replays:
        raise RuntimeError(f"nothing was replayed: {step.why_not}")
    extra = sum(max(0.0, seconds - ordinary) for seconds in tried)
    return {
        "step_ms": 1e3 * ordinary,
        "first_trial_ms": 1e3 * (tried[0] - ordinary),
        "later_trials_ms": 1e3 * statistics.median(seconds - ordinary for seconds in tried[1:]),
        "share": extra / (STEPS * ordinary),
        "share_without_the_first": (extra - max(0.0, tried[0] - ordinary)) / (STEPS * ordinary),
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
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": versions(device), "tried_lots": TRIED, "models": rows}, indent=2))


if __name__ == "__main__":
    main()
