"""Every kernel on every backend that the device has, against its floor, and against float64.

    python -m adadp_lab.bench.kernels [--device auto] [--only TEXT] [--threads 2] [--json FILE] [--tune]

The floor is the larger of two times: the bytes that must be read or written once, over the rate at which this machine
copies; and the operations, over the rate at which it multiplies large matrices (TF32 on CUDA, float16 for factors that
were cut to it, float32 for the outer products of vectors, which no matrix unit can clamp). Rates are measured first.
`torch` is the ordinary weight gradient, which clamps and measures nothing. `error` is |found - exact| / |exact|, exact
being the plain version in float64; `same` says whether a second call gave the same bits. Small inputs come from the
cache, as in a training step. With `--only`, what a JSON file has of other kernels stays in it.

`--tune` times tiles of other sizes for the Triton kernels instead, or other numbers of products at a time, and prints
the best of each size.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.kernels import kernel, reference
from adadp.gradients.layers.convolution import Geometry
from adadp_lab.bench import clock
from adadp_lab.bench.machine import device_for, said, settings, versions
from adadp_lab.report.records import write_json

WRONG = 5e-3  # TF32 is off by a tenth of this

# Rows, columns and examples of layers on vectors; then of sequences, with their tokens.
VECTORS = {
    "cuda": {
        "mlp 1000x60, 600": (1000, 60, 600), "mlp 10x1000, 600": (10, 1000, 600), "mlp 1000x60, 8192": (1000, 60, 8192),
        "alexnet 384x4096, 512": (384, 4096, 512), "alexnet 192x384, 512": (192, 384, 512),
        "768x768, 600": (768, 768, 600),
    },
    "cpu": {
        "mlp 1000x60, 600": (1000, 60, 600), "mlp 10x1000, 600": (10, 1000, 600),
        "alexnet 384x4096, 32": (384, 4096, 32),
    },
}  # fmt: skip
SEQUENCES = {
    "cuda": {
        f"transformer {rows}x{columns}, 32x256": (rows, columns, 32, 256)
        for rows, columns in ((2304, 768), (768, 768), (3072, 768), (768, 3072))
    },
    "cpu": {
        f"transformer {rows}x{columns}, 32x64": (rows, columns, 32, 64)
        for rows, columns in ((768, 256), (256, 256), (1024, 256), (256, 1024))
    },
}
# Examples and entries of what is stored; rows and their length.
DENSE = {
    "cuda": {"embedding 32x1M": (32, 2**20), "norm 512x768": (512, 768), "256x36864": (256, 36864)},
    "cpu": {"embedding 8x256k": (8, 2**18), "norm 64x768": (64, 768)},
}
ROWS = {
    "cuda": {
        "tokens 8192x768": (8192, 768), "tokens 8192x3072": (8192, 3072), "vectors 8192x60": (8192, 60),
        "images 512x16384": (512, 16384), "gradients 32x1.8M": (32, 2304 * 768),
    },
    "cpu": {"tokens 2048x256": (2048, 256), "images 32x16384": (32, 16384)},
}  # fmt: skip
# Output and input channels, kernel, stride, size of the input.
WRN = ((16, 3, 3, 1, 32), (64, 16, 3, 1, 32), (64, 16, 1, 1, 32), (64, 64, 3, 1, 32), (128, 64, 3, 2, 32),
       (128, 64, 1, 2, 32), (128, 128, 3, 1, 16), (256, 128, 3, 2, 16), (256, 256, 3, 1, 8))  # fmt: skip
ALEXNET = ((64, 3, 5, 1, 32), (64, 64, 5, 1, 16))
CONVOLUTIONS = {
    device: {
        f"{model} {o}x{i}, {k}x{k} on {size}{f' by {stride}' if stride > 1 else ''}, {n}": (o, i, k, stride, size, n)
        for model, layers, n in (("wrn", WRN, wrn), ("alexnet", ALEXNET, alexnet))
        for o, i, k, stride, size in layers
    }
    for device, wrn, alexnet in (("cuda", 256, 512), ("cpu", 16, 32))
}


@dataclass
class Workload:
    """One kernel at one size."""

    name: str
    size: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    ordinary: Callable[[], Tensor]
    operations: float
    moved: int
    rate: str

    def call(self, function: Callable[..., Any], exact: bool = False) -> list[Tensor]:
        """What `function` returns, in float64 where `exact`."""

        def convert(value: Any) -> Any:
            whole = exact and isinstance(value, Tensor) and value.is_floating_point()
            return value.double() if whole else value

        options = {key: convert(value) for key, value in self.options.items()}
        found = function(*map(convert, self.arguments), **options)
        return [part for part in (found if isinstance(found, tuple) else (found,)) if isinstance(part, Tensor)]

    def floor(self, rates: dict[str, float]) -> float:
        """Milliseconds."""
        arithmetic = self.operations / rates[self.rate]
        return 1e3 * max(arithmetic, self.moved / rates["copy"])


def works(device: torch.device) -> Iterator[Workload]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    for size, (rows, columns, n) in VECTORS[device.type].items():
        outputs, inputs, bound = draw(n, rows), draw(n, columns), draw(rows, columns).abs()
        for moments in (False, True):
            yield Workload(
                "outer clamped" + moments * " + moments", size, "outer_clamped", (outputs, inputs, bound),
                {"moments": moments}, lambda b=outputs, a=inputs: b.T @ a,  # type: ignore[misc]
                (4 + 2 * moments) * n * rows * columns,
                4 * (outputs.numel() + inputs.numel() + (2 + moments) * bound.numel()), "float32",
            )  # fmt: skip
        pairs = [(outputs, inputs), (outputs, None)]  # of a weight and its bias
        if device.type == "cpu":
            yield Workload(
                "outer norms", size, "outer_norms", (pairs, 1e32), {},
                lambda b=outputs, a=inputs: b.norm(dim=1) * a.norm(dim=1),  # type: ignore[misc]
                2.0 * (outputs.numel() + inputs.numel()), 4 * (outputs.numel() + inputs.numel()), "float32",
            )  # fmt: skip
    for size, (rows, columns, n, tokens) in SEQUENCES[device.type].items():
        outputs, inputs, bound = draw(n, tokens, rows), draw(n, tokens, columns), draw(rows, columns).abs()
        bound *= math.sqrt(tokens)

        def product(b: Tensor = outputs, a: Tensor = inputs) -> Tensor:
            return b.flatten(0, 1).T @ a.flatten(0, 1)

        yield from _of_products("products", size, (outputs, inputs), bound, product, tokens)
        if device.type == "cuda":  # nothing else multiplies them faster
            yield from _of_halves(size, outputs, inputs, bound, product)
    for size, (out, channels, k, stride, side, n) in CONVOLUTIONS[device.type].items():
        way = Geometry(torch.Size((out, channels, k, k)), (stride, stride), (k // 2, k // 2), (1, 1), 1)
        places = (side + 2 * (k // 2) - k) // stride + 1
        outputs, inputs, bound = draw(n, out, places, places), draw(n, channels, side, side), draw(*way.weight).abs()
        bound *= places

        def gradient(b: Tensor = outputs, a: Tensor = inputs, way: Geometry = way) -> Tensor:
            return way.weight_gradient(a, b)

        yield from _of_products("convolution", size, (outputs, inputs, way), bound, gradient, places**2)
    for size, shape in DENSE[device.type].items():
        gradients, bound = draw(*shape), draw(shape[1]).abs()

        def total(gradients: Tensor = gradients) -> Tensor:
            return gradients.sum(0)

        yield from _of_products("dense", size, (gradients,), bound, total, 1)
    for size, shape in ROWS[device.type].items():
        tensor, weights = draw(*shape), draw(shape[0])
        weights[::3] = 0.0

        def norms(tensor: Tensor = tensor) -> Tensor:
            return torch.linalg.vector_norm(tensor, dim=1)

        def times(tensor: Tensor = tensor, weights: Tensor = weights) -> Tensor:
            return tensor * weights.unsqueeze(1)

        read = 4 * tensor.numel()
        yield Workload("row norms", size, "row_norms", (tensor,), {}, norms, 2.0 * tensor.numel(), read, "float32")
        moved = 2 * read - read * len(weights[::3]) // len(weights)  # what has no weight need not be read
        for function in ("weighted", "kept"):
            yield Workload(
                function, size, function, (tensor, weights), {}, times, 1.0 * tensor.numel(), moved, "float32"
            )


def _of_products(
    kind: str, size: str, factors: tuple[Any, ...], bound: Tensor, ordinary: Callable[[], Tensor], places: int
) -> Iterator[Workload]:
    operations = 2.0 * len(factors[0]) * places * bound.numel()
    moved = 4 * sum(factor.numel() for factor in factors if isinstance(factor, Tensor))
    weight = 4 * bound.numel()
    for moments in (False, True):
        yield Workload(f"{kind} clamped" + moments * " + moments", size, f"{kind}_clamped", (*factors, bound),
                   {"moments": moments}, ordinary, operations, moved + (2 + moments) * weight, "matrix")  # fmt: skip
    for scale in (None, bound):
        read = 0 if scale is None else weight
        yield Workload(f"{kind} norms" + (scale is not None) * " scaled", size, f"{kind}_norms", factors,
                   {"scale": scale}, ordinary, operations, moved + read, "matrix")  # fmt: skip


def _of_halves(
    size: str, outputs: Tensor, inputs: Tensor, bound: Tensor, ordinary: Callable[[], Tensor]
) -> Iterator[Workload]:
    lengths = [reference.row_norms(factor.flatten(1)) for factor in (outputs, inputs)]
    yield Workload("halves", size, "halves", (outputs, lengths[0]), {}, lambda: outputs.half(), 2.0 * outputs.numel(),
               6 * outputs.numel(), "float32")  # fmt: skip
    factors = [kernel("halves", outputs)(*pair) for pair in zip((outputs, inputs), lengths, strict=True)]
    operations = 2.0 * outputs.numel() * inputs.shape[2]
    moved, weight = 2 * (outputs.numel() + inputs.numel()), 4 * bound.numel()
    keep = torch.ones(len(outputs), dtype=torch.bool, device=outputs.device)
    for scale in (None, bound):
        yield Workload("halves bounds" + (scale is not None) * " scaled", size, "halves_bounds", (*factors, 1e-4),
                   {"scale": scale}, ordinary, operations, moved + (scale is not None) * weight, "half")  # fmt: skip
    yield Workload("halves sum", size, "halves_sum", (*factors, keep.double(), keep), {}, ordinary, operations,
               moved + weight, "half")  # fmt: skip
    for moments in (False, True):
        yield Workload("halves clamped" + moments * " + moments", size, "halves_clamped", (*factors, 1.0, keep, bound),
                   {"moments": moments}, ordinary, operations, moved + (2 + moments) * weight, "half")  # fmt: skip


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call. On CUDA calls are recorded and replayed as one graph, so that launches are not counted."""
    if device.type != "cuda":
        return statistics.median(clock.milliseconds({"": call}, 30, limit=1.0)[""])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        once = _elapsed(call)
        repeated = min(20, max(1, int(5 / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeated):
                call()
        graph.replay()
        return statistics.median(_elapsed(graph.replay) / repeated for _ in range(10))


def _elapsed(call: Callable[[], Any]) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def measured_rates(device: torch.device) -> dict[str, float]:
    """Bytes copied (read and written) and operations of large products, in a second."""
    cuda = device.type == "cuda"
    here = torch.randn(2**28 if cuda else 2**25, device=device)
    there = torch.empty_like(here)
    rates = {"copy": 2 * 4 * here.numel() / milliseconds(lambda: there.copy_(here), device) * 1e3}
    side = 8192 if cuda else 2048
    one, other = (torch.randn(side, side, device=device) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    for name, precision in (("matrix", before), ("float32", "highest")):
        torch.set_float32_matmul_precision(precision)
        rates[name] = 2.0 * side**3 / milliseconds(lambda: one @ other, device) * 1e3
    torch.set_float32_matmul_precision(before)
    if cuda:
        halves = one.half(), other.half()
        rates["half"] = 2.0 * side**3 / milliseconds(lambda: halves[0] @ halves[1], device) * 1e3
    return rates


def checked(work: Workload, function: Callable[..., Any], exact: list[Tensor]) -> tuple[float, bool]:
    """The largest relative error, and whether a second call gave the same bits. What is not written shows as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        found, again = work.call(function), work.call(function)
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = zip(found, exact, strict=True)
    worst = max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)
    return worst, all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def measure(work: Workload, rates: dict[str, float], device: torch.device) -> Iterator[dict[str, Any]]:
    plain = getattr(reference, work.function)
    chosen = kernel(work.function, _tensor_in(work.arguments))
    exact = work.call(plain, exact=True)
    backends: dict[str, Callable[[], Any]] = {"torch": work.ordinary, "reference": lambda: work.call(plain)}
    if chosen is not plain:
        backends["triton" if device.type == "cuda" else "numba"] = lambda: work.call(chosen)
    for backend, call in backends.items():
        row: dict[str, Any] = {"kernel": work.name, "size": work.size, "backend": backend}
        row["floor_ms"] = work.floor(rates)
        try:
            if backend != "torch":
                row["error"], row["same"] = checked(work, plain if backend == "reference" else chosen, exact)
            row["ms"] = milliseconds(call, device)
            row["ratio"] = row["ms"] / row["floor_ms"]
        except Exception as error:  # one kernel that fails is one row; the others go on
            row["failed"] = said(error)
            if device.type == "cuda":
                torch.cuda.synchronize()
        yield row


def _tensor_in(argument: Any) -> Tensor:
    """By whose device and dtype a kernel is chosen."""
    if isinstance(argument, reference.Float16Factor):
        return argument.unit
    return argument if isinstance(argument, Tensor) else _tensor_in(argument[0])


def tuned(work: Workload, device: torch.device) -> Iterator[tuple[float, str]]:
    """The time of every choice of tiles, and what it was."""
    from adadp.gradients.kernels import triton_outer, triton_products, triton_rows

    if work.function == "outer_clamped":
        for rows, columns, warps in (
            (64, 64, 4), (64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 128, 4), (64, 128, 4), (64, 128, 8), (128, 32, 4),
            (32, 32, 4), (32, 32, 2), (128, 64, 8), (256, 16, 4), (128, 16, 4), (16, 128, 4),
        ):  # fmt: skip
            function = partial(triton_outer.outer_clamped, blocks=triton_outer.OuterBlocks(rows, columns, warps))
            yield _tried(partial(work.call, function), str((rows, columns, warps)), device)
        return
    if work.function.startswith("products"):
        for megabytes in (8, 12, 16, 20, 24, 28, 32, 40, 64):
            function = partial(getattr(triton_rows, work.function), room=megabytes * 2**20)
            yield _tried(partial(work.call, function), f"{megabytes} MiB of products at a time", device)
        return
    if not work.function.startswith("convolution"):
        return
    outputs, inputs, way = work.arguments[:3]
    for padded in (False, True):  # first, which is timed as well
        for sizes in (
            (128, 64, 32, 8, 4), (128, 64, 32, 8, 3), (128, 64, 32, 8, 5), (128, 64, 64, 8, 3), (128, 64, 32, 4, 3),
            (128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (256, 64, 32, 8, 3), (256, 64, 32, 8, 4), (128, 32, 32, 8, 4),
            (64, 64, 32, 8, 4), (64, 64, 32, 8, 3), (64, 64, 64, 8, 3), (64, 64, 32, 4, 4), (64, 128, 32, 8, 3),
            (64, 128, 32, 8, 4), (64, 256, 32, 8, 3), (64, 32, 32, 4, 4), (32, 128, 32, 4, 3), (32, 64, 32, 4, 3),
            (16, 128, 32, 4, 3), (16, 64, 32, 4, 3), (16, 32, 32, 4, 4),
        ):  # fmt: skip
            blocks = triton_products.TileBlocks(*sizes)
            if blocks.rows >= 2 * max(16, outputs.shape[1]):
                continue

            def call(blocks: triton_products.TileBlocks = blocks, padded: bool = padded) -> Any:
                a, to = (F.pad(inputs, [way.padding[0]] * 4), replace(way, padding=(0, 0))) if padded else (inputs, way)
                operands = triton_products.convolution_operands(outputs, a, to)
                if work.function.endswith("norms"):
                    return triton_products.norms([operands], work.options["scale"], "tf32", blocks)
                return triton_products.clamped(operands, work.arguments[-1], work.options["moments"], "tf32", blocks)

            yield _tried(call, f"{tuple(blocks)}{' padded' if padded else ''}", device)


def _tried(call: Callable[[], Any], name: str, device: torch.device) -> tuple[float, str]:
    try:
        return milliseconds(call, device), name
    except Exception as error:  # tiles that do not fit
        return math.inf, f"{name}: {said(error)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="'norms wrn -scaled': with the first two words, not the third")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    device = device_for(options.device)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with settings(device, options.threads), torch.no_grad():
        rates = measured_rates(device)
        print(f"copy {rates['copy'] / 1e12:.3f} TB/s, products {rates['matrix'] / 1e12:.2f} TFLOP/s, "
              f"in float32 {rates['float32'] / 1e12:.2f}\n")  # fmt: skip
        print(f"{'kernel':30} {'size':38} {'backend':10} {'ms':>9} {'floor':>9} {'ratio':>7} {'error':>9}  same")
        for work in works(device):
            if not wanted(f"{work.name} {work.size}", options.only):
                continue
            if options.tune:
                print(f"{work.name:30} {work.size:38} floor {work.floor(rates):.4f}")
                for ms, name in sorted(tuned(work, device))[:6]:
                    print(f"    {ms:9.4f}  {name}", flush=True)
                continue
            for row in measure(work, rates, device):
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        if options.only and options.json.exists():
            known = {_key(row) for row in rows}
            rows = [row for row in json.loads(options.json.read_text())["rows"] if _key(row) not in known] + rows
        found = {"rows": rows, "rates": rates, "versions": versions(device)}
        write_json(options.json, found)


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["kernel"], row["size"], row["backend"]


def wanted(name: str, words: str) -> bool:
    return all((word.removeprefix("-") in name) != word.startswith("-") for word in words.split())


def line(row: dict[str, Any]) -> str:
    start = f"{row['kernel']:30} {row['size']:38} {row['backend']:10} "
    if "failed" in row:
        return start + row["failed"]
    checks = f" {row['error']:9.1e}  {'yes' if row['same'] else 'NO'}" if "error" in row else ""
    if not row.get("error", 0.0) < WRONG:
        checks += "  WRONG"
    return start + f"{row['ms']:9.4f} {row['floor_ms']:9.4f} {row['ratio']:7.2f}" + checks


if __name__ == "__main__":
    main()
