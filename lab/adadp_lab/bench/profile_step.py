"""Where a step's time goes: the kernels of a GPU, or the operations of a CPU, that take most of it.

    python -m adadp_lab.bench.profile_step [--device auto] [--steps transformer:flat,mlp:flat] [--rows 24]

Models, lots and clippings are those of `adadp bench`; steps are ordinary ones, without a refresh. On a GPU the total is
what it computes, whatever it waits for.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch._C._autograd import DeviceType

from adadp_lab.bench.machine import device_for, settings
from adadp_lab.bench.methods import METHODS, BenchTask
from adadp_lab.bench.models import SIZES, build

TURNS = 2


def profile(model: str, clipping: str, device: torch.device, rows: int) -> None:
    method = "sgd" if clipping == "none" else "adadp"
    step = METHODS[method].make(BenchTask(*build(model, SIZES[device.type][model], 0, device), clipping, None)).run
    for _ in range(4):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(TURNS):
            step()
        if cuda:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    spent = [
        (_spent(event, cuda) / TURNS / 1e3, event.count / TURNS, event.key)
        for event in found.key_averages()
        if event.device_type == wanted
    ]
    name = "CUDA" if cuda else "CPU"
    print(f"===== {model} {clipping} total {name} ms/step {sum(ms for ms, _, _ in spent):.2f}")
    for ms, count, key in sorted(spent, reverse=True)[:rows]:
        print(f"{ms:8.3f} ms {count:7.0f}x  {key[:110]}")


def _spent(event: Any, cuda: bool) -> float:
    return float(event.self_device_time_total if cuda else event.self_cpu_time_total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="transformer:none,transformer:flat,transformer:local,mlp:none,mlp:flat")
    parser.add_argument("--rows", type=int, default=24)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = device_for(options.device)
    with settings(device, options.threads):
        for pair in options.steps.split(","):
            model, clipping = pair.split(":")
            profile(model, clipping, device, options.rows)


if __name__ == "__main__":
    main()
