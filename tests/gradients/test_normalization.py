"""Normalisation layers, with and without weight and bias."""

from __future__ import annotations

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_func, captured, loss_of
from torch import nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.capture import Capture


def of_batches(layer: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    """With statistics of its own, which it normalises by."""
    torch.manual_seed(1)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer.eval()


LAYERS = [
    (nn.LayerNorm(4), (5, 4)),
    (nn.LayerNorm(4, bias=False), (5, 3, 4)),
    (nn.LayerNorm((3, 4), eps=0.1), (5, 3, 4)),
    (nn.LayerNorm((3, 4)), (5, 2, 6, 3, 4)),
    (nn.RMSNorm(4), (5, 4)),
    (nn.RMSNorm((3, 4), eps=0.1), (5, 2, 3, 4)),
    (nn.GroupNorm(2, 4), (5, 4)),
    (nn.GroupNorm(2, 4, eps=0.1), (5, 4, 6)),
    (nn.GroupNorm(4, 4), (5, 4, 3, 2)),
    (nn.GroupNorm(1, 4), (5, 4, 2, 3, 2)),
    (of_batches(nn.BatchNorm1d(4)), (5, 4)),
    (of_batches(nn.BatchNorm1d(4, eps=0.1)), (5, 4, 6)),
    (of_batches(nn.BatchNorm2d(4)), (5, 4, 3, 2)),
    (of_batches(nn.BatchNorm3d(4)), (5, 4, 2, 3, 2)),
    (of_batches(nn.SyncBatchNorm(4)), (5, 4, 6)),
    (nn.InstanceNorm1d(4, affine=True), (5, 4, 6)),
    (nn.InstanceNorm2d(4, affine=True, eps=0.1), (5, 4, 3, 2)),
    (nn.InstanceNorm3d(4, affine=True), (5, 4, 2, 3, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_every_layer(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    assert_matches(layer.to(dtype), [torch.randn(shape, dtype=dtype)], loop=isinstance(layer, nn.InstanceNorm3d))


def test_sequences_first() -> None:
    torch.manual_seed(0)
    model = nn.LayerNorm(4).double()
    inputs = torch.randn(5, 3, 4, dtype=torch.float64)
    forms = captured(
        model, [inputs.transpose(0, 1)], lambda out: loss_of(out.transpose(0, 1)), batch_first=False, count=5
    )
    assert_forms(forms, by_func(model, [inputs]), 1e-9)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="track_running_stats=False"):
        Capture(nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)))


@pytest.mark.parametrize(("layer", "shape"), [(nn.LayerNorm(4), (4,)), (nn.InstanceNorm2d(3, affine=True), (3, 4, 4))])
def test_input_without_a_batch_is_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    Capture(layer)
    with pytest.raises(UnsupportedModuleError, match="batch of one"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_examples(count: int) -> None:
    for layer in (nn.LayerNorm(4), nn.RMSNorm(4)):
        form = captured(layer, [torch.randn(count, 3, 4)])["weight"]
        assert form.squared_norms().shape == (count,)
        assert form.weighted_sum(torch.ones(count), None).shape == (4,)


def test_bfloat16() -> None:
    torch.manual_seed(0)
    model, inputs = nn.LayerNorm(4), torch.randn(5, 3, 4)
    expected = by_func(model, [inputs.bfloat16().float()])
    forms = captured(model.bfloat16(), [inputs.bfloat16()])
    assert_forms(forms, expected, 0.05)
