"""BatchNorm in eval mode: it normalises by constants, which is watched at every call of the model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from adadp.checks.notes import some
from adadp.errors import TrainingLoopError
from adadp.gradients.layers.normalization import normalises_by_constants

_STATISTICS = (
    "the running statistics of {} (BatchNorm in eval mode) are public or were paid for: a BatchNorm that saw this data "
    "in training mode has stored it without noise"
)


class FrozenNorms:
    """The BatchNorm modules of a private model, also those without trainable parameters, which no layer watches."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]

    def check(self) -> None:
        """Raise TrainingLoopError where one normalises by the batch: `model.train()` has switched it on again."""
        for name, part in self._norms:
            if not normalises_by_constants(part):
                why = "is in training mode" if part.training else "has no running statistics"
                raise TrainingLoopError(
                    f"{name or 'the model'} ({type(part).__name__}) {why}, so it normalises each example by the others "
                    "of its batch. It was made private in eval mode, with running statistics: call its .eval() after "
                    "every model.train(), or use adadp.fix(model) before make_private."
                )

    def assumptions(self) -> list[str]:
        """What a guarantee rests on because of them."""
        names = [name or "the model" for name, _ in self._norms]
        return [_STATISTICS.format(some(names))] if names else []


__all__ = ["FrozenNorms"]
