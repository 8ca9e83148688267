"""The random numbers of a trial: the same in each run, and none of the user's."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def on_a_gpu() -> bool:
    """Whether this process has begun to work on a GPU."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


#: Added to every seed: what a model does with some probability only is met in some runs, whatever the probability.
_OFFSET = secrets.randbelow(2**30)
_KEPT = [False]  # whether the user's generators are put back by somebody outside already
#: Apart enough that the seeds of one trial are not those of the next.
_TRIALS_APART = 1000


@dataclass
class Draws:
    """Which generators were drawn from: `plain` are those of numpy and random, `tensors` those of torch."""

    plain: bool = False
    tensors: bool = False

    @property
    def any(self) -> bool:
        return self.plain or self.tensors


def seed_of(trial: int, run: int) -> int:
    """The seed of one run of a trial. Each trial of a process has seeds of its own."""
    return trial * _TRIALS_APART + run


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the user's generators back afterwards. The runs of a trial inside need not do so one by one."""
    if _KEPT[0]:
        yield
        return
    devices = range(torch.cuda.device_count()) if on_a_gpu() else range(0)
    plain, arrays = random.getstate(), np.random.get_state()
    _KEPT[0] = True
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        _KEPT[0] = False
        random.setstate(plain)
        np.random.set_state(arrays)


@contextmanager
def seeded(seed: int) -> Iterator[Draws]:
    """Seed torch, numpy and random inside; the user's generators are put back afterwards.

    The object that is given says, once the block was left, which generators were drawn from in it.
    """
    seed += _OFFSET
    draws = Draws()
    with generators_kept():
        devices = range(torch.cuda.device_count()) if on_a_gpu() else range(0)
        # Not torch.manual_seed: where CUDA has not begun, that would seed it for the user, later.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = _tensor_states(devices)
        yield draws
        draws.plain = (random.random(), np.random.random_sample()) != _first(seed)
        draws.tensors = not all(map(torch.equal, before, _tensor_states(devices)))


@functools.lru_cache(64)
def _first(seed: int) -> tuple[float, float]:
    """What random and numpy give first: something else comes where they were drawn from (reading states is slow)."""
    return random.Random(seed).random(), float(np.random.RandomState(seed).random_sample())


def _tensor_states(devices: range) -> list[Tensor]:
    """States of torch's generators. Those of a GPU are kept by the host too: nobody waits."""
    return [torch.default_generator.get_state(), *(torch.cuda.default_generators[d].get_state() for d in devices)]


def halves(count: int, trial: int) -> tuple[list[int], set[int]]:
    """Two halves of the numbers below `count`, drawn so that nobody knows them beforehand. No generator is used up."""
    order = list(range(count))
    random.Random(seed_of(trial, 0) + _OFFSET).shuffle(order)
    return sorted(order[: count // 2]), set(order[count // 2 :])


def redraws(draws: Draws, own: bool = False) -> int:
    """How many more draws are tried. Dropout is torch's: what numpy and random (or generators of a module's `own`)
    decide in a model is as a rule something else, and rarely met."""
    return 24 if draws.plain or own else 4 if draws.tensors else 0
