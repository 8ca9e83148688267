"""The loader that the training loop iterates over: the user's own, with batches drawn by lots.

A lot larger than memory comes as several batches, an empty lot as one row that is not counted. One batch is out at a
time (`adadp.sampling.lot`); batches that are fetched ahead wait in here.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from adadp.distributed.share import WHOLE, Share
from adadp.errors import ConfigurationError
from adadp.randomness import Randomness
from adadp.sampling.batches import filled_up
from adadp.sampling.lot import Lots, Microbatch, grouped_microbatches, microbatches
from adadp.sampling.schemes import Sampling, scheme
from adadp.sampling.units import Grouping


class PrivateLoader:
    """Hands out batches of lots that `sampling` draws. Made by `PrivacyEngine.make_private`.

    It has the wrapped loader's dataset, collate function, workers and pinned memory. `len()` is the number of lots
    in an epoch; the next iteration continues with the lot after the last one that was handed out. The first one of a
    run that is resumed is the rest of its epoch.

    Args:
        loader: the user's, checked by `check_loader`.
        sampling: which examples each lot holds.
        randomness: the run's. Lot k follows from it and k alone.
        max_physical_batch_size: the most examples in a batch; a larger lot comes as several.
        pad_lots: give every batch the same number of rows, which replaying a step on a GPU needs. Rows that are not
            counted are appended after collate.
        batch_first: whether the first dimension of a batch's tensors is the example (else the second may be).
        prefetch: copy the next batch to this device while the loop works on the current one.
        grouping: how drawn units become rows; None where each row is a unit.
        lots: the lots of the run, shared with its step and optimizer.
        share: the part of each lot that this process works on.

    Attributes:
        current: the microbatch that the loop holds; None before the first.
        whole_lots: hand out every lot as one batch. `TrainingStep` sets it and cuts lots itself.

    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampling: Sampling,
        randomness: Randomness,
        max_physical_batch_size: int | None,
        pad_lots: bool = False,
        *,
        batch_first: bool = True,
        prefetch: torch.device | str | None = None,
        grouping: Grouping | None = None,
        lots: Lots | None = None,
        share: Share = WHOLE,
    ) -> None:
        check_parts(max_physical_batch_size, prefetch)
        self.pad_lots, self.grouping, self.share = pad_lots, grouping, share
        if pad_lots and max_physical_batch_size is None:
            room = share.room(sampling.lot, sampling.capacity)
            max_physical_batch_size = room * (1 if grouping is None else grouping.most)
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self.sampling = sampling
        self.batch_size = sampling.lot
        self.max_physical_batch_size = max_physical_batch_size
        self.whole_lots = False
        self.lots = Lots() if lots is None else lots
        self.prefetch = None if prefetch is None else torch.device(prefetch)
        self.batch_first = batch_first
        self._randomness = randomness
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

    @property
    def current(self) -> Microbatch | None:
        """The microbatch that the loop holds."""
        return self.lots.current

    @property
    def stopped(self) -> bool:
        """Whether the budget is spent: nothing more is given out."""
        return self.lots.stopped

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a private loader is not copied or pickled: the copy would give out the same lots again. Make a new run."
        )

    def __len__(self) -> int:
        return len(self.sampling)

    def __iter__(self) -> Iterator[Any]:
        return _Iteration(self)

    # ---- one epoch --------------------------------------------------------------------------------------------------

    def _batches(self) -> tuple[deque[Microbatch], Iterator[Any]]:
        """The batches of an epoch from the next lot on, and the microbatch that each one is, in the same order."""
        # A plan of its own: an earlier iteration may have fetched batches ahead that it never handed out.
        plan = self._plan = deque()
        if self._in_memory:
            tensors = self.dataset.tensors  # type: ignore[attr-defined]
            # The batches that the loader would give, by indexing once instead of once for each example.
            chosen = map(torch.tensor, self._indices(plan))
            return plan, ([tensor[indices.to(tensor.device)] for tensor in tensors] for indices in chosen)
        return plan, iter(self._loader)

    @property
    def _in_memory(self) -> bool:
        plain = self._loader.collate_fn is default_collate and self._loader.num_workers == 0
        return type(self.dataset) is TensorDataset and plain and not self._loader.pin_memory

    def _indices(self, plan: deque[Microbatch]) -> Iterator[list[int]]:
        """The examples of each batch. Its microbatch is appended to `plan` when they are asked for."""
        first, size = self.lots.next, self.max_physical_batch_size
        made = first % len(self) if first == self.lots.first else 0  # of this epoch, by the run that is resumed

        def draw() -> Iterator[list[int]]:
            for number in range(first, first + len(self) - made):
                drawn = self.sampling.draw(number, self._randomness)
                most, lot = self.share.most(drawn), self.share.expected(self.sampling.lot)
                cut = None if self.whole_lots else size
                if self.grouping is None:
                    planned = size if self.pad_lots and size else min(lot, size or lot)
                    own = drawn[self.share.places(drawn)].tolist()
                    parts = microbatches(number, own, cut, planned, self.pad_lots, most)
                else:
                    groups = self._own_groups(self.grouping, drawn, number)
                    parts = grouped_microbatches(number, groups, cut, lot, self.pad_lots, self.grouping, most)
                for part in parts:
                    plan.append(part)
                    # An empty lot must be seen by the loop, too: one example that is not counted stands in for it.
                    yield list(part.indices) or [0]

        return draw()

    def _own_groups(self, grouping: Grouping, drawn: Tensor, number: int) -> list[list[int]]:
        """The rows of each unit of a lot that this process works on.

        They are drawn for the whole lot first: which of their rows some persons are trained on must not depend on how
        units are spread over processes, and so on who else is in the data.
        """
        groups = grouping.rows_of(drawn.tolist(), number, self._randomness)
        return [groups[place] for place in self.share.places(drawn).tolist()]

    def _filled(self, microbatch: Microbatch, batch: Any) -> Microbatch:
        """The microbatch with its batch: padded, and on the device that `prefetch` names."""
        given, rows = max(1, len(microbatch.indices)), microbatch.count
        if self.pad_lots and self.max_physical_batch_size:
            size = self.max_physical_batch_size
            rows = -(-given // size) * size
            batch = filled_up(batch, given, rows, self.batch_first)
        if self.prefetch is not None:
            device = self.prefetch

            def moved(part: Any) -> Any:
                return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part

            batch = batch.to(device) if hasattr(batch, "to") else tree_map(moved, batch)
        return replace(microbatch, count=rows, batch=batch)


def _kept(batch: Any) -> Any:
    """A shallow copy of the batch: the loop may take things out of the containers that it gets."""
    try:
        return copy.copy(batch) if not isinstance(batch, Tensor) else batch
    except Exception:
        return batch


class _Batches:
    """The batch sampler of the loader inside; it runs in the main process, ahead of the workers."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader._indices(self._loader._plan)

    def __len__(self) -> int:
        return len(self._loader)


class _Iteration:
    """One pass over the loader. It begins with the lot that is next when its first batch is asked for."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader
        self._started: tuple[deque[Microbatch], Iterator[Any]] | None = None
        self._ahead: deque[Microbatch] = deque()
        self._stream: Any = None
        if loader.prefetch is not None and loader.prefetch.type == "cuda":
            self._stream = torch.cuda.Stream(loader.prefetch)  # type: ignore[no-untyped-call]

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        lots = self._loader.lots
        if lots.stopped:
            raise StopIteration
        if self._started is not None and not lots.held_by(self):
            lots.refuse_second_iteration()
        lots.refuse_next(self)
        if self._started is None:
            self._started = self._loader._batches()
        microbatch = self._ahead.popleft() if self._ahead else self._fetch()
        if self._stream is not None:
            self._arrived(microbatch.batch)
        lots.hand_out(replace(microbatch, batch=_kept(microbatch.batch)), self)
        if self._loader.prefetch is not None and not self._ahead:
            self._prefetch()
        return microbatch.batch

    def _fetch(self) -> Microbatch:
        assert self._started is not None
        plan, batches = self._started
        batch = next(batches)
        microbatch = plan.popleft()
        if batch is None:
            raise ConfigurationError(
                "collate_fn returned None. Whether a lot is used must not depend on its examples: return a batch, and "
                "set unusable rows to finite values."
            )
        if self._stream is None:
            return self._loader._filled(microbatch, batch)
        with torch.cuda.stream(self._stream):
            return self._loader._filled(microbatch, batch)

    def _prefetch(self) -> None:
        """Fetch the next batch now, while the device works on earlier ones; the loop gets it when it asks."""
        try:
            self._ahead.append(self._fetch())
        except StopIteration:
            return

    def _arrived(self, batch: Any) -> None:
        """Have the loop's stream wait for the copy, and keep the memory until that stream is done with it."""
        device = self._loader.prefetch
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(self._stream)

        def keep(part: Any) -> Any:
            if isinstance(part, Tensor) and part.is_cuda:
                part.record_stream(stream)
            return part

        tree_map(keep, dict(batch) if hasattr(batch, "keys") else batch)


def check_parts(max_physical_batch_size: int | None, prefetch: torch.device | str | None) -> None:
    """Raise where lots cannot be handed out in such parts, or on such a device."""
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ConfigurationError(f"max_physical_batch_size must be at least 1, not {max_physical_batch_size}")
    if prefetch is not None:
        torch.device(prefetch)


def sampling_of(
    loader: DataLoader[Any], name: str, poisson_sampling: bool | None = None, grouping: Grouping | None = None
) -> Sampling:
    """The scheme called `name` over the dataset and lot of a user's loader; `poisson_sampling` is Opacus's name.

    With a `grouping`, its units are what is drawn, and the lot is how many of them are expected.
    """
    if poisson_sampling is not None:
        name = "poisson" if poisson_sampling else "shuffle"
    examples, lot = check_loader(loader)
    return scheme(name)(examples, lot) if grouping is None else grouping.sampling(name, examples, lot)


def check_loader(loader: DataLoader[Any]) -> tuple[int, int]:
    """The number of examples and the lot size of a user's loader.

    Raises:
        ConfigurationError: lots cannot be drawn from it; the message says why.

    """
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
            "data_loader has no batch_size (a custom batch_sampler, or batching is off): give it one. One that "
            "accelerate prepared is cut up already: give the ordinary one"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ConfigurationError(
            "data_loader draws with DistributedSampler, which repeats examples to make parts equally long: those would "
            "count twice. Leave the sampler out and give every process the same dataset: each works on its own part of "
            "every lot."
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ConfigurationError(
            f"data_loader draws with {type(loader.sampler).__name__}, which would be replaced: a guarantee needs lots "
            "drawn independently of the data. For a part of the dataset use torch.utils.data.Subset."
        )
    return len(loader.dataset), loader.batch_size
