"""What adadp did with parts of a model that its user may want to know: all names of what a `ModelNotice` sums up."""

from __future__ import annotations

from torch import nn

from adadp.checks.repair import replaced_in


def notes(module: nn.Module) -> list[str]:
    """What adadp did with parts of a model, a line for each: what a `ModelNotice` sums up, in full.

    Args:
        module: a model that `adadp.fix` returned, or one that was made private.

    Returns:
        Names of modules, with what `fix` replaced them by, or how the engine takes their per-example gradients where
        it has no rule for them. Empty where there is nothing to say.

    """
    return replaced_in(module)


__all__ = ["notes"]
