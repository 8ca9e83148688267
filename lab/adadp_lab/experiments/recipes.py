"""Recipes for images: their settings searched, and what they reach.

    python -m adadp_lab.experiments.recipes choose [--grid first] [--data-dir DIR] [--device cuda] [--out FOLDER]
    python -m adadp_lab.experiments.recipes reach [--recipe NAME] [--seeds 5] [--workers 16] [...]

    python -m adadp_lab.experiments.recipes digits --seeds 10
    python -m adadp_lab.experiments.recipes show

`choose` learns on the training sets of MNIST and Fashion-MNIST without their last 10,000 rows and tries on those: the
test sets are not read. Choosing is not paid for: these data are public, and a recipe is for others. It writes
`choose-GRID.json`. `reach` runs `adadp train --recipe` for each data set, epsilon and seed and writes `reached.json`;
`digits` runs plain `adadp train`. `show` makes the tables of `recipes.md` from these records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adadp import data
from adadp.features import features_of, public_directions
from adadp.training.recipes import RECIPES
from adadp_lab.experiments import recipe_grid
from adadp_lab.report.tables import table

DATASETS = ("mnist", "fashion-mnist")
GOALS = {"mnist": (98.4, 98.8, 99.0), "fashion-mnist": (88.2, 89.4, 90.5)}
"""For these epsilons."""
EPSILONS = (0.5, 1.0, 3.0)
PRINTED = ("accuracy", "epsilon", "delta", "noise_multiplier", "gaussian", "examples", "lot", "steps", "seconds")
CONFIGURED = ("recipe", "features", "directions", "mean_share", "moments_share", "feature_power", "noise_walk",
              "settings", "device")  # fmt: skip


def choose(out: Path, grid: str, device: str, data_dir: str | None) -> None:
    """Search on the training set's last 10,000 rows; the test set is not read."""
    torch.backends.cuda.matmul.allow_tf32 = True  # a search need not be exact to the last bits
    sets, made = [data.load(name, data_dir=data_dir) for name in DATASETS], 8000
    if grid == "quick":
        sets, made = [each.subset(torch.arange(2500)) for each in sets], 500
    started = time.perf_counter()
    records: list[dict[str, Any]] = []
    for record in recipe_grid.search(sets, device, recipe_grid.GRIDS[grid], made=made):
        records.append(record)
        if len(records) % 1000 == 0:
            print(f"{time.perf_counter() - started:.0f} s, {len(records)} variants", flush=True)
            _write(out / f"choose-{grid}.json", records)
    _write(out / f"choose-{grid}.json", records)
    print(f"{len(records)} variants after {time.perf_counter() - started:.0f} s", flush=True)


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    """The best 60 variants of each data set and epsilon."""
    best: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for each in recipe_grid.summary(records):
        kept = best.setdefault((each["dataset"], each["epsilon"]), [])
        if len(kept) < 60:
            kept.append(each)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([each for kept in best.values() for each in kept], indent=1) + "\n")


def reach(out: Path, recipe: str, more: list[str], *, data_dir: str | None, seeds: int, workers: int) -> None:
    """`adadp train --recipe` for each data set, epsilon and seed, as a command, and what it printed.

    Runs that are in the file already are not made again.
    """
    path = out / "reached.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    records: list[dict[str, Any]] = [each for each in kept if "error" not in each]
    there = {(each["seed"], each["target_epsilon"], each["dataset"]) for each in records}
    for dataset in DATASETS:  # they stay in the cache
        both = data.load(dataset, data_dir=data_dir), data.load(dataset, "test", data_dir=data_dir)
        for images in both:
            features_of(images)
        public_directions(both[0].input_shape, int(RECIPES[recipe].settings["directions"]), 0.5)
    jobs = [job for job in itertools.product(range(seeds), EPSILONS, DATASETS) if job not in there]

    def one(job: tuple[int, float, str]) -> dict[str, Any]:
        seed, epsilon, dataset = job
        given = ["--recipe", recipe, "--dataset", dataset, "--epsilon", str(epsilon), "--seed", str(seed), *more]
        return {"dataset": dataset, "target_epsilon": epsilon, "seed": seed, **_trained(given, alone=workers == 1)}

    with ThreadPoolExecutor(workers) as threads:
        for record in threads.map(one, jobs):
            records.append(record)
            shown = ("dataset", "target_epsilon", "seed", "accuracy", "seconds", "error")
            print({name: record.get(name) for name in shown}, flush=True)
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(records, indent=1) + "\n")


