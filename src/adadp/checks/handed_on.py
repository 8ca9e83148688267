"""What a module returned for one lot must not come back to it with another: hidden states that are handed on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from adadp.checks.rows import take_apart


class HandedOn:
    """Remembers the memory of what was returned, as long as somebody holds it, with the lot it was returned for."""

    def __init__(self) -> None:
        self._lots: dict[StorageWeakRef, int] = {}

    def note(self, output: Any, lot: int) -> None:
        """Remember what an outermost call returned."""
        for reference in [reference for reference in self._lots if reference.expired()]:  # type: ignore[no-untyped-call]
            del self._lots[reference]
        for leaf in take_apart(output).leaves:
            if isinstance(leaf, Tensor):
                self._lots.setdefault(StorageWeakRef(leaf.untyped_storage()), lot)  # type: ignore[no-untyped-call]

    def from_another(self, given: Any, lot: int) -> bool:
        """Whether something in `given` lies in what was returned for an earlier lot."""
        if not self._lots or min(self._lots.values()) >= lot:
            return False
        return any(
            self._lots.get(StorageWeakRef(leaf.untyped_storage()), lot) < lot  # type: ignore[no-untyped-call]
            for leaf in take_apart(given).leaves
            if isinstance(leaf, Tensor)
        )
