"""What adadp did with parts of a model that its user may want to know: in one line, and in full on request."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

_SOME = 3

#: For each model, a line for each part.
_NOTES: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def notes(module: nn.Module) -> list[str]:
    """What adadp did with parts of a model, a line for each: what a `ModelNotice` sums up, in full.

    Args:
        module: a model that `adadp.fix` returned, or one that was made private.

    Returns:
        Names of modules, with what `fix` replaced them by, or how the engine takes their per-example gradients where
        it has no rule for them. Empty where there is nothing to say.

    """
    return list(_NOTES.get(module, ()))


def keep_notes(module: nn.Module, lines: Sequence[str]) -> None:
    """Have `notes(module)` return these lines too."""
    _NOTES.setdefault(module, []).extend(lines)


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(names[:_SOME]) + rest


__all__ = ["keep_notes", "notes", "some"]
