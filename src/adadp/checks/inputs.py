"""What the loop gives to the model, compared with what the loader handed out and with what the model returned before.

A loop may move, slice, transpose or reshape the loader's tensors row by row. Anything else that it computes between the
loader and the model cannot be tried, and is noted in `untried`. Outputs of an earlier lot (hidden states that the loop
passes on, for instance) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from adadp.checks.containers import Arguments, Parts, dimension, take_apart
from adadp.checks.module_state import ModuleState
from adadp.errors import TrainingLoopError

_ATTRIBUTES = (
    "the loop puts tensors into the module between its calls: that they are not made of examples cannot be seen. What "
    "the module computes in its calls can be tried"
)
_INPUTS = (
    "the loop changes a batch before it gives it to the model: that it does so row by row, without the other examples, "
    "cannot be seen. In the dataset, the collate function or the module it can be tried"
)

_MOVED = (
    "the loop gives the model the rows of a batch in another order. Which rows belong together (unit=, augmentations=) "
    "and which are padding (pad_lots=) is told by their places: rows of one person or example would count several "
    "times. Keep the order of the batch"
)

#: How many different rows it takes to say that they are those of another tensor.
_TELLING = 4
#: What loops do to a tensor of the batch before they give it to a model.
_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t[:, :-1],
    lambda t: t[:, 1:],
    lambda t: t.transpose(0, 1),
)


class Part(Protocol):
    """The microbatch that the loader handed out last."""

    @property
    def lot(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def indices(self) -> Sequence[int]: ...
    @property
    def batch(self) -> Any: ...


def place_of(part: Part) -> tuple[int, int]:
    """The lot, and which microbatch of it."""
    return part.lot, getattr(part, "index", 0)


def matched(leaf: Any, batch: Parts) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """Which leaf of the batch an argument is, and what was done to it; None where it is none of them."""
    if not isinstance(leaf, Tensor):
        return None
    for change in _CHANGES:
        for place, other in enumerate(batch.leaves):
            if not isinstance(other, Tensor) or other.ndim < (1 if change is _CHANGES[0] else 2):
                continue
            changed = change(other)
            if changed.shape == leaf.shape and (leaf is other or torch.equal(_plain(leaf), _plain(changed))):
                return place, change
    return None


def _is_among(leaf: Tensor, dim: int, batch: Arguments) -> bool:
    """Whether an argument has the rows of a leaf of the batch, whatever the shape of a row and the dtype."""
    if matched(leaf, batch.parts) is not None:
        return True
    rows = _flat_rows(leaf, dim)
    for other, own in batch.pairs():
        if not isinstance(other, Tensor) or own is None or other.numel() != leaf.numel():
            continue
        given = _flat_rows(other, own)
        if given.shape == rows.shape and torch.equal(_plain(rows), _plain(given.to(rows.device, rows.dtype))):
            return True
    return False


def _is_moved(leaf: Tensor, dim: int, batch: Arguments) -> bool:
    """Whether an argument that is no leaf of the batch has the very rows of one, in other places."""
    rows = _distinct(_flat_rows(leaf, dim))
    if len(rows) < _TELLING or not (leaf.is_floating_point() or rows.shape[1] > 1):
        return False  # a few numbers may be those of another leaf by chance
    for other, own in batch.pairs():
        if isinstance(other, Tensor) and own is not None and other.numel() == leaf.numel():
            given = _distinct(_flat_rows(other, own).to(leaf.dtype))
            if given.shape == rows.shape and torch.equal(rows, given):
                return True
    return False


def _told_by_place(part: Part) -> bool:
    """Whether some rows are padding, or belong together."""
    return getattr(part, "segments", None) is not None or getattr(part, "real", part.count) != part.count


def _distinct(rows: Tensor) -> Tensor:
    found: Tensor = torch.unique(_plain(rows), dim=0)
    return found


def _flat_rows(leaf: Tensor, dim: int) -> Tensor:
    return leaf.detach().movedim(dim, 0).flatten(1) if leaf.ndim > 1 else leaf.detach().unsqueeze(1)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double().nan_to_num() if tensor.is_floating_point() else tensor


# ---- outputs of an earlier lot ---------------------------------------------------------------------------------------


class StaleOutputs:
    """The storages of what was returned, as long as they are alive, with the lot and microbatch of the call."""

    def __init__(self) -> None:
        # By the storage's address, which stays taken while the weak reference exists: lot and microbatch.
        self._lots: dict[int, tuple[StorageWeakRef, tuple[int, int]]] = {}

    def note(self, output: Any, lot: tuple[int, int]) -> None:
        """Remember what an outermost call returned."""
        for key, (reference, _) in list(self._lots.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self._lots[key]
        for leaf in _tensors(output):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._lots:
                self._lots[storage._cdata] = StorageWeakRef(storage), lot  # type: ignore[no-untyped-call]

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a returned tensor."""
        return tensor.untyped_storage()._cdata in self._lots

    def from_another(self, args: tuple[Any, ...], kwargs: dict[str, Any], lot: tuple[int, int]) -> bool:
        """Whether an argument shares memory with what was returned for an earlier lot, or microbatch of this lot."""
        if all(noted >= lot for _, noted in self._lots.values()):
            return False
        for given in (*args, *kwargs.values()):
            for leaf in _tensors(given):
                found = self._lots.get(leaf.untyped_storage()._cdata)
                if found is not None and found[1] < lot:
                    return True
        return False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        yield from (leaf for leaf in take_apart(value).leaves if isinstance(leaf, Tensor))


