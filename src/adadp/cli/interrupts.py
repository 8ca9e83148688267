"""Ctrl-C and SIGTERM ask a run to stop; a second time they end the process at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Within the block, the first signal is noted (`asked`), and the run stops where it can."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: signals do not come here
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
