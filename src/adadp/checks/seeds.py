"""The random numbers of a trial: the same in each run, and none of the user's."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def on_a_gpu() -> bool:
    """Whether this process has begun to work on a GPU."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


#: Added to every seed: what a model does with some probability only is met in some runs, whatever the probability.
_OFFSET = secrets.randbelow(2**30)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside; the user's generators are put back afterwards."""
    seed += _OFFSET
    devices = range(torch.cuda.device_count()) if on_a_gpu() else range(0)
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            # Not torch.manual_seed: where CUDA has not begun, that would seed it for the user, later.
            torch.default_generator.manual_seed(seed)
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
