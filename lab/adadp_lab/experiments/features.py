"""What to make of public features, and how to train a private linear layer on them: choices behind Table 1, CIFAR-10.

    python -m adadp_lab.experiments.features --data DIR [--out runs/features] [--device cuda] [--workers 12]

Everything is chosen on 10,000 examples set aside from CIFAR-10's training set (nobody pays for the choice); accuracy
on the test set is printed for a layer without privacy alone. The net is pre-trained on CIFAR-100 first where that was
not done yet (`adadp pretrain wide`). An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adadp_lab.paper.item import Item, Job, Options, Record, Report
from adadp_lab.paper.learning import train
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.runner import run
from adadp_lab.paper.table1 import DELTA
from adadp_lab.paper.tasks import prepare
from adadp_lab.paper.workbench import Workbench
from adadp_lab.pretraining.features import RECIPES
from adadp_lab.report.tables import table

EPSILONS = (0.3, 0.5, 1.0, 1.775)
SCALINGS = ("length", "unit", "standard", "whitened")
HELD_OUT = 10_000
LOT, STEPS = 8192, 400
#: The learning rate times the noise multiplier, for this lot.
RATES = (1000.0, 2000.0, 4000.0)
#: The paper's form with the shape of public features, and DPSGD.
SHAPED = {"algorithm": "adadp", "reading": "sound", "clipping": "public"}
FLAT = {"algorithm": "dpsgd", "reading": None}
#: Other lots and steps, tried on fewer features.
PLANS = ((LOT, 1000), (2 * LOT, STEPS))


def probe(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """Accuracy of a linear layer without privacy: logistic regression, hardly regularised, until it stands still."""
    inputs, labels, tested, answers = prepare(settings, seed, bench).split
    layer = torch.nn.Linear(inputs.shape[1], 10).to(inputs)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=150, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(layer(inputs), labels) + 1e-5 * layer.weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    with torch.no_grad():
        return {"accuracy": float((layer(tested).argmax(1) == answers).double().mean())}


def jobs(options: Options) -> list[Job]:
    made = []
    every = [{"net": "wide", "scaling": scaling, "blocks": blocks} for blocks in (1, 2) for scaling in SCALINGS]
    base = {"task": "cifar10-resnet", "pretrained": asdict(RECIPES["wide"]), "delta": DELTA, "marks": "end"}
    for features in every:
        made += [Job(probe, {**base, "features": features, "held_out": aside}, cost=9) for aside in (0, HELD_OUT)]

    def private(how: dict[str, Any], features: dict[str, Any], lot: int, steps: int, epsilon: float) -> list[Job]:
        said = {**base, **how, "features": features, "held_out": HELD_OUT, "lot": lot, "steps": steps,
                "target_epsilon": epsilon}  # fmt: skip
        return [
            Job(train, {**said, "rate_times_noise": rate * lot / LOT}, seed, cost=steps / 100)
            for rate in RATES
            for seed in range(options.seeds)
        ]

    for epsilon in EPSILONS:
        for features in every:
            made += private(SHAPED, features, LOT, STEPS, epsilon)
            if features["blocks"] == 1 and features["scaling"] in ("unit", "standard"):
                made += private(FLAT, features, LOT, STEPS, epsilon)
                for lot, steps in PLANS:
                    made += private(SHAPED, features, lot, steps, epsilon)
    return made


def show(records: list[Record]) -> str:
    """Two tables: without privacy, and for each choice the best rate at every epsilon, best choice first."""
    bare: dict[str, dict[int, float]] = {}
    private: dict[tuple[str, ...], dict[float, dict[float, list[float]]]] = {}
    for record in records:
        said = record["settings"]
        features = f"{said['features']['scaling']}, {said['features']['blocks']} blocks"
        if record["work"] == "probe":
            bare.setdefault(features, {})[said["held_out"]] = record["accuracy"]
            continue
        clipping = "flat" if said["algorithm"] == "dpsgd" else "public shape"
        choice = (features, clipping, f"{said['lot']} x {said['steps']}")
        rate = said["rate_times_noise"] * LOT / said["lot"]
        rates = private.setdefault(choice, {}).setdefault(said["target_epsilon"], {})
        rates.setdefault(rate, []).append(100 * record["accuracy"])

    def best(rates: dict[float, list[float]]) -> tuple[float, float]:
        return max((sum(found) / len(found), rate) for rate, found in rates.items())

    epsilons = sorted({epsilon for found in private.values() for epsilon in found})
    order = sorted(private, key=lambda choice: -sum(best(rates)[0] for rates in private[choice].values()))

    def cell(rates: dict[float, list[float]] | None) -> str:
        return "{:.2f} ({:g})".format(*best(rates)) if rates else ""

    rows = [[*choice, *(cell(private[choice].get(epsilon)) for epsilon in epsilons)] for choice in order]
    first = table(
        ["features", "test accuracy (50,000 examples)", "on those set aside (40,000 examples)"],
        [[name, *(f"{100 * found[aside]:.2f}" if aside in found else "" for aside in (0, HELD_OUT))]
         for name, found in bare.items()],
    )  # fmt: skip
    head = ["features", "clipping", "lot x steps", *(f"epsilon {e:g}" for e in epsilons)]
    return (
        f"Without privacy:\n\n{first}\n\nWith privacy (delta = {DELTA:g}), accuracy on those set aside, and the best "
        f"learning rate times the noise multiplier (for lots of {LOT:,}):\n\n{table(head, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/features"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    item = Item(
        "features", "Public features", "Table I", jobs, lambda records: Report(""),
        datasets=("cifar10", "cifar100"), pretrained=("wide",),
    )  # fmt: skip
    summary = run([item], Options(args.seeds, device=args.device), args.out, workers=args.workers,
                  data_dir=args.data, say=print)  # fmt: skip
    print(f"{summary.outcomes} after {summary.seconds:.0f} s\n")
    records = Records(args.out).of(item)
    # What an interrupted or partly failed run has is worth a look too.
    print(show(records or list(Records(args.out).known().values())))


if __name__ == "__main__":
    main()
