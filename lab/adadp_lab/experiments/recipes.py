"""Recipes for images: their settings searched, and what they reach.

    python -m adadp_lab.experiments.recipes choose [--data-dir DIR] [--device cuda] [--out FOLDER]
    python -m adadp_lab.experiments.recipes reach --config FOLDER/chosen.toml [--workers 4] [...]
    python -m adadp_lab.experiments.recipes all

`choose` learns on the training sets of MNIST and Fashion-MNIST without their last 10,000 rows and tries on those: the
test sets are not read. Choosing is not paid for: these data are public, and a recipe is for others. It writes
`choose.json` and the best settings, in the mean over both data sets and all epsilons, as `chosen.toml`. `reach` runs
`adadp train` with a configuration or a recipe by name and writes `reached.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adadp import data
from adadp_lab.experiments import recipe_grid

DATASETS = ("mnist", "fashion-mnist")
EPSILONS = (0.5, 1.0, 3.0)


def choose(out: Path, device: str, data_dir: str | None, quick: bool) -> None:
    """Search on the training set's last 10,000 rows; the test set is not read."""
    torch.backends.cuda.matmul.allow_tf32 = True  # a search need not be exact to the last bits
    sets = [data.load(name, data_dir=data_dir) for name in DATASETS]
    if quick:
        sets = [each.subset(torch.arange(2500)) for each in sets]
    started = time.perf_counter()
    records: list[dict[str, Any]] = []
    for record in recipe_grid.search(sets, device, made=500 if quick else 8000, quick=quick):
        records.append(record)
        if len(records) % 1000 == 0:
            print(f"{time.perf_counter() - started:.0f} s, {len(records)} variants", flush=True)
            _write(out, records)
    _write(out, records)
    print(f"{len(records)} variants after {time.perf_counter() - started:.0f} s", flush=True)


def _write(out: Path, records: list[dict[str, Any]]) -> None:
    """The best 40 variants of each data set and epsilon, the best in the mean, and the best of those as settings."""
    best: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for each in recipe_grid.summary(records):
        kept = best.setdefault((each["dataset"], each["epsilon"]), [])
        if len(kept) < 40:
            kept.append(each)
    overall = recipe_grid.means(records, ("dataset", "epsilon"))
    by_epsilon = recipe_grid.means(records)
    found = {
        "held out": recipe_grid.HELD_OUT,
        "mean over data sets and epsilons": overall[:60],
        "mean over data sets": [
            each for epsilon in EPSILONS for each in [one for one in by_epsilon if one["epsilon"] == epsilon][:30]
        ],
        "each": [each for kept in best.values() for each in kept],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "choose.json").write_text(json.dumps(found, indent=1) + "\n")
    if overall:
        (out / "chosen.toml").write_text(as_settings(overall[0]))


def as_settings(chosen: dict[str, Any]) -> str:
    """A variant of the search as a configuration of `adadp train`."""
    lines = [
        'features = "scattering"', 'model = "linear"', 'algorithm = "adadp"',
        *(f"{name} = {chosen[name]}" for name in ("directions", "mean_share", "moments_share", "lot", "steps")),
        f"feature_power = {chosen['power']}", f"max_grad_norm = {chosen['bound']}", f"noise_walk = {chosen['walk']}",
        "[settings]", f"before = {chosen['before']}", f"damping = {chosen['damping']}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def reach(out: Path, how: list[str], more: list[str], seeds: int, workers: int) -> None:
    """`adadp train` for each data set, epsilon and seed, as a command, and what it printed."""
    jobs = list(itertools.product(range(seeds), EPSILONS, DATASETS))
    records: list[dict[str, Any]] = []

    def one(job: tuple[int, float, str]) -> dict[str, Any]:
        seed, epsilon, dataset = job
        with tempfile.TemporaryDirectory() as folder:
            given = ["--dataset", dataset, "--epsilon", str(epsilon), "--delta", str(recipe_grid.DELTA),
                     "--seed", str(seed), "--evaluations", "1", "--checkpoint-every", "0"]  # fmt: skip
            command = [sys.executable, "-m", "adadp", "train", *given, *how, *more, "--json", "--out", f"{folder}/run"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return {"dataset": dataset, "target_epsilon": epsilon, "seed": seed, "error": done.stderr[-2000:]}
            printed = json.loads(done.stdout)
            config = json.loads(Path(folder, "run", "config.json").read_text())
        names = ("accuracy", "epsilon", "delta", "noise_multiplier", "gaussian", "lot", "steps", "seconds", "examples")
        settings = {name: config[name] for name in ("recipe", "features", "directions", "mean_share", "moments_share",
                                                    "feature_power", "noise_walk", "settings", "device")}  # fmt: skip
        return {"dataset": dataset, "target_epsilon": epsilon, "seed": seed,
                **{name: printed[name] for name in names}, "config": settings}  # fmt: skip

    def done(record: dict[str, Any]) -> None:
        records.append(record)
        shown = ("dataset", "target_epsilon", "seed", "accuracy", "seconds", "error")
        print({name: record.get(name) for name in shown}, flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "reached.json").write_text(json.dumps(records, indent=1) + "\n")

    for job in jobs[: len(DATASETS)]:  # these fill the cache of features
        done(one(job))
    with ThreadPoolExecutor(workers) as threads:
        for record in threads.map(one, jobs[len(DATASETS) :]):
            done(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["choose", "reach", "all"])
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few rows and steps, to try the command")
    parser.add_argument("--config", type=Path, help="reach: settings of adadp train")
    parser.add_argument("--recipe", help="reach: or a recipe by name")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 3))
    args = parser.parse_args()
    if args.work != "reach":
        choose(args.out, args.device, args.data_dir, args.quick)
    if args.work != "choose":
        config = args.config or args.out / "chosen.toml"
        how = ["--config", str(config)] if args.recipe is None else ["--recipe", args.recipe]
        more = ["--device", args.device, *(["--data-dir", args.data_dir] if args.data_dir else [])]
        more += ["--steps", "3", "--lot", "200"] if args.quick else []
        reach(args.out, how, more, 1 if args.quick else args.seeds, args.workers)


if __name__ == "__main__":
    main()
