"""The random numbers of a trial: each run can get the same ones, and the user's generators are restored."""

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


#: Added to every seed: drawn for each process, so that no model's rare behaviour is missed in every process alike.
_OFFSET = secrets.randbelow(2**30)
_KEPT = [False]  # whether an enclosing block will restore the user's generators
#: Larger than the number of runs in a trial, so that no two trials share a seed.
_TRIALS_APART = 1000


@dataclass
class Draws:
    """Which generators were drawn from: `plain` are those of numpy and random, `tensors` those of torch."""

    plain: bool = False
    tensors: bool = False

    @property
    def any(self) -> bool:
        return self.plain or self.tensors

    def add(self, other: Draws) -> None:
        """Note what another run drew from too."""
        self.plain |= other.plain
        self.tensors |= other.tensors


def seed_of(trial: int, run: int) -> int:
    """The seed of one run of a trial. Each trial of a process has seeds of its own."""
    return trial * _TRIALS_APART + run


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the user's generators at the end. Blocks inside this one then need not: restoring is slow."""
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
    """Seed torch, numpy and random inside the block, and restore the user's generators after it.

    Yields:
        `Draws`, which says after the block which generators were drawn from in it.

    """
    seed += _OFFSET
    draws = Draws()
    with generators_kept():
        devices = range(torch.cuda.device_count()) if on_a_gpu() else range(0)
        # Not torch.manual_seed: before CUDA is initialized, that would seed it later, for the user.
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
    """The first numbers of random and numpy. Others come where they were drawn from; reading their states is slow."""
    return random.Random(seed).random(), float(np.random.RandomState(seed).random_sample())


def _tensor_states(devices: range) -> list[Tensor]:
    """States of torch's generators. The host keeps those of a GPU too, so reading them does not synchronize."""
    return [torch.default_generator.get_state(), *(torch.cuda.default_generators[d].get_state() for d in devices)]


def halves(count: int, trial: int) -> tuple[list[int], set[int]]:
    """Two random halves of range(count), unpredictable to a model, drawn from no global generator."""
    order = list(range(count))
    random.Random(seed_of(trial, 0) + _OFFSET).shuffle(order)
    return sorted(order[: count // 2]), set(order[count // 2 :])


def redraws(draws: Draws, own: bool = False) -> int:
    """With how many more seeds to compare.

    Dropout draws from torch. What is drawn from numpy, random or a module's `own` generators often decides whether
    examples are mixed at all (mixup with probability p), and needs more draws to be met.
    """
    return 24 if draws.plain or own else 4 if draws.tensors else 0
