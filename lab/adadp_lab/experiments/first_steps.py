"""README's loop with the learning rates that people try first, for several clippings and bounds.

    python -m adadp_lab.experiments.first_steps --data DIR --out results/first-steps [--seeds 2]

README's model on the first 6,000 images of MNIST, lots of 64, 20 epochs, epsilon 1 at delta = 1e-5: SGD with 0.1 and
Adam with 1e-3, nothing tuned. A run that is on record in `--out` already is not run again; `--show` prints the table of
what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Clipping, Ellipsoid, Flat, PrivacyEngine, Probe
from adadp.data import Dataset, load
from adadp.shapes.probes import PinkNoise

EXAMPLES, LOT, EPOCHS, EPSILON, DELTA = 6_000, 64, 20, 1.0, 1e-5


def readme_model(channels: int, side: int) -> nn.Module:
    """The network of README's first block, for square images."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 10),
    )  # fmt: skip


def _ellipsoid(bound: float) -> Clipping:
    return Ellipsoid(bound, source=Probe(PinkNoise((1, 28, 28))))


#: A clipping and whether its release is divided by its bound, by name.
METHODS: dict[str, tuple[Callable[[], Clipping], bool]] = {
    "flat, C = 1": (lambda: Flat(1.0), False),
    "ellipsoid, C = 1 (README)": (lambda: _ellipsoid(1.0), False),
    "ellipsoid, C = 0.1": (lambda: _ellipsoid(0.1), False),
    "ellipsoid, C = 0.1, normalised": (lambda: _ellipsoid(0.1), True),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD 0.1": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adam 1e-3": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def accuracy(train: Dataset, test: Dataset, method: str, optimizer: str, seed: int) -> float:
    """Train once; the share of the test images that the model gets right."""
    torch.manual_seed(seed)
    make, normalize = METHODS[method]
    model = readme_model(1, 28)
    loader = DataLoader(TensorDataset(train.inputs()[:EXAMPLES], train.labels[:EXAMPLES]), batch_size=LOT)
    engine = PrivacyEngine()  # noise from the system's entropy: another run differs a little
    model, private, lots = engine.make_private_with_epsilon(
        module=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), data_loader=loader,
        target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS, clipping=make(), normalize_clipping=normalize,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for images, labels in lots:
            private.zero_grad()
            private.backward(nn.functional.cross_entropy(model(images), labels, reduction="none"))
            private.step()
    if engine.get_epsilon(DELTA) > EPSILON:
        raise RuntimeError("the run cost more than its target")
    with torch.no_grad():
        hits = [(model(part).argmax(1) == labels).sum() for part, labels in _parts(test)]
    return float(sum(hits)) / len(test)


def _parts(test: Dataset) -> Any:
    return zip(torch.split(test.inputs(), 1000), torch.split(test.labels, 1000), strict=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Mean test accuracy in percent, with the standard error, as Markdown."""
    lines = ["| | " + " | ".join(OPTIMIZERS) + " |", "| --- |" + " --- |" * len(OPTIMIZERS)]
    for method in METHODS:
        cells = [
            _cell([r["accuracy"] for r in rows if (r["method"], r["optimizer"]) == (method, o)]) for o in OPTIMIZERS
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return f"{100 * values[0]:.1f}" if values else ""
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/first-steps"))
    parser.add_argument("--seeds", type=int, default=2, help="initial weights for each cell")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "first-steps.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    known = {(row["method"], row["optimizer"], row["seed"]) for row in rows}
    if not given.show:
        train, test = load("mnist", data_dir=given.data), load("mnist", "test", data_dir=given.data)
        for seed in range(given.seeds):
            for optimizer in OPTIMIZERS:
                for method in METHODS:
                    if (method, optimizer, seed) in known:
                        continue
                    started = time.perf_counter()
                    found = accuracy(train, test, method, optimizer, seed)
                    seconds = round(time.perf_counter() - started, 1)
                    row = {
                        "method": method,
                        "optimizer": optimizer,
                        "seed": seed,
                        "accuracy": found,
                        "seconds": seconds,
                    }
                    rows.append(row)
                    with records.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(row, flush=True)
    text = (
        "# README's loop with the learning rates that people try first\n\n"
        f"The first {EXAMPLES:,} images of MNIST, lots of {LOT}, {EPOCHS} epochs, epsilon {EPSILON:g} at\n"
        f"delta = {DELTA:g}; test accuracy in percent, nothing tuned;\n"
        "one run each where no standard error stands beside a figure. Made by\n"
        "`python -m adadp_lab.experiments.first_steps`.\n\n"
    )
    (given.out / "first-steps.md").write_text(text + table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
