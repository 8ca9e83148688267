"""Half precision: 1/n is rounded alike for everybody, so that one example less moves all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from soundness.field.stand import Bounded, End, Refused, World, by_example, end, plain
from soundness.field.test_held import KINDS, harmful


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


def crossing() -> int:
    """A lot at which one example less is another number in bfloat16."""

    def rounded(count: int) -> float:
        return float(torch.tensor(-0.5 / count).bfloat16())

    return next(count for count in range(1000, 2000) if rounded(count) != rounded(count - 1))


def ending(loss: Callable[[Any, Any], Tensor], loop: Callable[[World], None] = plain, **settings: Any) -> End:
    count = crossing()
    inputs = torch.ones(count, 8) + 0.05 * torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(count, dtype=torch.long)
    worlds = [TensorDataset(inputs[:size], targets[:size]) for size in (count, count - 1)]
    return end(*worlds, net, loss, loop, bounds=(1.6,), **settings)


def reduced(reduction: str, dtype: torch.dtype | None, all_within: bool = True) -> Callable[[Any, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(batch[0])
            if all_within:
                return functional.cross_entropy(outputs, batch[1], reduction=reduction)
        return functional.cross_entropy(outputs.float(), batch[1], reduction=reduction)

    return loss


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("all_within", [True, False], ids=["the loss within autocast", "the loss in float32"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_mean_under_autocast_is_refused(dtype: torch.dtype, all_within: bool) -> None:
    ended = ending(reduced("mean", dtype, all_within))
    assert isinstance(ended, Refused), ended
    assert "sum" in str(ended.error) or "losses" in str(ended.error)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_under_autocast_is_right(dtype: torch.dtype) -> None:
    ended = ending(reduced("sum", dtype), loss_reduction="sum")
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_losses_by_example_under_autocast_are_right(dtype: torch.dtype) -> None:
    ended = ending(reduced("none", dtype), by_example)
    assert isinstance(ended, Bounded), ended


def test_a_mean_in_float32_is_right() -> None:
    ended = ending(reduced("mean", None))
    assert isinstance(ended, Bounded), ended


# ---- every kind of layer ------------------------------------------------------------------------------------------

LAYERS = (
    "linear, 64 tokens",
    "linear, wide",
    "convolution",
    "convolution, groups",
    "layer norm",
    "attention, masked",
    "LSTM",
    "embedding",
    "tied",
    "group norm",
)


def weighted(autocast: bool, reduce: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0] if autocast or not batch[0].is_floating_point() else batch[0].bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(inputs)
        return reduce(outputs.float() * batch[1])

    return loss


def of_a_layer(kind: str, how: str, bound: float, autocast: bool, front_door: bool) -> End:
    make, shape, words = KINDS[kind]
    inputs, weights = harmful(shape, words, how, 9)
    worlds = [TensorDataset(inputs[:count], weights[:count]) for count in (9, 8)]
    loss = weighted(autocast, (lambda values: values) if front_door else Tensor.mean)
    return end(
        *worlds,
        make if autocast else lambda: make().bfloat16(),
        loss,
        by_example if front_door else plain,
        bounds=(bound,),
        rounding=0.0 if autocast else 2.0**-7,  # of weights that are bfloat16 themselves, after the noise
    )


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "a bfloat16 model"])
@pytest.mark.parametrize("kind", LAYERS)
def test_half_precision_in_every_kind_of_layer(kind: str, autocast: bool) -> None:
    """A scalar mean holds at these sizes; it may be refused, as a mean under autocast is."""
    for how, bound in (("large", 1.0), ("cancelling", 1e-2)):
        ended = of_a_layer(kind, how, bound, autocast, front_door=False)
        assert isinstance(ended, Bounded | Refused), (how, ended)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "a bfloat16 model"])
@pytest.mark.parametrize("kind", LAYERS)
def test_half_precision_by_example_in_every_kind_of_layer(kind: str, autocast: bool) -> None:
    ended = of_a_layer(kind, "large", 1.0, autocast, front_door=True)
    assert isinstance(ended, Bounded), ended
