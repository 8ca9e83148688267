"""Step time of every algorithm, over plain SGD's and over DPSGD's, on MNIST's two nets.

    python -m adadp_lab.bench.algorithms [--rounds 150] [--threads 2] [--json FILE]

Machines are noisy, so what counts is the ratio: every algorithm takes one timed step in turn, round after round. A
shape is refreshed at every 50th step. A mean would be decided by the few steps that somebody disturbed, so the time of
a step is the median of those without a refresh, plus what a refresh takes (the median of the steps with one, less that)
over its interval. Inputs are random numbers of the right form; the time does not depend on what they show.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms, models
from adadp.algorithms.defaults import DEFAULTS
from adadp.engine import PrivacyEngine
from adadp.shapes.probes import PinkNoise, Vectors
from adadp_lab.bench.clock import milliseconds
from adadp_lab.bench.methods import open_lot
from adadp_lab.report.records import write_json

#: What the requirements allow: (algorithm, reading) -> (over whom, how often its time), by model.
ALLOWED = {
    "paper": {
        ("dpsgd", ""): ("sgd", 1.5), ("adadp", "sound"): ("sgd", 2.5), ("adadp", "example"): ("sgd", 6.0),
        ("agd", ""): ("dpsgd", 3.0), ("dpopt", "sound"): ("dpsgd", 2.0),
    },
    "tanh-cnn": {("adadp", "sound"): ("sgd", 1.8)},
}  # fmt: skip
FORMS: dict[str, tuple[int, ...]] = {"paper": (60,), "tanh-cnn": (1, 28, 28)}


#: Steps from one refresh of a shape to the next, the very first step being one; and steps that do not count.
EVERY: int = DEFAULTS["adadp", "sound"]["refresh"]
WARM = 3


def parted(times: list[float]) -> tuple[float, float]:
    """What a step takes without a refresh, and what a refresh takes on top; 0 where none can be told from noise."""
    refreshed = [time for turn, time in enumerate(times, WARM) if turn % EVERY == 0]
    step = statistics.median(time for turn, time in enumerate(times, WARM) if turn % EVERY)
    return step, max(0.0, statistics.median(refreshed) - step) if refreshed else 0.0


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
        open_lot(lots, batch)
        work(inputs, targets)

    return step


def measure(model_name: str, lot: int, rounds: int) -> list[dict[str, Any]]:
    kinds = [(name, reading) for name, kind in algorithms.ALGORITHMS.items() for reading in kind.readings]
    torch.manual_seed(0)
    steps = {key: stepper(*key, model_name, FORMS[model_name], lot) for key in kinds}
    parts = {key: parted(values) for key, values in milliseconds(steps, rounds, warm=WARM).items()}
    whole = {key: step + refresh / EVERY for key, (step, refresh) in parts.items()}
    rows = []
    for key, value in whole.items():
        over, most = ALLOWED[model_name].get(key, (None, None))
        rows.append({
            "model": model_name, "lot": lot, "algorithm": key[0], "reading": key[1], "ms": round(value, 3),
            "refresh_ms": round(parts[key][1], 3), "over_sgd": round(value / whole["sgd", ""], 3),
            "over_dpsgd": round(value / whole["dpsgd", ""], 3), "allowed_over": over, "allowed": most,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lot", type=int, default=600)
    parser.add_argument("--models", default="paper,tanh-cnn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    rows = []
    for model_name in options.models.split(","):
        found = measure(model_name, options.lot, options.rounds)
        rows += found
        print(f"\n{model_name}, lot {options.lot}, {options.threads} threads")
        print(f"{'algorithm':20} {'ms':>8} {'over SGD':>9} {'over DPSGD':>11}  allowed")
        for row in found:
            name = f"{row['algorithm']} {row['reading']}".strip()
            allowed = f"{row['allowed']}x of {row['allowed_over']}" if row["allowed"] else ""
            print(f"{name:20} {row['ms']:8.2f} {row['over_sgd']:8.2f}x {row['over_dpsgd']:10.2f}x  {allowed}")
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": options.threads}
        write_json(options.json, {"rows": rows, "versions": versions})


if __name__ == "__main__":
    main()
