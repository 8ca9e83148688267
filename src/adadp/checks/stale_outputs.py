"""Finds outputs of an earlier lot among a module's arguments: hidden states that the loop passes on, for instance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from adadp.checks.containers import take_apart


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
