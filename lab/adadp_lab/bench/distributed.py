"""What a private step of several processes costs beside plain DistributedDataParallel: time, bytes and collectives.

    python -m adadp_lab.bench.distributed                                    # gloo, 1, 2 and 4 processes on this CPU
    python -m adadp_lab.bench.distributed --backend nccl --processes 1      # on a GPU
    torchrun --nproc-per-node 8 -m adadp_lab.bench.distributed --backend nccl

Each process has the same expected number of examples, however many there are. Plain and private steps take turns in the
same processes, so that both meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.distributed.group import group_of
from adadp_lab.bench import machine
from adadp_lab.report.records import write_json

OUT = Path("results/bench/distributed.json")
WIDTH, EACH, ROUNDS, WARM_UP = 1000, 64, 25, 5
_COUNTED = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


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


def measure(rank: int, size: int, backend: str) -> dict[str, Any]:
    """Milliseconds, bytes and collectives of a step, plain and private, in one of `size` processes."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    count = EACH * size
    inputs, targets = torch.randn(40 * count, 784, device=device), torch.randint(0, 10, (40 * count,), device=device)
    plain, private = (DistributedDataParallel(_model().to(device)) for _ in range(2))
    counters = {"plain": Counter(), "private": Counter()}
    plain.register_comm_hook(None, counters["plain"].hook)
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.01)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=private,
        optimizer=torch.optim.SGD(private.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=count),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    lots = chain.from_iterable(repeat(loader))
    own = inputs[rank * EACH :][:EACH], targets[rank * EACH :][:EACH]

    def plain_step() -> None:
        ordinary.zero_grad()
        loss = nn.functional.cross_entropy(plain(own[0]), own[1])
        loss.backward()  # type: ignore[no-untyped-call]
        ordinary.step()

    def private_step() -> None:
        batch, labels = next(lots)
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(module(batch), labels, reduction="none"))
        optimizer.step()

    times: dict[str, list[float]] = {"plain": [], "private": [], "rows": []}
    group = group_of(private)
    steps: dict[str, Callable[[], Any]] = {
        "plain": plain_step,
        "private": private_step,
        "rows": lambda: group.rows([0] * 5),
    }
    for turn in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            counter = counters.get(name, Counter())
            counter.bytes = counter.calls = 0
            dist.barrier()
            begun = time.perf_counter()
            if name == "private":
                with counter.counting():
                    step()
            else:
                step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= WARM_UP:
                times[name].append(1000 * (time.perf_counter() - begun))
    return {
        "processes": size, "backend": backend, "parameters": sum(p.numel() for p in plain.parameters()),
        "examples_each": EACH,
        **{f"{name}_ms": round(statistics.median(found), 3) for name, found in times.items()},
        **{f"{name}_bytes": counter.bytes for name, counter in counters.items()},
        **{f"{name}_collectives": counter.calls for name, counter in counters.items()},
    }  # fmt: skip


def _one(rank: int, size: int, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure(rank, size, backend)
    if rank == 0:
        write_json(Path(folder) / "row.json", found)
    dist.destroy_process_group()


def _row(size: int, backend: str) -> dict[str, Any]:
    import json

    with tempfile.TemporaryDirectory() as folder:
        spawn(_one, (size, backend, folder), nprocs=size)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
    return found


def main() -> None:
    """Measure, print and keep a row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(given.backend)
        rows = [measure(dist.get_rank(), dist.get_world_size(), given.backend)]
        if dist.get_rank():
            return
    else:
        rows = [_row(size, given.backend) for size in given.processes]
    for row in rows:
        print(row)
    device = torch.device("cuda" if given.backend == "nccl" else "cpu")
    write_json(given.out, {"rows": rows, "versions": machine.versions(device)})


if __name__ == "__main__":
    main()
