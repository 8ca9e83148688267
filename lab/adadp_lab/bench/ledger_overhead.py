"""What the ledger adds to a training step of 1 ms: `python -m adadp_lab.bench.ledger_overhead [--json]`.

A step is a busy wait of 1 ms. The overhead is what the run takes beyond its steps, syncing to the disk included, and
has to stay at 2% or less. With a budget the first step also pays for one accounting of the whole plan, shown apart.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from adadp.accounting.events import PoissonGaussian
from adadp.accounting.ledger import Budget, Ledger

STEP = PoissonGaussian(1.0, 0.01)


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def measure(path: Path | None, steps: int, step_time: float, budget: Budget | None) -> dict[str, float]:
    ledger = Ledger(path, dataset="benchmark")
    run = ledger.start({"steps": steps}, budget=budget)
    start = time.perf_counter()
    run.charge(STEP)
    first = time.perf_counter() - start
    spin(step_time)
    charging = 0.0
    for _ in range(steps - 1):
        before = time.perf_counter()
        run.charge(STEP)
        charging += time.perf_counter() - before
        spin(step_time)
    run.close()
    return {
        "first_charge_ms": 1e3 * first,
        "charge_us": 1e6 * charging / (steps - 1),
        "overhead_percent": 100 * charging / ((steps - 1) * step_time),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--folder", default=None, help="where the ledger is written (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, path, budget in (
            ("on disk", Path(folder) / "plain.jsonl", None),
            ("on disk, with a budget", Path(folder) / "budget.jsonl", Budget(50.0, 1e-5)),
            ("in memory", None, None),
        ):
            results[name] = measure(path, options.steps, options.step_ms / 1e3, budget)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'ledger':<24}{'first charge':>14}{'a charge':>12}{'of a step':>12}")
    for name, row in results.items():
        first, each, share = row["first_charge_ms"], row["charge_us"], row["overhead_percent"]
        print(f"{name:<24}{first:>11.1f} ms{each:>9.1f} us{share:>10.2f} %")


if __name__ == "__main__":
    main()
