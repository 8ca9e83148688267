"""A file of real texts with classes: descriptions of Debian's packages, with the section that each is in.

    python -m adadp_lab.experiments.package_texts texts.csv
    adadp train --dataset texts.csv --label section --text description --epsilon 1 --yes

It is made of the package lists of the machine (`apt-cache dumpavail`, after `apt-get update`): nothing is downloaded.
With `--train`, the command above is run at epsilon 0.3 and 1, and what came out is written as JSON.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLASSES = 20  # the most frequent sections
LEAST = 20_000  # packages: fewer are not the whole list


def packages(listing: str) -> Iterator[tuple[str, str]]:
    """The section and the text (name and description) of each package of `apt-cache dumpavail`."""
    for block in listing.split("\n\n"):
        fields = {
            key: value.strip()
            for key, colon, value in (line.partition(":") for line in block.split("\n") if line[:1].strip())
            if colon
        }
        if fields.get("Section") and fields.get("Description"):
            yield fields["Section"].rpartition("/")[2], f"{fields['Package']}: {fields['Description']}"


def write(path: Path) -> int:
    """Write the file; return how many rows it has, or 0 where this machine has no package lists."""
    if shutil.which("apt-cache") is None:
        return 0
    done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=False)
    rows = list(packages(done.stdout)) if done.returncode == 0 else []
    if len(rows) < LEAST:
        return 0
    frequent = {name for name, _ in collections.Counter(section for section, _ in rows).most_common(CLASSES)}
    kept = [row for row in rows if row[0] in frequent]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["section", "description"])
        writer.writerows(kept)
    return len(kept)


def trained(path: Path, epsilon: float, seed: int) -> dict[str, Any]:
    """Train once, as the command does, and return what came out."""
    from adadp.training import loop

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        found = loop.train(
            dataset=str(path), label="section", text=["description"], epsilon=epsilon, delta=1e-5, seed=seed,
            out=f"{folder}/run", ledger=f"{folder}/ledger.jsonl",
        )  # fmt: skip
        seconds = time.perf_counter() - started
    values = {name: round(value, 4) for name, value in found.metrics.values.items()}
    return {
        **values,
        "epsilon": epsilon,
        "seed": seed,
        "baseline": round(found.metrics.baseline, 4),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--train", type=Path, help="train on it, and write what came out to this file")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    rows = write(given.file)
    if not rows:
        raise SystemExit("this machine has no lists of Debian packages (apt-get update)")
    print(f"{given.file}: {rows:,} texts in {CLASSES} classes")
    if given.train is None:
        return
    runs = [trained(given.file, epsilon, seed) for epsilon in (0.3, 1.0) for seed in range(given.seeds)]
    means = {
        str(epsilon): round(statistics.mean(run["accuracy"] for run in runs if run["epsilon"] == epsilon), 4)
        for epsilon in (0.3, 1.0)
    }
    given.train.parent.mkdir(parents=True, exist_ok=True)
    given.train.write_text(
        json.dumps({"rows": rows, "classes": CLASSES, "mean_accuracy": means, "runs": runs}, indent=1) + "\n"
    )
    print(json.dumps(means))


if __name__ == "__main__":
    main()
