"""What a private step of several processes costs beside plain DistributedDataParallel: time, bytes and collectives.

    python -m adadp_lab.bench.distributed                                    # gloo, 1, 2 and 4 processes on this CPU
    python -m adadp_lab.bench.distributed --backend nccl                     # one process on a GPU
    torchrun --nproc-per-node 8 -m adadp_lab.bench.distributed --backend nccl

Each process has the same expected number of examples, however many there are. Plain and private steps take turns in the
same processes, so that both meet the same load of the machine.

One process sends nothing: the engine takes it for one alone. There, four more steps are measured:

| | |
| --- | --- |
| `bare` | a plain step without DistributedDataParallel |
| `agreeing` | a private step that agrees on its lot and reduces its sums over the group of one, as several do |
| `stepped`, `replayed` | a `TrainingStep` of several processes, and of one alone, which a GPU replays |
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.distributed.group import Processes, group_of
from adadp.mechanism.replay import TrainingStep
from adadp_lab.bench import machine
from adadp_lab.report.records import write_json

OUT = {"gloo": Path("results/bench/distributed.json"), "nccl": Path("results/bench/distributed_nccl.json")}
PROCESSES = {"gloo": [1, 2, 4], "nccl": [1]}
ROUNDS, WARM_UP = 25, 12
_COUNTED = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list")


class Counter:
    """Bytes and calls of collectives, as each process gives them."""

    def __init__(self) -> None:
        self.bytes, self.calls = 0, 0

    def hook(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """DistributedDataParallel's own reduction, counted."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.bytes, self.calls = self.bytes + bucket.buffer().nbytes, self.calls + 1
        reduced: torch.futures.Future[Tensor] = allreduce_hook(None, bucket)  # type: ignore[arg-type]
        return reduced

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is called as torch.distributed.NAME."""
        kept = {name: getattr(dist, name) for name in _COUNTED}

        def counted(name: str) -> Callable[..., Any]:
            def call(first: Any, *args: Any, **kwargs: Any) -> Any:
                given = args[0] if name == "all_gather" else first
                self.bytes += given.nbytes if isinstance(given, Tensor) else 0
                self.calls += 1
                return kept[name](first, *args, **kwargs)

            return call

        for name in _COUNTED:
            setattr(dist, name, counted(name))
        try:
            yield
        finally:
            for name, call in kept.items():
                setattr(dist, name, call)


# DistributedDataParallel wants types here, and not their names.
Counter.hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


@dataclass(frozen=True)
class Size:
    """Of the model's two hidden layers, and the expected examples of a process."""

    width: int = 1000
    each: int = 64

    def model(self, device: torch.device) -> nn.Module:
        """The same weights at each call."""
        torch.manual_seed(0)
        layers = [nn.Linear(784, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 10)).to(device)


def _losses(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(inputs), targets, reduction="none")


