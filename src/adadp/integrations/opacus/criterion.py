"""The criterion of Opacus' ghost clipping: it returns a loss whose `backward()` is that of each example's loss."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import PrivateOptimizer


class DPTensorFastGradientClipping:
    """One loss for each example, [n], which the loop treats as if it were their mean or sum."""

    def __init__(self, losses: Tensor, optimizer: PrivateOptimizer, loss_reduction: str) -> None:
        self.loss_per_sample, self._optimizer, self._reduction = losses, optimizer, loss_reduction

    def backward(self) -> None:
        """`optimizer.backward(losses)`: one backward pass, and the losses are tried for mixing examples."""
        self._optimizer.backward(self.loss_per_sample)

    def item(self) -> float:
        """The mean, or the sum. It is not noised: for the curator only."""
        whole = self.loss_per_sample.detach()
        return float(whole.mean() if self._reduction == "mean" else whole.sum())

    def __float__(self) -> float:
        return self.item()


class DPLossFastGradientClipping:
    """Calls `criterion` with reduction "none" and keeps one loss for each example."""

    def __init__(self, criterion: nn.Module, optimizer: PrivateOptimizer, loss_reduction: str) -> None:
        if not hasattr(criterion, "reduction"):
            raise ConfigurationError(
                f"grad_sample_mode='ghost' needs a criterion with a `reduction`, and {type(criterion).__name__} has "
                "none: use optimizer.backward(losses) with one loss for each example, and any grad_sample_mode"
            )
        # A copy: the loop's own criterion goes on to reduce where it evaluates.
        self.criterion = copy.copy(criterion)
        vars(self.criterion)["reduction"] = "none"
        self._optimizer, self._reduction = optimizer, loss_reduction

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> DPTensorFastGradientClipping:
        """The losses of a batch.

        Args:
            args: those of the criterion.
            shape: that of the logits before they were flattened, [n, length, ...]: an example has `length` losses then.
            kwargs: those of the criterion.

        """
        losses: Tensor = self.criterion(*args, **kwargs)
        if shape is not None and losses.ndim == 1 and len(losses) == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
        if losses.ndim > 1:
            rest = tuple(range(1, losses.ndim))
            losses = losses.mean(rest) if self._reduction == "mean" else losses.sum(rest)
        return DPTensorFastGradientClipping(losses, self._optimizer, self._reduction)