def digits(out: Path, seeds: int) -> None:
    """Plain `adadp train`, on digits: a run for each seed."""
    records = [{"seed": seed, **_trained(["--seed", str(seed)])} for seed in range(seeds)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "digits.json").write_text(json.dumps(records, indent=1) + "\n")
    show(out)


def _trained(given: list[str], *, alone: bool = True) -> dict[str, Any]:
    """What one `adadp train` printed, and how it was configured; or why it failed."""
    environment = None if alone else {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "adadp", "train", *given, "--json", "--out", f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        printed = json.loads(done.stdout)
        config = json.loads(Path(folder, "run", "config.json").read_text())
    return {**{name: printed[name] for name in PRINTED}, **{name: config[name] for name in CONFIGURED}}


def show(out: Path) -> str:
    """The tables of `recipes.md`, from the records beside it."""
    records = json.loads((out / "reached.json").read_text())
    rows = []
    for dataset in DATASETS:
        for epsilon in EPSILONS:
            ours = [each for each in records if (each["dataset"], each["target_epsilon"]) == (dataset, epsilon)]
            goal = GOALS[dataset][EPSILONS.index(epsilon)]
            rows.append([dataset, f"{epsilon:g}", *_figures(ours), f"{goal}", _devices(ours)])
    head = ["data", "epsilon", "accuracy (%)", "seeds", "lowest to highest", "goal", "device: runs, seconds each"]
    title = f"`adadp train --recipe scattering`, delta = {recipe_grid.DELTA:g}, mean and standard error:"
    text = f"{title}\n\n{table(head, rows)}"
    if (out / "digits.json").exists():
        plain = json.loads((out / "digits.json").read_text())
        mean, count, spread = _figures(plain)
        text += (
            f"\n\nPlain `adadp train` (digits, epsilon {plain[0]['epsilon']:.4g}, delta {plain[0]['delta']:g}, recipe "
            f"{plain[0]['recipe']}): {mean} in the mean of {count} seeds ({spread}).\n"
        )
    (out / "recipes.md").write_text(f"# Recipes\n\n{text.rstrip()}\n")
    return text


def _figures(records: list[dict[str, Any]]) -> list[str]:
    found = [100 * each["accuracy"] for each in records]
    if len(found) < 2:
        return ["", f"{len(found)}", ""]
    error = statistics.stdev(found) / math.sqrt(len(found))
    return [f"{statistics.mean(found):.2f} +- {error:.2f}", f"{len(found)}", f"{min(found):.2f} to {max(found):.2f}"]


def _devices(records: list[dict[str, Any]]) -> str:
    seconds: dict[str, list[float]] = {}
    for each in records:
        seconds.setdefault(each["device"], []).append(each["seconds"])
    return "; ".join(f"{name}: {len(each)}, {statistics.median(each):.0f} s" for name, each in seconds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["choose", "reach", "digits", "show"])
    parser.add_argument("--out", type=Path, default=Path("results/recipes"))
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--grid", choices=list(recipe_grid.GRIDS), default="first")
    parser.add_argument("--recipe", default="scattering")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if args.work == "choose":
        choose(args.out, args.grid, args.device, args.data_dir)
        return
    if args.work == "digits":
        digits(args.out, args.seeds)
    if args.work in ("digits", "show"):
        print(show(args.out))
        return
    more = ["--delta", str(recipe_grid.DELTA), "--device", args.device, "--evaluations", "1"]
    more += ["--checkpoint-every", "0", *(["--data-dir", args.data_dir] if args.data_dir else [])]
    reach(args.out, args.recipe, more, data_dir=args.data_dir, seeds=args.seeds, workers=args.workers)


if __name__ == "__main__":
    main()
