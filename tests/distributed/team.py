"""Several processes for a test: forked from one that has imported everything, so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import entropy
import torch
import torch.distributed as dist

#: Imported once, by the process that all others are forked from.
_PRELOADED = ["torch._dynamo", "dp_accounting", "adadp.engine", "adadp.testing", "distributed.work"]
TIMEOUT = 30  # seconds that a process waits for the others


@dataclass
class Answer:
    """What one process came to: a value, or an error."""

    value: Any = None
    error: str = ""  # the name of its class, and its text
    trace: str = ""


class Member:
    """One process of a team, and where it writes what it came to."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self._pipe = process, pipe

    def answer(self) -> Answer:
        """What it came to; an error where it died without a word."""
        try:
            waiting = self._pipe.poll(4 * TIMEOUT)
            found: Answer = pickle.loads(self._pipe.recv_bytes()) if waiting else Answer(error="no answer")
        except EOFError:
            found = Answer(error="died")
        self.process.join(TIMEOUT)
        return found


def start(size: int, folder: Path, work: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Member]:
    """Start `size` processes that do `work(rank, size, *args)` in one process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = folder / f"store-{os.urandom(4).hex()}"
    members = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        given = (there, entropy.key(), rank, size, str(store), timeout, work, args)
        process = context.Process(target=_one, args=given, daemon=True)
        process.start()
        there.close()
        members.append(Member(process, here))
    return members


def run(size: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Answer]:
    """As `start`, and wait for all of them."""
    return [member.answer() for member in start(size, folder, work, *args)]


def values(size: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run`, where no process may fail."""
    answers = run(size, folder, work, *args)
    for answer in answers:
        if answer.error:
            raise AssertionError("\n".join(f"{each.error}\n{each.trace}" for each in answers))
    return [answer.value for answer in answers]


def wait_for_releases(released: Path, more: int = 1, ended: Callable[[], bool] = lambda: False) -> None:
    """Until a process has left so many bytes more in a file, one for each release, however slow the machine is."""
    before, end = size_of(released), time.monotonic() + 2 * TIMEOUT
    while size_of(released) < before + more and not ended() and time.monotonic() < end:
        time.sleep(0.001)


def size_of(file: Path) -> int:
    """Its bytes; 0 where it is not there yet."""
    return file.stat().st_size if file.exists() else 0


def _one(
    pipe: Any,
    draws: str,
    rank: int,
    size: int,
    store: str,
    timeout: float,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    entropy.use(draws)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        answer = Answer(work(rank, size, *args))
    except BaseException as error:
        answer = Answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # by value: tensors in shared memory would die with this process
    pipe.close()
    os._exit(0)  # whatever the others do
