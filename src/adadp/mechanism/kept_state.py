"""What a clipping, its shape and its source keep between lots, as a recorded step must find and leave it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from adadp.gradients.forms.factors import Factor
from adadp.shapes.source import Source
from adadp.shapes.spectrum import Spectrum


class CannotBeReplayedError(Exception):
    """A step does more on the host than a replay would do."""


class KeptState:
    """A snapshot of all attributes of a clipping, its shape and its source, each by its path.

    A recorded step works on the tensors that the objects held when it was recorded. After an ordinary step those must
    be the ones that are held again, with the new numbers (`take_over`).
    """

    def __init__(self, objects: list[object]) -> None:
        self._objects = objects
        self._kept = [_copy(vars(part)) for part in objects]
        leaves = dict(_walk(self._kept, ()))
        self.tensors: dict[Any, Tensor] = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self._others = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}

    def kept_in(self, now: KeptState) -> bool:
        """Whether `now` holds the same objects at the same paths; a source's count of lots may differ."""
        mine, others = self.tensors | self._others, now.tensors | now._others
        return mine.keys() == others.keys() and all(
            self._counted(path) or _same(value, others[path]) for path, value in mine.items()
        )

    def _counted(self, path: tuple[Any, ...]) -> bool:
        """Whether the path is a source's count of lots."""
        return path[1:] == ("step",) and isinstance(self._objects[path[0]], Source)

    def restore(self) -> None:
        """Put everything back as it was."""
        for part, kept in zip(self._objects, self._kept, strict=True):
            vars(part).clear()
            vars(part).update(_copy(kept))

    def take_over(self, now: KeptState) -> bool:
        """Copy the numbers that are kept now into the tensors that were kept then, and keep those again.

        False, and nothing is done, where more than numbers differ: the host may then decide otherwise.
        """
        mine, others = dict(_walk(self._kept, (), deep=True)), dict(_walk(now._kept, (), deep=True))
        if mine.keys() != others.keys():
            return False
        moved: list[tuple[Tensor, Tensor]] = []
        stayed: set[int] = set()
        for path, old in mine.items():
            new = others[path]
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                    return False
                if new is not old:
                    moved.append((old, new))
                else:
                    stayed.add(_place(old))
            elif not (self._counted(path) or _same(old, new) or _no_wider(path, old, new)):
                return False
        # Each place gets one value. None of these is itself a place, and no place is one of what stayed as it was.
        pairs = {(_place(old), _place(new)) for old, new in moved}
        places, values = {place for place, _ in pairs}, {value for _, value in pairs}
        if len(places) < len(pairs) or places & (values | stayed):
            return False
        for old, new in moved:
            old.copy_(new)
        counts = {path: value for path, value in now._others.items() if self._counted(path)}
        self.restore()
        for path, count in counts.items():
            setattr(self._objects[path[0]], path[1], count)
        return True

    def follow(self, after: KeptState) -> None:
        """Copy what became of each tensor into the tensor itself, so that the next replay goes on from there."""
        if self.tensors.keys() != after.tensors.keys() or self._others.keys() != after._others.keys():
            raise CannotBeReplayedError("the clipping keeps more, or less, after a lot than before it")
        for path, value in self._others.items():
            # Sources count their lots, and count those that are replayed (`count_lot`). Nothing else may change.
            if not _same(value + 1 if self._counted(path) else value, after._others[path]):
                raise CannotBeReplayedError(f"{type(self._objects[path[0]]).__name__}.{path[1]} changes with each lot")
        moved = [(old, after.tensors[path]) for path, old in self.tensors.items() if after.tensors[path] is not old]
        if len({old.data_ptr() for old, _ in moved}) < len(moved) or any(old.shape != new.shape for old, new in moved):
            raise CannotBeReplayedError("the clipping's tensors are not each in a place of its own")
        for old, new in moved:
            old.copy_(new)


def _copy(value: Any) -> Any:
    """A copy of dicts and lists, with the same leaves."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _walk(value: Any, path: tuple[Any, ...], deep: bool = False) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All leaves with their paths. With `deep`, tuples and factors of shapes are walked into, too."""
    if deep and isinstance(value, Spectrum | Factor):
        yield (*path, type), type(value)
        value = vars(value)
    if isinstance(value, dict | list) or (deep and isinstance(value, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(part, (*path, key), deep)
    else:
        yield path, value


def _no_wider(path: tuple[Any, ...], old: Any, new: Any) -> bool:
    """Whether the path is the spread of a factor and the new one is no larger, so that bounds for the old one hold."""
    return bool(path[-1] == "spread" and isinstance(old, float) and isinstance(new, float) and new <= old)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return old is new or (isinstance(old, int | float | str) and type(old) is type(new) and old == new)