# ---- arguments and attributes ----------------------------------------------------------------------------------------


class InputWatch:
    """Compares a model's arguments with the loader's batch, and its attributes between lots; notes go to `untried`."""

    def __init__(self, module: nn.Module, dimensions: Sequence[int], untried: dict[str, str]) -> None:
        self._module, self._dimensions, self._untried = module, dimensions, untried
        self.stale = StaleOutputs()
        self._own_tensors = False  # whether the last compared call was given the batch's own tensors
        self._attributes: ModuleState | None = None  # of the module, after the first lot
        self._constants: dict[str, Any] = {}  # arguments without rows, by name: their first values

    def forget(self) -> None:
        """The next call decides anew whether the model is given the batch's own tensors."""
        self._own_tensors = False

    def compare(self, arguments: Arguments, part: Part) -> None:
        """Note arguments that were made of the batch in a way that cannot be tried; refuse rows that were moved."""
        batch = Arguments.read(part.batch, part.count, self._dimensions)
        if not batch.has_rows:
            return
        for (leaf, dim), name in zip(arguments.pairs(), arguments.parts.names, strict=True):
            if dim is None:
                self._compare_constant(leaf, name, part)
            elif isinstance(leaf, Tensor) and not self.stale.knows(leaf) and not _is_among(leaf, dim, batch):
                self._untried["inputs"] = _INPUTS
                if _told_by_place(part) and _is_moved(leaf, dim, batch):
                    raise TrainingLoopError(_MOVED)
        memory = _memory(batch.leaves)
        rows = [leaf for leaf, dim in arguments.pairs() if dim is not None]
        self._own_tensors = all(isinstance(leaf, Tensor) and _address(leaf) in memory for leaf in rows)

    def _compare_constant(self, leaf: Any, name: str, part: Part) -> None:
        """An argument without rows may still be computed from all of them: it must be the same for every lot."""
        rows_elsewhere = isinstance(leaf, Tensor) and leaf.is_floating_point() and part.count in leaf.shape
        if rows_elsewhere and not self.stale.knows(leaf):
            self._untried["inputs"] = _INPUTS
        if isinstance(leaf, Tensor):
            value: Any = leaf.detach().cpu() if leaf.is_floating_point() and leaf.numel() < 10**6 else None
        else:
            value = leaf if isinstance(leaf, float) else None
        if value is None:
            return
        if part.lot > 0 and name not in self._constants:  # the first lot had none: it was computed since
            self._untried["inputs"] = _INPUTS
        known = self._constants.setdefault(name, value)
        same = torch.equal(known, value) if isinstance(known, Tensor) and isinstance(value, Tensor) else known == value
        if not same:
            self._untried["inputs"] = _INPUTS

    def glance(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        """Between trials, without reading values: a model that was given the batch's own tensors still is."""
        if not self._own_tensors or "inputs" in self._untried:
            return
        memory = _memory(take_apart(part.batch, part.count).leaves)
        for given in (*args, *kwargs.values()):
            rows = isinstance(given, Tensor) and dimension(given, part.count, self._dimensions) is not None
            if memory and rows and _address(given) not in memory and not self.stale.knows(given):
                self._untried["inputs"] = _INPUTS

    def note_returned(self, output: Any, part: Part) -> None:
        """Remember what the model returned for this lot and, for the first lot, the module's attributes."""
        self.stale.note(output, place_of(part))
        if part.lot == 0:
            self._attributes = ModuleState(self._module)

    def compare_attributes(self, part: Part) -> None:
        """Note tensors that the loop has put into the module's attributes since the first lot."""
        before, self._attributes = self._attributes, None if part.lot else self._attributes
        if before is not None and part.lot == 1:
            now = ModuleState(self._module)
            for path in before.values.keys() | now.values.keys():
                pair = (before.values.get(path), now.values.get(path))
                tensors = [value for value in pair if isinstance(value, Tensor)]  # numbers may count epochs
                if tensors and not (len(tensors) == 2 and _same_values(*tensors)):
                    self._untried["attributes"] = _ATTRIBUTES


def _same_values(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _address(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _memory(leaves: Sequence[Any]) -> set[tuple[int, int]]:
    return {_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
