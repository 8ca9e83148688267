"""When trials are due: by a public schedule, so that a trial reveals nothing about the lot on which it takes place."""

from __future__ import annotations

from torch import nn

from adadp.checks.inputs import Part, place_of

_FIRST = (0, 1, 10)
_LATER = 100  # then ten times as late each time

#: What was tried (its id), the mode that the modules were in, and whether it came after another part of its lot.
Key = tuple[int, tuple[bool, ...], int]


def stage(lot: int, planned: int | None = None) -> int:
    """How many trials are due by this lot: at lots 0, 1, 10, 100, 1000 and so on, and at the last of `planned` ones."""
    passed = sum(lot >= first for first in _FIRST)
    later = _LATER
    while lot >= later:
        passed, later = passed + 1, later * 10
    return passed + (planned is not None and lot >= max(planned - 1, 1) and not _scheduled(planned - 1))


def _scheduled(lot: int) -> bool:
    """Whether a trial is due on this lot, whatever is planned."""
    return lot in _FIRST or (lot >= _LATER and str(lot).strip("0") == "1")


class Schedule:
    """Which trials each module and loss has passed, in each mode that the modules were in.

    A mode is the value of every boolean attribute of every module: `training`, and whatever else can be switched.
    """

    def __init__(self, module: nn.Module, planned: int | None) -> None:
        self._planned = planned
        self.undecided: set[int] = set()  # modules whose examples were too much alike so far, by id
        self._switches = [
            (part.__dict__, name)
            for part in module.modules()
            for name, value in part.__dict__.items()
            if isinstance(value, bool)
        ]
        self._passed: dict[Key, int] = {}  # the stage of the last trial that was passed

    def stage(self, lot: int) -> int:
        """How many trials are due by this lot."""
        return stage(lot, self._planned)

    def key(self, tried: object, part: Part) -> Key:
        """Under which a trial of a module or loss on this part is remembered."""
        return id(tried), self._modes(), min(place_of(part)[1], 1)

    def due(self, key: Key, lot: int) -> bool:
        """Whether this module or loss is to be tried on this lot."""
        return self._passed.get(key, 0) < self.stage(lot)

    def any_due(self, lot: int) -> bool:
        """Whether anything is to be tried on this lot."""
        modes = self._modes()
        passed = [reached for (_, mode, _), reached in self._passed.items() if mode == modes]
        return max(passed, default=0) < self.stage(lot) or bool(self.undecided)

    def passed_once(self) -> bool:
        """Whether something passed in the mode that the modules are in now, and nothing is undecided."""
        modes = self._modes()
        passed = any(mode == modes and reached > 0 for (_, mode, _), reached in self._passed.items())
        return passed and not self.undecided

    def passed(self, key: Key, lot: int) -> None:
        """A trial that was due on this lot was passed."""
        self._passed[key] = self.stage(lot)

    def all_passed(self, lot: int) -> None:
        """Everything that was tried in this mode before was passed again on this lot."""
        modes = self._modes()
        for key in self._passed:
            if key[1] == modes:
                self._passed[key] = max(self._passed[key], self.stage(lot))

    def _modes(self) -> tuple[bool, ...]:
        return tuple([bool(entries.get(name)) for entries, name in self._switches])
