"""Step time of every algorithm, over plain SGD's and over DPSGD's, on MNIST's two nets.

    python benchmarks/algorithms.py [--rounds 50] [--threads 2] [--json FILE]

Machines are noisy, so what counts is the ratio: every algorithm takes one timed step in turn, round after round. Shapes
are refreshed every 50 steps, so ratios are those of mean times over a multiple of 50 rounds: a refresh is counted in.
Inputs are random numbers of the right form; a step's time does not depend on what they show.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms, models
from adadp.engine import PrivacyEngine
from adadp.probes import PinkNoise, Vectors
from adadp.sampling import Microbatch

#: What the requirements allow: (algorithm, reading) -> (over whom, how often its time), by model.
ALLOWED = {
    "paper": {
        ("dpsgd", ""): ("sgd", 1.5), ("adadp", "sound"): ("sgd", 2.5), ("adadp", "example"): ("sgd", 6.0),
        ("agd", ""): ("dpsgd", 3.0), ("dpopt", "sound"): ("dpsgd", 2.0),
    },
    "tanh-cnn": {("adadp", "sound"): ("sgd", 1.8)},
}  # fmt: skip
FORMS: dict[str, tuple[int, ...]] = {"paper": (60,), "tanh-cnn": (1, 28, 28)}


def stepper(name: str, reading: str, model_name: str, lot: int) -> Callable[[], None]:
    torch.manual_seed(0)
    form = FORMS[model_name]
    inputs, targets = torch.rand(lot, *form), torch.randint(10, (lot,))
    module = models.build(model_name, form, 10)
    made = algorithms.create(name, reading, {"lr": 1e-4})
    optimizer = made.optimizer(module.parameters())

    def work(private: Any = None) -> None:
        (private or optimizer).zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        if private is not None:
            made.see(private, module, inputs, targets)
        (private or optimizer).step()

    if not made.private:
        return work
    probes = PinkNoise(form) if len(form) == 3 else Vectors(form[0])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=lot)
    _, private, lots = made.make_private(
        PrivacyEngine(seed=0), module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=8.0,
        task=algorithms.Task(lot, 10_000, probes),
    )  # fmt: skip
    numbers = iter(range(10**9))

    def step() -> None:
        lots.current = Microbatch(next(numbers), 0, last=True, count=lot, keep=True, planned=lot)
        lots.on_microbatch(lots.current)
        work(private)

    return step


def measure(model_name: str, lot: int, rounds: int) -> list[dict[str, Any]]:
    kinds = [(name, reading) for name, kind in algorithms.ALGORITHMS.items() for reading in kind.readings]
    steps = {key: stepper(*key, model_name, lot) for key in kinds}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in kinds}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for key, step in steps.items():
            started = time.perf_counter()
            step()
            times[key].append(1e3 * (time.perf_counter() - started))
    mean = {key: statistics.mean(values) for key, values in times.items()}
    rows = []
    for key, value in mean.items():
        over, most = ALLOWED[model_name].get(key, (None, None))
        rows.append({
            "model": model_name, "lot": lot, "algorithm": key[0], "reading": key[1], "ms": round(value, 3),
            "over_sgd": round(value / mean["sgd", ""], 3), "over_dpsgd": round(value / mean["dpsgd", ""], 3),
            "allowed_over": over, "allowed": most,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
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
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows, "versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
