"""When things are tried: a public schedule, so that a trial says nothing about the lot it falls on."""

from __future__ import annotations

_FIRST = (0, 1, 3)
_LATER = 32  # then four times as late each time


def stage(lot: int) -> int:
    """How many trials are due by this lot: at lots 0, 1, 3, 32, 128, 512, 2048 and so on."""
    passed = sum(lot >= first for first in _FIRST)
    later = _LATER
    while lot >= later:
        passed, later = passed + 1, later * 4
    return passed
