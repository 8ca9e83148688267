"""Step time and peak memory over plain SGD, for adadp's clippings and for each mode of Opacus, in one process.

    python benchmarks/step_time.py [--models mlp,alexnet,transformer] [--rounds 15] [--json FILE]

Machines are noisy, so what counts is the ratio: every method takes one timed step in turn, round after round, and the
table shows the median time over the median of plain SGD. Opacus is measured where it is installed (`make bench`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import MODELS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Diagonal, Ellipsoid, Flat, Kronecker, Local, PrivacyEngine, Probe
from adadp.clipping import Clipping
from adadp.sampling import Microbatch

Step = Callable[[], None]


def loss_of(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(inputs), targets)


def plain(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(module, inputs, targets).backward()
        optimizer.step()

    return step


def ours(clipping: Callable[[Callable[..., Any]], Clipping]) -> Callable[..., Step]:
    def make(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs))
        probe = _probe_like(inputs)
        module, optimizer, private = PrivacyEngine(seed=0).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1e-4),
            data_loader=loader,
            noise_multiplier=1.0,
            clipping=clipping(probe),
        )
        lots = iter(range(10**9))

        def step() -> None:
            private.current = Microbatch(next(lots), 0, last=True, count=len(inputs), keep=True, planned=len(inputs))
            private.on_microbatch(private.current)
            optimizer.zero_grad()
            loss_of(module, inputs, targets).backward()
            optimizer.step()

        return step

    return make


def _probe_like(inputs: torch.Tensor) -> Callable[..., Any]:
    def make(count: int, generator: torch.Generator) -> torch.Tensor:
        shape = (count, *inputs.shape[1:])
        if inputs.is_floating_point():
            return torch.randn(shape, generator=generator)
        return torch.randint(int(inputs.max()) + 1, shape, generator=generator)

    return make


def opacus(mode: str) -> Callable[..., Step]:
    def make(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
        from opacus import PrivacyEngine as Opacus

        loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs))
        made = Opacus().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1e-4),
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        module, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step() -> None:
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()

        return step

    return make


#: Shapes are refreshed from 256 probes every 50 steps; rounds of a multiple of 50 count a refresh in.
METHODS: dict[str, Callable[..., Step]] = {
    "sgd": plain,
    "adadp flat": ours(lambda _: Flat(1.0)),
    "adadp ellipsoid, row/column": ours(
        lambda probe: Ellipsoid(1.0, shape=Kronecker(rank=0), source=Probe(probe, count=64, batch=32))
    ),
    "adadp ellipsoid, diagonal": ours(
        lambda probe: Ellipsoid(1.0, shape=Diagonal(), source=Probe(probe, count=64, batch=32))
    ),
    "adadp ellipsoid, Kronecker": ours(
        lambda probe: Ellipsoid(1.0, shape=Kronecker(), source=Probe(probe, count=64, batch=32))
    ),
    "adadp local": ours(lambda _: Local(4.0)),
    "opacus hooks": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
    "opacus functorch": opacus("functorch"),
}


def peak_memory(step: Step, device: str) -> float:
    """MiB above what is held before the step, at its highest."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Every allocation and release of a tensor in the step, as the profiler saw them: the most that was held at once.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 2**20


def timed(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure(model: str, methods: list[str], rounds: int, device: str) -> list[dict[str, Any]]:
    steps: dict[str, Step] = {}
    for method in methods:
        torch.manual_seed(0)
        module, inputs, targets = MODELS[model](device)
        try:
            step = METHODS[method](module.to(device), inputs.to(device), targets.to(device))
            for _ in range(3):
                step()
            steps[method] = step
        except ImportError:
            print(f"{method}: not installed, left out")
        except Exception as error:  # a peer that cannot do this model is a result too
            print(f"{model}, {method}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            times[method].append(timed(step, device))
    base = statistics.median(times["sgd"])
    rows = []
    for method, step in steps.items():
        middle = statistics.median(times[method])
        rows.append(
            {
                "model": model,
                "method": method,
                "device": device,
                "ms": round(middle, 3),
                "ratio_to_sgd": round(middle / base, 3),
                "mean_ratio_to_sgd": round(statistics.mean(times[method]) / statistics.mean(times["sgd"]), 3),
                "peak_mib": round(peak_memory(step, device), 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,alexnet,transformer")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [method for method in METHODS if any(method.startswith(m.strip()) for m in options.methods.split(","))]
    if "sgd" not in chosen:
        chosen.insert(0, "sgd")
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        found = measure(model, chosen, options.rounds, options.device)
        rows += found
        print(f"\n{model} on {options.device}")
        print(f"{'method':30} {'ms':>9} {'over SGD':>9} {'peak MiB':>9}")
        for row in found:
            print(f"{row['method']:30} {row['ms']:9.2f} {row['ratio_to_sgd']:8.2f}x {row['peak_mib']:9.1f}")
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        try:
            import opacus as peer

            versions["opacus"] = peer.__version__
        except ImportError:
            pass
        if options.device == "cuda":
            versions["gpu"] = torch.cuda.get_device_name()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows, "versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
