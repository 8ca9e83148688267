"""Losses that are known: [n] values that follow from the model's outputs and the batch, each row from its own.

The loop computes them, and its code cannot be run again. But their values can be computed again from what the model
returned and what the loader gave out: where they agree with a loss of which it is known that rows are kept apart,
nothing else was done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from adadp import losses as own

Loss = Callable[[Tensor, Tensor], Tensor]


def _each(loss: Callable[..., Tensor], total: bool = False) -> Loss:
    """A loss of torch's, averaged (or added up) over each row's own entries."""

    def rows(outputs: Tensor, targets: Tensor) -> Tensor:
        entries = loss(outputs, targets.view_as(outputs), reduction="none").flatten(1)
        return entries.sum(1) if total else entries.mean(1)

    return rows


_REAL: tuple[Loss, ...] = tuple(
    _each(loss, total)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
    for total in (False, True)
)
_CLASSES: tuple[Loss, ...] = (
    own.classification,
    lambda outputs, labels: own.classification(outputs, labels, label_smoothing=0.1),
    lambda outputs, labels: F.nll_loss(outputs, labels, reduction="none"),
)
_WORDS: tuple[Loss, ...] = (
    own.causal_lm,
    own.masked_lm,
    lambda outputs, labels: own.masked_lm(outputs.transpose(1, 2), labels),
    lambda outputs, labels: own.masked_lm(outputs[:, :-1], labels[:, 1:]),
)


def _candidates(output: Tensor, target: Tensor) -> Iterator[Loss]:
    if target.is_floating_point() or target.dtype == torch.bool:
        if output.numel() == target.numel():
            yield from _REAL
    elif target.ndim == 1 and output.ndim == 2:
        yield from _CLASSES
        if output.shape[1] == 1:
            yield from _REAL
    elif target.ndim == 1 and output.ndim == 1:
        yield from _REAL
    elif target.ndim == 2 and output.ndim == 3:
        yield from _WORDS
    elif target.ndim == output.ndim - 1:  # a label for each pixel, with all of them labelled
        yield lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none").flatten(1).mean(1)


@torch.no_grad()
def recognised(losses: Tensor, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether `losses` [n] are those of a known loss on one of the outputs and one of the batch's leaves."""
    count = len(losses)
    found = losses.detach().float()
    for output in (tensor.detach() for tensor in outputs if tensor.ndim and len(tensor) == count):
        for leaf in (tensor.detach().to(output.device) for tensor in leaves if tensor.ndim and len(tensor) == count):
            real = leaf.to(output.dtype) if leaf.is_floating_point() or leaf.dtype == torch.bool else leaf
            for loss in _candidates(output, leaf):
                with suppress(Exception):  # these do not fit it
                    target = real.to(output.dtype) if loss in _REAL else real
                    if torch.allclose(loss(output, target).float(), found, rtol=1e-2, atol=1e-4, equal_nan=True):
                        return True
    return False
