"""Recognises losses [n] that a loop computed: as a known loss of the model's outputs and the batch.

The loop's code cannot be run again. But known losses, in which row i depends on row i only, can be computed from the
model's outputs and the loader's batch: where values and gradients agree, the loop did nothing else to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from adadp import losses as own
from adadp.checks.result_comparison import largest_finite

Loss = Callable[[Tensor, Tensor], Tensor]


def _each(loss: Callable[..., Tensor], total: bool = False) -> Loss:
    """A loss of torch, averaged (or summed) over each row's own entries."""

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
    elif target.ndim == output.ndim - 1:  # a label for each pixel, none of them ignored
        yield lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none").flatten(1).mean(1)


def recognised(losses: Tensor, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether `losses` [n] are those of a known loss on one of the outputs and one of the batch's leaves.

    Values must agree, and gradients with respect to the output: a part that was detached, or scaled by a hook, has the
    right value and another gradient.
    """
    count = len(losses)
    found = losses.detach().float()
    for output in (tensor for tensor in outputs if tensor.ndim and len(tensor) == count and tensor.requires_grad):
        for leaf in (tensor.detach().to(output.device) for tensor in leaves if tensor.ndim and len(tensor) == count):
            real = leaf.is_floating_point() or leaf.dtype == torch.bool
            for loss in _candidates(output, leaf):
                with suppress(Exception):  # this loss does not take these shapes
                    own = output.detach().requires_grad_()
                    with torch.enable_grad():
                        values = loss(own, leaf.to(output.dtype) if real or loss in _REAL else leaf)
                    if _agree(values.detach().float(), found, output.dtype) and _same_gradient(
                        values, own, losses, output
                    ):
                        return True
    return False


def _same_gradient(values: Tensor, own: Tensor, losses: Tensor, output: Tensor) -> bool:
    (wanted,) = torch.autograd.grad(values.sum(), own)
    (given,) = torch.autograd.grad(losses.sum(), output, retain_graph=True, allow_unused=True)
    return given is not None and _agree(wanted.float(), given.float(), output.dtype)


def _agree(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether they are equal up to rounding, relative to their size."""
    rough = 3e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    absolute = rough * 1e-2 * largest_finite(one, 0.0)
    return torch.allclose(one, other, rtol=rough, atol=absolute, equal_nan=True)
