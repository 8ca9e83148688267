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
import warnings
from pathlib import Path
from typing import Any

import torch

from adadp import algorithms
from adadp.bench.clock import milliseconds
from adadp.reproduce.timing import stepper

#: What the requirements allow: (algorithm, reading) -> (over whom, how often its time), by model.
ALLOWED = {
    "paper": {
        ("dpsgd", ""): ("sgd", 1.5), ("adadp", "sound"): ("sgd", 2.5), ("adadp", "example"): ("sgd", 6.0),
        ("agd", ""): ("dpsgd", 3.0), ("dpopt", "sound"): ("dpsgd", 2.0),
    },
    "tanh-cnn": {("adadp", "sound"): ("sgd", 1.8)},
}  # fmt: skip
FORMS: dict[str, tuple[int, ...]] = {"paper": (60,), "tanh-cnn": (1, 28, 28)}


def measure(model_name: str, lot: int, rounds: int) -> list[dict[str, Any]]:
    kinds = [(name, reading) for name, kind in algorithms.ALGORITHMS.items() for reading in kind.readings]
    torch.manual_seed(0)
    steps = {key: stepper(*key, model_name, FORMS[model_name], lot) for key in kinds}
    times = milliseconds(steps, rounds)
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
