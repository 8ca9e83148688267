"""Recipes for images: their settings searched, and what they reach.

python -m adadp_lab.experiments.recipes choose [--data-dir DIR] [--device cuda] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from adadp import data
from adadp_lab.experiments import recipe_grid

DATASETS = ("mnist", "fashion-mnist")


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
    """The best 60 variants of each data set and epsilon."""
    best: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for each in recipe_grid.summary(records):
        kept = best.setdefault((each["dataset"], each["epsilon"]), [])
        if len(kept) < 60:
            kept.append(each)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([each for kept in best.values() for each in kept], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["choose"])
    parser.add_argument("--out", type=Path, default=Path("runs/recipes/choose.json"))
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few rows and steps, to try the command")
    args = parser.parse_args()
    choose(args.out, args.device, args.data_dir, args.quick)


if __name__ == "__main__":
    main()
