"""Where an ordinary step's time goes: on a GPU its kernels, on a CPU its operations, and on both the host's Python.

    python -m adadp_lab.bench.profile_step [--device auto] [--steps transformer:flat,mlp:flat] [--rows 25]

Models, lots and clippings are those of `adadp bench` ("none" is plain SGD). The steps have no refresh and no trial.
For each: its time by the clock, how much of it the host takes to launch it, what the GPU computes, and how often the
host calls the GPU; then the kernels, then the functions. Functions are measured in steps of their own, which take
longer, with the backward pass in the thread that calls it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from adadp_lab.bench.clock import release, wait
from adadp_lab.bench.machine import device_for, said, settings
from adadp_lab.bench.methods import METHODS, BenchTask
from adadp_lab.bench.models import SIZES, build
from adadp_lab.bench.real_models import refuse_missing

#: Steps before the first that counts: lots 0, 1 and 10 are tried.
WARM = 12
#: Steps of which the median is taken, and steps that are profiled.
TIMED, TURNS = 10, 3

Step = Callable[[], None]


def profile(model: str, clipping: str, device: torch.device, rows: int, functions: int) -> None:
    """Print it all. What cannot be run is one line."""
    try:
        step = _made(model, clipping, device)
    except Exception as error:  # the next one may be fine
        print(f"===== {model} {clipping}: {said(error)}", flush=True)
        return
    clock, host = _timed(step, device.type)
    found, total, calls = _kernels(step, device.type)
    print(f"===== {model} {clipping}: {clock:.2f} ms a step")
    if device.type == "cuda":
        launches = sum(count for name, count in calls if "Launch" in name)
        print(
            f"host {host:.2f} ms, GPU computes {total:.2f} ms, host / GPU {host / total:.2f}, launches {launches:.0f}"
        )
        print("calls a step: " + ", ".join(f"{name} {count:.0f}" for name, count in calls))
    for ms, count, key in found[:rows]:
        print(f"{ms:8.3f} ms {count:7.0f}x  {key[:110]}")
    if functions:
        _functions(step, device.type, functions)
    print(flush=True)


def _made(model: str, clipping: str, device: torch.device) -> Step:
    refuse_missing(model)
    method = METHODS["sgd" if clipping == "none" else "adadp"]
    step = method.make(BenchTask(*build(model, SIZES[device.type][model], 0, device), clipping, None)).run
    for _ in range(WARM):
        step()
    return step


def _timed(step: Step, kind: str) -> tuple[float, float]:
    """Milliseconds of a step, and those until the host has launched it."""
    whole, launched = [], []
    for _ in range(TIMED):
        wait(kind)
        begun = time.perf_counter()
        step()
        launched.append(1e3 * (time.perf_counter() - begun))
        wait(kind)
        whole.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(whole), statistics.median(launched)


def _kernels(step: Step, kind: str) -> tuple[list[tuple[float, float, str]], float, list[tuple[str, float]]]:
    """Kernels or operations by their milliseconds a step, their sum, and calls of the GPU's runtime by their number."""
    cuda = kind == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    wait(kind)
    with torch.profiler.profile(activities=kinds) as profiled:
        for _ in range(TURNS):
            step()
        wait(kind)
    events = profiled.key_averages()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    spent = [
        (_spent(event, cuda) / TURNS / 1e3, event.count / TURNS, event.key)
        for event in events
        if event.device_type == wanted
    ]
    calls = [
        (event.key, event.count / TURNS)
        for event in events
        if cuda and event.device_type == DeviceType.CPU and event.key.startswith(("cuda", "cu"))
    ]
    calls = sorted([call for call in calls if call[1] >= 1], key=lambda call: -call[1])
    return sorted(spent, reverse=True), sum(ms for ms, _, _ in spent), calls


def _spent(event: Any, cuda: bool) -> float:
    return float(event.self_device_time_total if cuda else event.self_cpu_time_total)


def _functions(step: Step, kind: str, most: int) -> None:
    profiled = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(TURNS):
            wait(kind)
            profiled.enable()
            step()
            profiled.disable()
    entries: dict[tuple[str, int, str], Any] = pstats.Stats(profiled).stats  # type: ignore[attr-defined]
    taken = sorted(((own, whole, calls, key) for key, (_, calls, own, whole, _) in entries.items()), reverse=True)
    total = 1e3 * sum(own for own, *_ in taken) / TURNS
    print(f"-- Python, {total:.2f} ms a step while profiled: own ms, ms with what it calls, calls")
    for own, whole, calls, (file, line, name) in taken[:most]:
        place = name if file == "~" else f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"
        print(f"{1e3 * own / TURNS:8.3f} {1e3 * whole / TURNS:8.3f} {calls / TURNS:7.0f}x  {place[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="transformer:none,transformer:flat,transformer:local,mlp:none,mlp:flat")
    parser.add_argument("--rows", type=int, default=25, help="Kernels or operations.")
    parser.add_argument("--functions", type=int, default=40, help="Functions of Python; 0 for none.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = device_for(options.device)
    with settings(device, options.threads):
        for pair in options.steps.split(","):
            model, _, clipping = pair.partition(":")
            profile(model, clipping or "flat", device, options.rows, options.functions)
            release()


if __name__ == "__main__":
    main()