def _plain(module: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """A step without privacy, always on the same batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        _losses(module, inputs, targets).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _private(module: nn.Module, data: TensorDataset, lot: int, *, recorded: bool = False) -> Callable[[], None]:
    """A step on one lot after another, or a `TrainingStep`."""
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        data_loader=DataLoader(data, batch_size=lot),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        pad_lots=recorded,
    )
    lots = chain.from_iterable(repeat(loader))
    whole = TrainingStep(optimizer, partial(_losses, module))

    def step() -> None:
        inputs, targets = next(lots)
        if recorded:
            whole(inputs, targets)
            return
        optimizer.zero_grad()
        optimizer.backward(_losses(module, inputs, targets))
        optimizer.step()

    return step


@contextmanager
def _as_several() -> Iterator[None]:
    """Within, a group of one process does all that several do."""
    group = _group_of_one()
    with mock.patch("adadp.distributed.together.group_of", return_value=group):
        yield


def _group_of_one() -> Processes:
    world = dist.group.WORLD
    assert world is not None
    return Processes(world)


def _steps(rank: int, size: int, of: Size, device: torch.device, hook: Any) -> dict[str, Callable[[], Any]]:
    """What is measured, by name; `hook` counts what DistributedDataParallel sends."""
    lot = of.each * size
    torch.manual_seed(1)  # all processes have the same data
    inputs, targets = torch.randn(40 * lot, 784, device=device), torch.randint(0, 10, (40 * lot,), device=device)
    data, own = TensorDataset(inputs, targets), slice(rank * of.each, (rank + 1) * of.each)
    plain, private = (DistributedDataParallel(of.model(device)) for _ in range(2))
    plain.register_comm_hook(None, hook)
    group = group_of(private) if size > 1 else _group_of_one()
    steps = {
        "plain": _plain(plain, inputs[own], targets[own]),
        "private": _private(private, data, lot),
        "rows": lambda: group.rows([0] * 5),
    }
    if size == 1:
        steps["bare"] = _plain(of.model(device), inputs[own], targets[own])
        steps["replayed"] = _private(of.model(device), data, lot, recorded=True)
        with _as_several():
            steps["agreeing"] = _private(DistributedDataParallel(of.model(device)), data, lot)
            steps["stepped"] = _private(DistributedDataParallel(of.model(device)), data, lot, recorded=True)
    return steps


def measure(rank: int, size: int, backend: str, of: Size) -> dict[str, Any]:
    """Milliseconds, bytes and collectives of a step, plain and private, in one of `size` processes."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    counters = {"plain": Counter(), "private": Counter(), "agreeing": Counter()}
    steps = _steps(rank, size, of, device, counters["plain"].hook)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            counter = counters.get(name, Counter())
            counter.bytes = counter.calls = 0
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            with nullcontext() if name == "plain" else counter.counting():
                step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= WARM_UP:
                times[name].append(1000 * (time.perf_counter() - begun))
    counted = {name: counter for name, counter in counters.items() if name in steps}
    return {
        "processes": size, "backend": backend, "examples_each": of.each,
        "parameters": sum(p.numel() for p in of.model(torch.device("cpu")).parameters()),
        **{f"{name}_ms": round(statistics.median(found), 3) for name, found in times.items()},
        **{f"{name}_bytes": counter.bytes for name, counter in counted.items()},
        **{f"{name}_collectives": counter.calls for name, counter in counted.items()},
    }  # fmt: skip


def _one(rank: int, size: int, backend: str, of: Size, folder: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure(rank, size, backend, of)
    if rank == 0:
        write_json(Path(folder) / "row.json", found)
    dist.destroy_process_group()


def _row(size: int, backend: str, of: Size) -> dict[str, Any]:
    import json

    with tempfile.TemporaryDirectory() as folder:
        spawn(_one, (size, backend, of, folder), nprocs=size)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
    return found


def main() -> None:
    """Measure, print and keep a row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", choices=tuple(OUT))
    parser.add_argument("--processes", type=int, nargs="+", help="[1 2 4 with gloo, 1 with nccl]")
    parser.add_argument("--width", type=int, nargs="+", default=[Size.width], help="of the model's hidden layers")
    parser.add_argument("--each", type=int, default=Size.each, help="expected examples of a process")
    parser.add_argument("--out", type=Path, help="[results/bench/distributed.json, distributed_nccl.json]")
    given = parser.parse_args()
    sizes = [Size(width, given.each) for width in given.width]
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(given.backend)
        rows = [measure(dist.get_rank(), dist.get_world_size(), given.backend, of) for of in sizes]
        if dist.get_rank():
            return
    else:
        counts = given.processes or PROCESSES[given.backend]
        rows = [_row(count, given.backend, of) for of in sizes for count in counts]
    for row in rows:
        print(row)
    device = torch.device("cuda" if given.backend == "nccl" else "cpu")
    write_json(given.out or OUT[given.backend], {"rows": rows, "versions": machine.versions(device)})


if __name__ == "__main__":
    main()
