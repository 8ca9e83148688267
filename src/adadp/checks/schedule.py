"""When things are tried: a public schedule, so that a trial says nothing about the lot it falls on."""

from __future__ import annotations

_FIRST = (0, 1)
_LATER = 100  # then ten times as late each time


def stage(lot: int) -> int:
    """How many trials are due by this lot: at lots 0, 1, 100, 1000, 10000 and so on."""
    passed = sum(lot >= first for first in _FIRST)
    later = _LATER
    while lot >= later:
        passed, later = passed + 1, later * 10
    return passed
