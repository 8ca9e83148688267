"""How steps are measured: in turn, round after round, in one process. Time by the clock, memory at its highest."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

Key = TypeVar("Key")


def milliseconds(
    steps: Mapping[Key, Callable[[], None]],
    rounds: int,
    device: str = "cpu",
    *,
    warm: int = 3,
    limit: float = 1e9,
    now: Callable[[], float] | None = None,
) -> dict[Key, list[float]]:
    """What each step takes, in milliseconds: one of each in turn, `rounds` times, after `warm` that do not count.

    Fewer rounds, but at least 5 (or `rounds`), where they would take more than `limit` seconds. `now` is a clock in
    seconds: the wall's, or with `time.process_time` that of this process's own work, whoever else uses the machine.
    """
    now = now or time.perf_counter
    times: dict[Key, list[float]] = {key: [] for key in steps}
    begun = now()
    for turn in range(-warm, rounds):
        if turn == 0:
            begun = now()
        if turn >= 5 and now() - begun > limit:
            break
        for key, step in steps.items():
            wait(device)
            started = now()
            step()
            wait(device)
            if turn >= 0:
                times[key].append(1e3 * (now() - started))
    return times


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_mib(step: Callable[[], None], clear: Callable[[], None], device: str) -> float:
    """MiB of tensors at the step's highest, above what is held before it when gradients of the last are given back.

    Else whoever leaves most behind for the next step would seem to need least.
    """
    if device.startswith("cuda"):
        clear()
        wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        wait(device)
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    # Every allocation and release of a tensor, as the profiler saw them: the most that was held at once in the second
    # of two steps. It knows what the first one left behind, so that releasing it counts.
    with _silent(), torch.profiler.profile(activities=[_CPU], profile_memory=True) as profiled:
        step()
        clear()
        with torch.profiler.record_function(_MARK):
            step()
    assert profiled.profiler is not None
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begun = next(event.start_ns() for event in events if event.name() == _MARK)
    held = before = highest = 0
    for event in events:
        if event.name() != "[memory]":
            continue
        held += event.nbytes()
        if event.start_ns() < begun:
            before = highest = held
        highest = max(highest, held)
    return (highest - before) / 2**20


_CPU, _MARK = torch.profiler.ProfilerActivity.CPU, "adadp: the step that is measured"


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler writes what it does to the process's stderr, whatever Python's is."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def release() -> None:
    """Give back what nothing refers to any more, to the device as well."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
