"""What adadp did with parts of a model that its user may want to know: in one line, and in full on request."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence

from torch import nn

from adadp.errors import ModelNotice

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
    return list(_NOTES.get(getattr(module, "_orig_mod", module), ()))  # of the module inside a compiled one


def keep_notes(module: nn.Module, lines: Sequence[str]) -> None:
    """Have `notes(module)` return these lines too."""
    kept = _NOTES.setdefault(module, [])
    kept.extend(line for line in lines if line not in kept)


def say_through_func(module: nn.Module, without_rule: Sequence[tuple[str, str]], chunk: int, stacklevel: int) -> None:
    """Sum up which modules (name and class) have no rule, in one `ModelNotice`, and note each."""
    if not without_rule:
        return
    how = f"torch.func takes {{}} per-example gradients, {chunk} examples at a time"
    lines = [f"{name} ({kind}): no rule for this kind of module, so {how.format('its')}" for name, kind in without_rule]
    keep_notes(module, lines)
    kinds = Counter(kind for _, kind in without_rule)
    several = f"{len(lines)} modules{f' of {len(kinds)} kinds' if len(kinds) > 1 else ''} have"
    counted = [kind if count == 1 else f"{kind} x{count}" for kind, count in kinds.most_common()]
    warnings.warn(
        f"{several if len(lines) > 1 else '1 module has'} no rule ({some(counted)}): "
        f"{how.format('their' if len(lines) > 1 else 'its')}; adadp.notes(model) has every name",
        ModelNotice,
        stacklevel=stacklevel + 1,
    )


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(names[:_SOME]) + rest


__all__ = ["keep_notes", "notes", "say_through_func", "some"]
