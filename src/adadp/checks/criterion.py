"""Whether a loss is a plain mean (or sum) over examples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adadp.errors import ConfigurationError


def check_criterion(criterion: Callable[..., Tensor], loss_reduction: str) -> bool:
    """Refuse a loss that mixes examples. False where it takes other arguments than were tried: it was not checked.

    The gradient of an example's own output, times the number of examples for a mean, may depend neither on the
    other examples nor on how many there are.
    """
    declared = getattr(criterion, "reduction", None)
    if declared in ("mean", "sum") and declared != loss_reduction:
        raise ConfigurationError(
            f"the criterion's reduction is {declared!r} but loss_reduction is {loss_reduction!r}: make them agree"
        )
    ignored = getattr(criterion, "ignore_index", -100)
    if declared == "mean" and ignored != -100:
        raise ConfigurationError(
            f"the criterion ignores label {ignored} and divides by how many labels of the whole batch are left, which "
            "mixes examples: average within each example, then over examples"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that do not fit: they are only tried
        return _check_outputs(criterion, loss_reduction)


def _check_outputs(criterion: Callable[..., Tensor], loss_reduction: str) -> bool:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(3, (4,), generator=generator)
    candidates: list[tuple[Tensor, Tensor]] = [
        (normal(4, 3), labels),
        (normal(4, 3), torch.softmax(normal(4, 3), 1)),
        (normal(4, 1), torch.rand(4, 1, generator=generator, dtype=torch.float64)),
        (normal(4), torch.rand(4, generator=generator, dtype=torch.float64)),
    ]
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).double()  # the user's own stays as it is
    for outputs, targets in candidates:
        try:
            reference = _output_gradients(criterion, outputs, targets, loss_reduction)
        except Exception:
            continue
        replaced_outputs, replaced_targets = outputs.clone(), targets.clone()
        replaced_outputs[0], replaced_targets[0] = outputs[1], targets[1]
        for other in (
            _output_gradients(criterion, replaced_outputs, replaced_targets, loss_reduction)[1:],
            _output_gradients(criterion, outputs[1:], targets[1:], loss_reduction),
        ):
            if not torch.allclose(reference[1:], other, rtol=1e-6, atol=1e-9):
                raise ConfigurationError(
                    "the criterion mixes examples: the gradient of one example's loss changes with the others. "
                    "Weighted means divide by the batch's weights and contrastive losses compare examples; use a loss "
                    f"that is a plain {loss_reduction} over examples."
                )
        return True
    return False


def _output_gradients(criterion: Callable[..., Tensor], outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    leaf = outputs.clone().requires_grad_()
    loss = criterion(leaf, targets)
    # A loss for each example is put together by the loop, as loss_reduction says.
    total = loss.mean() if reduction == "mean" and loss.ndim else loss.sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient * (len(outputs) if reduction == "mean" else 1)
