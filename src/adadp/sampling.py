"""Drawing lots: which examples a step sees, and the microbatches in which it sees them.

A sampling scheme is part of the proof: it says what the accountant may assume. The loader below hides the rest from the
user's loop: a lot larger than memory arrives as several batches, an empty lot as one placeholder that counts for
nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.errors import ConfigurationError
from adadp.noise import Randomness


class Sampling(ABC):
    """How lots of about `lot` of `examples` are drawn."""

    def __init__(self, examples: int, lot: int) -> None:
        if examples < 1:
            raise ConfigurationError("the dataset is empty: there is nothing to train on")
        if not 1 <= lot <= examples:
            raise ConfigurationError(
                f"the lot (the DataLoader's batch_size, {lot}) must be in 1..{examples}, the size of the dataset"
            )
        self.examples, self.lot = examples, lot

    name: str
    neighbours: Neighbours
    reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Lots in an epoch: as many as it takes for each example to be seen once on average."""
        return max(1, self.examples // self.lot)

    @property
    def capacity(self) -> int:
        """How many examples a lot has room for where all are given the same room. A larger one is cut, and complete."""
        return self.lot

    @abstractmethod
    def draw(self, randomness: Randomness) -> Iterator[torch.Tensor]:
        """The lots of one epoch, each a tensor of indices."""

    @abstractmethod
    def event(self, noise_multiplier: float) -> Event:
        """What one noised sum over a lot costs."""


class Poisson(Sampling):
    """Each example is in a lot with probability lot / examples, independently of all else."""

    name = "poisson"
    neighbours = Neighbours.ADD_REMOVE

    @property
    def rate(self) -> float:
        """The probability q."""
        return self.lot / self.examples

    @property
    def capacity(self) -> int:
        room = self.lot + 4 * math.sqrt(self.lot * (1 - self.rate))  # one lot in 30,000 is larger
        return min(self.examples, 8 * math.ceil(room / 8))

    def draw(self, randomness: Randomness) -> Iterator[torch.Tensor]:
        for _ in range(len(self)):
            yield _bernoulli_positions(self.examples, self.rate, randomness)

    def event(self, noise_multiplier: float) -> Event:
        return PoissonGaussian(noise_multiplier, self.rate)


def _bernoulli_positions(count: int, rate: float, randomness: Randomness) -> torch.Tensor:
    """Where `count` independent coins of probability `rate` show heads.

    The gaps between heads are geometric, so it takes about `rate * count` draws instead of `count`.
    """
    if rate == 1:
        return torch.arange(count)
    expected = count * rate
    enough = int(expected + 10 * math.sqrt(expected) + 20)  # too few is possible, and then more are drawn
    positions = torch.empty(0, dtype=torch.float64)
    last = -1.0
    while last < count:
        gaps = torch.floor(torch.log1p(-randomness.uniform(enough)) / math.log1p(-rate)) + 1
        new = last + gaps.cumsum(0)
        positions = torch.cat([positions, new])
        last = float(new[-1])
    return positions[positions < count].long()


class FixedSize(Sampling):
    """Lots of exactly `lot` examples, drawn without replacement, each lot independently of the others."""

    name = "fixed"
    neighbours = Neighbours.REPLACE_ONE

    def draw(self, randomness: Randomness) -> Iterator[torch.Tensor]:
        for _ in range(len(self)):
            yield randomness.permutation(self.examples)[: self.lot]

    def event(self, noise_multiplier: float) -> Event:
        return FixedSizeGaussian(noise_multiplier, self.examples, self.lot)


class Shuffle(Sampling):
    """The dataset in a random order, cut into lots. What most code does, and what no tight proof covers."""

    name = "shuffle"
    neighbours = Neighbours.ADD_REMOVE
    reasons = (
        "lots are cut from a shuffled dataset, so each example is seen exactly once an epoch: amplification by "
        "Poisson sampling does not apply to them",
    )

    def draw(self, randomness: Randomness) -> Iterator[torch.Tensor]:
        order = randomness.permutation(self.examples)
        for start in range(0, len(self) * self.lot, self.lot):
            yield order[start : start + self.lot]

    def event(self, noise_multiplier: float) -> Event:
        return Uncovered(self.reasons[0])  # not even a claim: Poisson's epsilon is not shuffling's


SAMPLINGS: dict[str, type[Sampling]] = {kind.name: kind for kind in (Poisson, FixedSize, Shuffle)}


@dataclass(frozen=True)
class Microbatch:
    """A part of a lot that fits in memory.

    It has `count` examples, of which the first `real` were drawn; the others fill it up and count for nothing (an empty
    lot comes as one such example). `planned` is how many such a part is planned for, a public number.
    """

    lot: int
    index: int
    last: bool
    count: int
    real: int | torch.Tensor  # a tensor where steps are replayed on a GPU: each lot writes its number there
    planned: int

    def keep(self, device: torch.device) -> torch.Tensor:
        """Which examples were drawn, [count] of bool."""
        if isinstance(self.real, int) and self.real == self.count:
            return torch.ones(self.count, dtype=torch.bool, device=device)
        return torch.arange(self.count, device=device) < self.real


class PrivateLoader:
    """Gives out a DataLoader's batches by lots drawn with `sampling`; made by the engine.

    It has the wrapped loader's dataset, collate function, workers and pinned memory. `len()` is the number of lots
    in an epoch. `current` says which microbatch the loop holds; it is None before the first.

    With `pad_lots` every batch has the same number of examples, which GPUs need to replay a step: a smaller one is
    filled up with examples that count for nothing, a lot that is larger comes as several.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampling: Sampling,
        randomness: Randomness,
        max_physical_batch_size: int | None,
        pad_lots: bool = False,
    ) -> None:
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ConfigurationError(f"max_physical_batch_size must be at least 1, not {max_physical_batch_size}")
        self.pad_lots = pad_lots
        if pad_lots and max_physical_batch_size is None:
            max_physical_batch_size = sampling.capacity
        self.dataset = loader.dataset
        self.sampling = sampling
        self.batch_size = sampling.lot
        self.max_physical_batch_size = max_physical_batch_size
        self.current: Microbatch | None = None
        self.on_microbatch: Callable[[Microbatch], None] | None = None
        self.stopped = False  # the budget is spent: nothing more is given out
        self._randomness = randomness
        self._lots = 0
        self._plan: deque[Microbatch] = deque()
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=_Batches(self),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=None,  # the workers' base seed: augmentation, not privacy
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __len__(self) -> int:
        return len(self.sampling)

    def __iter__(self) -> Iterator[Any]:
        if self.stopped:
            return
        # Each iteration has its own plan: what an earlier one had fetched ahead when the loop left it is not ours.
        plan = self._plan = deque()
        batches = self._whole_tensors() if self._in_memory else iter(self._loader)
        for batch in batches:
            self.announce(plan.popleft())
            yield batch
            if self.stopped:
                return

    def announce(self, microbatch: Microbatch) -> None:
        """Say which microbatch the loop holds from now on."""
        self.current = microbatch
        if self.on_microbatch is not None:
            self.on_microbatch(microbatch)

    @property
    def _in_memory(self) -> bool:
        plain = self._loader.collate_fn is default_collate and self._loader.num_workers == 0
        return type(self.dataset) is TensorDataset and plain and not self._loader.pin_memory

    def _whole_tensors(self) -> Iterator[list[torch.Tensor]]:
        """What the loader would give for tensors in memory, by one indexing instead of one for each example."""
        assert isinstance(self.dataset, TensorDataset)
        tensors = self.dataset.tensors
        chosen = map(torch.tensor, self.microbatches())
        return ([tensor[indices.to(tensor.device)] for tensor in tensors] for indices in chosen)

    def microbatches(self) -> Iterator[list[int]]:
        """The indices of each microbatch of an epoch; what it is is noted in the order in which they are given out."""
        return self._noted(self._plan)

    def _noted(self, plan: deque[Microbatch]) -> Iterator[list[int]]:
        for drawn in self.sampling.draw(self._randomness):
            number, self._lots = self._lots, self._lots + 1  # now: a loop that breaks off here does not come back
            indices = drawn.tolist()
            size = self.max_physical_batch_size or max(1, len(indices))
            lot = self.sampling.lot
            planned = size if self.pad_lots else min(lot, self.max_physical_batch_size or lot)
            pieces = [indices[start : start + size] for start in range(0, max(1, len(indices)), size)]
            for index, piece in enumerate(pieces):
                real = len(piece)
                # An empty lot is a batch too, so that the user's loop sees it: of one example that counts for nothing.
                piece += [0] * ((size if self.pad_lots else max(1, real)) - real)
                plan.append(Microbatch(number, index, index == len(pieces) - 1, len(piece), real, planned))
                yield piece


class _Batches:
    """The batch sampler of the loader inside; it runs in the main process, ahead of the workers."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.microbatches()

    def __len__(self) -> int:
        return len(self._loader)


def check_loader(loader: DataLoader[Any]) -> tuple[int, int]:
    """The number of examples and the lot size of a user's loader, or the reason why lots cannot be drawn from it."""
    if isinstance(loader, PrivateLoader):
        raise ConfigurationError("data_loader is private already: pass the ordinary DataLoader")
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"data_loader must be a torch DataLoader, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ConfigurationError(
            "data_loader reads an IterableDataset: lots are drawn by index, so a map-style dataset (with __len__ and "
            "__getitem__) is needed"
        )
    if loader.batch_size is None:
        raise ConfigurationError(
            "data_loader has no batch_size (a custom batch_sampler, or batching is off): give it one"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ConfigurationError(
            f"data_loader draws with {type(loader.sampler).__name__}, which would be replaced: a guarantee needs lots "
            "drawn independently of the data. For a part of the dataset use torch.utils.data.Subset."
        )
    return len(loader.dataset), loader.batch_size
