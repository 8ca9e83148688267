"""Norm and weighted sum of a sequence's gradients in every way that is known, and which one the engine chooses.

    python -m adadp_lab.bench.ways [--device auto] [--threads 2] [--json FILE]

A layer on sequences of T tokens, n examples, a weight of rows x columns. On a GPU each way is recorded and replayed, so
that times are the GPU's own. `lost` is how much longer the chosen way takes than the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adadp.gradients.forms.products import Products
from adadp_lab.bench import clock
from adadp_lab.bench.machine import device_for, settings, versions
from adadp_lab.report.records import write_json

WAYS = ("gram", "again", "stored", "half")
#: Examples, tokens, rows, columns.
SIZES = {
    "cuda": [
        (2048, 64, 256, 256), (2048, 64, 1024, 256), (32, 128, 512, 512), (32, 128, 2048, 512), (32, 128, 128, 128),
        (8, 64, 256, 256), (8, 64, 1024, 256), (512, 16, 64, 64), (4096, 16, 256, 256), (4096, 32, 128, 128),
        (64, 512, 256, 256), (32, 256, 768, 768), (32, 256, 3072, 768), (256, 24, 1024, 1024), (32, 16, 4096, 1024),
        (256, 20, 10, 64),
    ],
    "cpu": [
        (32, 64, 256, 256), (32, 64, 768, 256), (32, 64, 1024, 256), (32, 64, 256, 1024), (32, 16, 64, 64),
        (32, 16, 512, 512), (32, 128, 128, 128), (32, 256, 64, 64), (8, 512, 64, 256), (256, 8, 128, 128),
    ],
}  # fmt: skip
MOST_STORED = 2**30  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = device_for(given.device)
    with settings(device, given.threads):
        rows = [measured(*sizes, device) for sizes in SIZES[device.type]]
        found = {"rows": rows, "versions": versions(device)}
    if given.json is not None:
        write_json(given.json, found)


def measured(count: int, tokens: int, rows: int, columns: int, device: torch.device) -> dict[str, Any]:
    """The milliseconds of each way, printed as well."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = torch.randn(count, tokens, columns, device=device, generator=generator)
    outputs = torch.randn(count, tokens, rows, device=device, generator=generator)
    weights = torch.rand(count, device=device, generator=generator)
    chosen = Products(inputs, outputs)._way

    def work(way: str) -> None:
        form = Products(inputs, outputs)
        form.__dict__["_way"] = way
        form.squared_norms()
        form.weighted_sum(weights, weights != 0)

    possible = [
        way
        for way in WAYS
        if (way != "half" or chosen == "half") and (way != "stored" or 4 * count * rows * columns <= MOST_STORED)
    ]
    runs = {way: _recorded(work, way) if device.type == "cuda" else partial(work, way) for way in possible}
    times = clock.milliseconds(runs, 20, device.type, warm=2)
    ms = {way: round(statistics.median(found), 4) for way, found in times.items()}
    lost = round(ms[chosen] / min(ms.values()) - 1, 3)
    print(f"{count} x {tokens}, {rows} x {columns}: chosen {chosen}, lost {lost:.1%}, {ms}", flush=True)
    sizes = {"examples": count, "tokens": tokens, "rows": rows, "columns": columns}
    return {**sizes, "chosen": chosen, "lost": lost, "ms": ms}


def _recorded(work: Callable[[str], None], way: str) -> Callable[[], None]:
    for _ in range(3):  # kernels are compiled here
        work(way)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(way)
    return graph.replay


if __name__ == "__main__":
    main()
