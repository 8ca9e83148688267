"""A file of real texts with classes: descriptions of Debian's packages, with the section that each is in.

    python -m adadp_lab.experiments.package_texts texts.csv
    adadp train --dataset texts.csv --label section --text description --epsilon 1 --yes

It is made of the package lists of the machine (`apt-cache dumpavail`, after `apt-get update`): nothing is downloaded.
`--of` says what counts as a package's description: its `name` and the one line that the list has, that `line` alone,
or the `long` description, without the name. Long ones are in lists of their own, which `apt-get -o
Acquire::Languages=en update` fetches. With `--train`, the command above is run at epsilon 0.3 and 1, and without
privacy, and what came out is kept as JSON, beside what was kept of other texts.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CLASSES = 20  # the most frequent sections
LEAST = 20_000  # packages: fewer are not the whole list
TEXTS = ("name", "line", "long")
EPSILONS = (0.3, 1.0, None)


def packages(listing: str, of: str = "name", long: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """The section and the text of each package of `apt-cache dumpavail`; `long` has long descriptions by their MD5."""
    for fields in _blocks(listing):
        if not (fields.get("Section") and fields.get("Description")):
            continue
        text = fields["Description"].partition("\n")[0]
        if of == "name":
            text = f"{fields['Package']}: {text}"
        elif of == "long":
            text = (long or {}).get(fields.get("Description-md5", ""), "")
        if text:
            yield fields["Section"].rpartition("/")[2], text


def long_descriptions() -> dict[str, str]:
    """Long descriptions by their MD5, as far as this machine has lists of them."""
    lists = ["apt-get", "-o", "Acquire::Languages=en", "indextargets", "--format", "$(FILENAME)"]
    files = _said_by(*lists, "Created-By: Translations").split()
    blocks = _blocks(_said_by("/usr/lib/apt/apt-helper", "cat-file", *files)) if files else ()
    return {fields["Description-md5"]: fields["Description-en"] for fields in blocks if "Description-en" in fields}


def _blocks(text: str) -> Iterator[dict[str, str]]:
    """The fields of each block of a list; a line that begins with a space goes on with the field above it."""
    for block in text.split("\n\n"):
        fields, key = {}, ""
        for line in block.split("\n"):
            if line[:1].strip():
                key, _, value = line.partition(":")
                fields[key] = value.strip()
            elif key:
                fields[key] += f"\n{line.strip()}"
        yield {name: value.strip() for name, value in fields.items()}


def _said_by(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def write(path: Path, of: str = "name") -> int:
    """Write the file; return how many rows it has, or 0 where this machine has no such package lists."""
    if shutil.which("apt-cache") is None:
        return 0
    long = long_descriptions() if of == "long" else None
    rows = list(packages(_said_by("apt-cache", "dumpavail"), of, long))
    if len(rows) < LEAST:
        return 0
    frequent = {name for name, _ in collections.Counter(section for section, _ in rows).most_common(CLASSES)}
    kept = [row for row in rows if row[0] in frequent]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["section", "description"])
        writer.writerows(kept)
    return len(kept)


def trained(path: Path, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Train once, as the command does, and return what came out; no epsilon means no privacy, and a longer run."""
    from adadp.training import loop

    how = {"algorithm": "sgd", "lr": 1.0, "steps": 2000} if epsilon is None else {"epsilon": epsilon}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        found = loop.train(
            dataset=str(path), label="section", text=["description"], delta=1e-5, seed=seed,
            out=f"{folder}/run", ledger=f"{folder}/ledger.jsonl", **how,
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
    parser.add_argument("--of", choices=TEXTS, default="name", help="the text of a package")
    parser.add_argument("--train", type=Path, help="train on it, and keep what came out in this file")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    rows = write(given.file, given.of)
    if not rows:
        raise SystemExit("this machine has no lists of Debian packages (apt-get -o Acquire::Languages=en update)")
    print(f"{given.file}: {rows:,} texts in {CLASSES} classes")
    if given.train is None:
        return
    runs = [trained(given.file, epsilon, seed) for epsilon in EPSILONS for seed in range(given.seeds)]
    means = {
        str(epsilon or "without privacy"): round(
            statistics.mean(run["accuracy"] for run in runs if run["epsilon"] == epsilon), 4
        )
        for epsilon in EPSILONS
    }
    kept = json.loads(given.train.read_text()) if given.train.exists() else {}
    kept[given.of] = {"rows": rows, "classes": CLASSES, "mean_accuracy": means, "runs": runs}
    given.train.parent.mkdir(parents=True, exist_ok=True)
    given.train.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(means))


if __name__ == "__main__":
    main()
