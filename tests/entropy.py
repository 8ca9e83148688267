"""The system's random bytes, made the same in each run of a test, so that it passes always or never.

What is drawn without a seed follows here from the test's name and a number (`--draws`): other numbers try other lots
and other noise, and a failure comes back with its number. Fixtures that several tests share have draws of their own,
whichever test is the first to use them. A forked process has the system's own random bytes, as two of them must not
draw alike; one that a test starts asks for a key (`key`) and draws from it (`use`).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_system = os.urandom


class _Source:
    """Bytes that follow from a name, in the process that made it."""

    def __init__(self, name: str) -> None:
        self._name, self._process, self._drawn = name, os.getpid(), 0

    def __call__(self, count: int) -> bytes:
        if os.getpid() != self._process:
            return _system(count)
        self._drawn += 1
        return hashlib.shake_256(f"{self._name} {self._drawn}".encode()).digest(count)


def use(name: str) -> None:
    """From now on, draw what follows from `name`; PyTorch's, NumPy's and Python's own generators start from it too."""
    # `random` took its own reference, which `secrets` and `SystemRandom` use.
    os.urandom = random._urandom = _Source(name)  # type: ignore[attr-defined]
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def key() -> str:
    """A name for the draws of a process that is about to be started."""
    return os.urandom(16).hex()


@contextmanager
def aside(name: str) -> Iterator[None]:
    """Within, as `use`; afterwards all goes on where it stood."""
    before = os.urandom, random.getstate(), np.random.get_state(), torch.get_rng_state()
    use(name)
    try:
        yield
    finally:
        os.urandom = random._urandom = before[0]  # type: ignore[attr-defined]
        random.setstate(before[1])
        np.random.set_state(before[2])
        torch.set_rng_state(before[3])
