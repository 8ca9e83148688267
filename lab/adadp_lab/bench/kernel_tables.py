"""The table of kernels against their floors, from what `lab/adadp_lab/bench/kernels.py --json` measured.

    python -m adadp_lab.bench.kernel_tables [--folder results/bench]     # writes kernels.md there

A floor is the larger of two times: the bytes that must move over the rate of a large copy, and the operations over the
rate of a large product (of float32 arithmetic for outer products), both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from adadp_lab.report.tables import table

DEVICES = {"cuda": "One GPU", "cpu": "Two CPU cores"}
HEAD = ("kernel", "size", "floor, ms", "ours, ms", "over the floor", "plain torch, ms", "without privacy, ms")


def tables(folder: Path) -> str:
    said = "`python -m adadp_lab.bench.kernel_tables`, from `lab/adadp_lab/bench/kernels.py --json`."
    parts = ["# Kernels against their floors", said]
    for kind, title in DEVICES.items():
        path = folder / f"kernels-{kind}.json"
        if path.exists():
            parts += _device(title, json.loads(path.read_text()))
    return "\n\n".join(parts) + "\n"


def _device(title: str, found: dict[str, Any]) -> list[str]:
    rates, versions = found["rates"], found["versions"]
    where = versions.get("gpu") or f"{versions['processor']}, {versions['threads']} threads"
    said = (
        f"{where}, torch {versions['torch']}. Measured rates: copies {rates['copy'] / 1e12:.3f} TB/s, products "
        f"{rates['matrix'] / 1e12:.2f} TFLOP/s, float32 arithmetic {rates['float32'] / 1e12:.2f} TFLOP/s"
        + (f", products of float16 {rates['half'] / 1e12:.2f} TFLOP/s." if "half" in rates else ".")
    )
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["kernel"], row["size"]), {})[row["backend"]] = row
    lines = []
    for (kernel, size), by in cells.items():
        ours = next((by[name] for name in ("triton", "numba") if name in by), by.get("reference", {}))
        plain = by.get("reference", {}).get("ms")
        torch = by.get("torch", {}).get("ms")
        over = f"{ours['ratio']:.1f}x" if "ratio" in ours else str(ours.get("failed", ""))
        lines.append([kernel, size, _ms(ours.get("floor_ms")), _ms(ours.get("ms")), over, _ms(plain), _ms(torch)])
    return [f"## {title}", said, table(HEAD, lines)]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results/bench"))
    folder = parser.parse_args().folder
    (folder / "kernels.md").write_text(tables(folder))
    print(folder / "kernels.md")


if __name__ == "__main__":
    main()
