"""The processes that train one model together, and all that they send each other.

`Group` is a process alone: it sends nothing. `Processes` is what torch.distributed started. Everything else in adadp
asks a `Group` and need not know which of the two it is.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adadp.distributed.share import Share
from adadp.distributed.wrapped import wrapper_of
from adadp.errors import ConfigurationError, DistributedError, PrivacyError

_Value = TypeVar("_Value")


class Group:
    """This process alone."""

    rank, size = 0, 1
    alone = True

    @property
    def share(self) -> Share:
        """The part of each lot that this process works on."""
        return Share(self.rank, self.size)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the ledger."""
        return self.rank == 0

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """The row of 64-bit numbers that each process gives, in the order of their ranks. The one small collective."""
        return [list(row)]

    def objects(self, value: Any) -> list[Any]:
        """The value that each process gives, in the order of their ranks; pickled on the way."""
        return [value]

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each entry summed over all processes, in float32 or better, the same to the last bit in each of them."""
        return dict(sums)

    def totals_of_same(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `totals`, where it is not known whether all processes have the same entries: raises if they do not."""
        looks = number_of([(name, tuple(value.shape), value.dtype) for name, value in sums.items()])
        if len({row[0] for row in self.rows([looks])}) > 1:
            raise DistributedError(
                "the processes have different statistics of the same lot, which cannot be added up: a part of the "
                "model ran in some of them only"
            )
        return self.totals(sums)

    def from_first(self, make: Callable[[], _Value]) -> _Value:
        """What `make` returns in process 0, in every process; where it raises there, all raise."""
        return make()

    def copy_first(self, values: Sequence[Tensor]) -> None:
        """Overwrite `values` in every process by those of process 0, as DistributedDataParallel does with weights."""


class Processes(Group):
    """All processes of a torch.distributed process group.

    Numbers and objects go through a gloo group of their own: they are on the host, and collectives of the user's own,
    or on a GPU, cannot get between them.

    torch alone keeps the groups. They end with `destroy_process_group()`, and gloo's threads with them: one that is
    left when Python exits may abort the process.
    """

    alone = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._all = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        with answering("begin"):
            host = dist.new_group(ranks, _timeout_of(group), backend="gloo", use_local_synchronization=True)
        self._on_host = weakref.ref(host)

    @property
    def _group(self) -> dist.ProcessGroup:
        return _there(self._all())

    @property
    def _host(self) -> dist.ProcessGroup:
        return _there(self._on_host())

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        given = torch.tensor(list(row), dtype=torch.int64)
        found = [torch.empty_like(given) for _ in range(self.size)]
        with answering("agree on a lot"):
            dist.all_gather(found, given, group=self._host)
        return [each.tolist() for each in found]

    def objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with answering("compare what they were given"):
            dist.all_gather_object(found, value, group=self._host)
        return found

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in sums.items():
            # A bfloat16 sum moves in steps as large as many examples' bounds.
            kinds.setdefault((torch.promote_types(value.dtype, torch.float32), value.device), []).append(name)
        found: dict[str, Tensor] = {}
        for (dtype, device), names in kinds.items():
            values = [sums[name] for name in names]
            flat = torch.cat([value.reshape(-1).to(dtype) for value in values])
            with answering("add up a lot"):
                dist.all_reduce(flat, group=self._host if device.type == "cpu" else self._group)
            parts = torch.split(flat, [value.numel() for value in values])
            found |= {name: part.view(sums[name].shape) for name, part in zip(names, parts, strict=True)}
        return {name: found[name] for name in sums}

    def from_first(self, make: Callable[[], _Value]) -> _Value:
        made, error = None, None
        if self.first:
            try:
                made = make()
            except Exception as raised:
                error = raised
        sent = [(made if error is None else None, None if error is None else (type(error), str(error)))]
        with answering("learn what process 0 decided"):
            dist.broadcast_object_list(sent, dist.get_global_rank(self._group, 0), group=self._host)
        if error is not None:
            raise error
        if sent[0][1] is not None:
            kind, text = sent[0][1]
            told = (kind if issubclass(kind, PrivacyError) else DistributedError)(f"in process 0: {text}")
            told.told = True
            raise told
        value: Any = sent[0][0]
        return made if self.first else value  # type: ignore[return-value]

    def copy_first(self, values: Sequence[Tensor]) -> None:
        looks = number_of([(tuple(value.shape), str(value.dtype)) for value in values])
        if len({row[0] for row in self.rows([looks])}) > 1:
            raise ConfigurationError("the processes have different models: their parameters have other shapes or types")
        source = dist.get_global_rank(self._group, 0)
        for value in values:
            raw = value.detach().contiguous()
            with answering("copy the weights of process 0"):
                group = self._host if raw.device.type == "cpu" else self._group
                dist.broadcast(raw.view(-1).view(torch.uint8), source, group=group)
            value.detach().copy_(raw)


def _there(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise DistributedError("the process group was destroyed: what was made private in it cannot go on")
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the processes of a group wait for one another; None (torch's own default) where torch does not say."""
    for device in group._device_types:
        found = getattr(group._get_backend(device).options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def number_of(*parts: object) -> int:
    """A signed 64-bit hash of what `parts` look like in text."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little", signed=True)


@contextmanager
def answering(what: str) -> Iterator[None]:
    """Say in plain words that another process does not answer."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PrivacyError):
            raise
        raise DistributedError(
            f"the processes could not {what}: one of them ended, failed or stopped calling the loop alike "
            f"({str(error).splitlines()[0]}). Look for the first error among their messages. Nothing was released that "
            "is not in the ledger; start all of them again"
        ) from error


#: One host group for each, however many engines.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, Processes] = weakref.WeakKeyDictionary()


def group_of(module: nn.Module) -> Group:
    """The processes that train `module`: those of its DistributedDataParallel, or all that torch.distributed started.

    A collective call the first time: all processes make their models private at the same place.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                "this process was started by torchrun as one of several, and torch.distributed was not initialised: "
                "each would train and spend by itself. Call torch.distributed.init_process_group() before "
                "make_private"
            )
        return Group()
    wrapper = wrapper_of(module)
    return group_of_all() if wrapper is None else _group(wrapper.process_group)


def group_of_all() -> Group:
    """All processes that torch.distributed started. A collective call the first time."""
    return _group(dist.group.WORLD)


def _group(group: dist.ProcessGroup | None) -> Group:
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError("this process is no part of the group that trains the module")
    if dist.get_world_size(group) == 1:
        return Group()
    known = _GROUPS.get(group)
    if known is None:
        known = _GROUPS[group] = Processes(group)
    return known
