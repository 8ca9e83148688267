"""What `make_private` refuses before it changes anything."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from adadp.accounting.events import Gaussian
from adadp.checks.dataset_records import problems_of
from adadp.checks.validation import check_module, check_optimizer
from adadp.checks.weights import capture_of_private, private_part
from adadp.errors import ConfigurationError
from adadp.sampling.units import Grouping


def as_float(name: str, value: float) -> float:
    """`value` as a float, or `ConfigurationError` that names the argument."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a number, not {value!r}") from None


def refuse_ungrouped(grouping: Grouping | None, size: int | None, plain_step: bool, tested: bool) -> None:
    """Raise where rows of one contribution could not be kept together (`make_private(unit=, augmentations=)`).

    Args:
        grouping: what was asked for.
        size: `max_physical_batch_size`.
        plain_step: whether gradients are all that a lot releases.
        tested: whether a test of the loop (`adadp.testing`) shares lots out.

    """
    if grouping is None:
        return
    if size is not None:
        grouping.at_a_time(size)
    if not plain_step:
        raise ConfigurationError(
            "an algorithm with a step of its own (agd's line search) releases more than gradients, and bounds that for "
            "each row: it cannot be used with unit= or augmentations=. Take dpsgd or adadp"
        )
    if tested:
        raise ConfigurationError(
            "unit= and augmentations= do not work under adadp.testing, which takes one row away and shares lots out by "
            "rows. Test the loop without them"
        )


def as_noise(noise_multiplier: float) -> float:
    """A noise multiplier above 0 as a float, or `ConfigurationError`."""
    return Gaussian(as_float("noise_multiplier", noise_multiplier)).noise_multiplier


def check_training(
    module: nn.Module, optimizer: Optimizer, dataset: Any, loss_reduction: str, loss_scale: float
) -> None:
    """Raise where these cannot be trained privately together."""
    if capture_of_private(module) is not None:
        raise ConfigurationError("this module is private already; engine.detach(module) makes it an ordinary one")
    shared = private_part(module)
    if shared is not None:
        raise ConfigurationError(
            f"{shared} is part of another private model: a backward pass through one would be taken for the "
            "other's. Train them as one module with one loader, or give each its own copy."
        )
    check_module(module)
    check_optimizer(module, optimizer)
    if loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
    if not 0 < loss_scale < float("inf"):
        raise ConfigurationError(f"loss_scale must be a finite number above 0, not {loss_scale!r}")
    twice = problems_of(dataset)
    if twice:
        raise ConfigurationError("; ".join(twice))
