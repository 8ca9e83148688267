"""STUB until merge."""
from __future__ import annotations
from typing import Any
from adadp.validation import IndependenceCheck


class Trial:
    def __init__(self, capture: Any, *, batch_first: bool, dataset: Any = None, collate: Any = None, loss_reduction: str = "mean") -> None:
        self._check = IndependenceCheck(capture, batch_first)
        self.untried: dict[str, str] = {}

    @property
    def undecided(self) -> Any:
        return self._check.undecided

    def due(self, lot: int) -> bool:
        return lot in (0, 1, 3, 32, 128, 512)

    def before_call(self, module: Any, args: Any, kwargs: Any, part: Any) -> None:
        self._check(module, args, kwargs, part.count)

    def of_loss(self, loss: Any, batch: Any, part: Any) -> None: ...
    def of_rows(self, losses: Any, part: Any) -> None: ...
    def loss_tried(self, part: Any) -> bool:
        return False
