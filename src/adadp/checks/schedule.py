"""When things are tried: a public schedule, so that a trial says nothing about the lot it falls on."""

from __future__ import annotations

_FIRST = (0, 1, 10)
_LATER = 100  # then ten times as late each time


def stage(lot: int, planned: int | None = None) -> int:
    """How many trials are due by this lot: at lots 0, 1, 10, 100, 1000 and so on, and at the last of `planned` ones."""
    passed = sum(lot >= first for first in _FIRST)
    later = _LATER
    while lot >= later:
        passed, later = passed + 1, later * 10
    return passed + (planned is not None and lot >= max(planned - 1, 1) and not _scheduled(planned - 1))


def _scheduled(lot: int) -> bool:
    """Whether a trial falls on this lot, however many are planned."""
    return lot in _FIRST or (lot >= _LATER and str(lot).strip("0") == "1")
