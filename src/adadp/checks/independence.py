"""The trial as the capture calls it: with a module's arguments and the number of examples in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from adadp.checks.trial import Trial
from adadp.gradients import Capture


@dataclass(frozen=True)
class _Out:
    lot: int
    count: int
    indices: Sequence[int] = ()
    batch: Any = None


class IndependenceCheck:
    """Tries out that a model's examples do not influence each other (`Trial.before_call`)."""

    def __init__(self, capture: Capture, batch_first: bool) -> None:
        self.trial = Trial(capture, batch_first=batch_first)
        self._capture = capture
        capture.after_call = self._after

    @property
    def undecided(self) -> set[int]:
        """Modules whose examples were too much alike so far."""
        return self.trial.undecided

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        self.trial.before_call(module, args, kwargs, self._out(count))

    def _after(self, output: Any) -> None:
        self.trial.after_call(output, self._out(self._capture.count or 0))

    def _out(self, count: int) -> _Out:
        return _Out(getattr(self._capture.tag, "lot", 0), count)
