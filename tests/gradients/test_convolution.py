"""Convolutions: every option against torch.func, the large path, and values that overflow, vanish or cancel."""

from __future__ import annotations

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_func, captured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.capture import Capture
from adadp.gradients.forms import per_example
from adadp.gradients.layers import convolution
from adadp.gradients.layers.convolution import Convolution, Geometry

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIZES = {1: (11,), 2: (7, 6), 3: (5, 6, 5)}

OPTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": "same"},
    {"padding": "same", "dilation": 2, "kernel_size": 2},
    {"padding": "valid"},
    {"dilation": 2},
    {"groups": 2},
    {"stride": 2, "padding": 2, "groups": 4, "kernel_size": 2},
    {"bias": False},
    {"kernel_size": 1},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2},
    {"padding": "same", "padding_mode": "reflect"},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_option(dimensions: int, options: dict[str, object], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings = {"kernel_size": 3, **options}
    model = nn.Sequential(KINDS[dimensions](4, 8, **settings), nn.Tanh()).to(dtype)
    assert_matches(model, [torch.randn(5, 4, *SIZES[dimensions], dtype=dtype)])


def test_kernel_that_is_not_square() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)).double()
    assert_matches(model, [torch.randn(4, 2, 6, 7, dtype=torch.float64)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"groups": 2, "stride": 2, "padding": 1}, {"padding": "same"}], ids=str)
def test_gradients_too_large_to_keep(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], dtype: torch.dtype
) -> None:
    """Chunks of examples, and a weighted sum by the native kernel."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3, **options).to(dtype)
    inputs = [torch.randn(5, 4, 6, 6, dtype=dtype)]
    expected = by_func(model, inputs)
    for module in (per_example, convolution):
        monkeypatch.setattr(module, "DENSE_BYTES", 2000)
    monkeypatch.setattr(convolution, "PATCH_BYTES", 2000)
    forms = captured(model, inputs)
    assert not forms["weight"]._keeps
    assert_forms(forms, expected, 1e-9 if dtype == torch.float64 else 3e-4)


def test_native_gradient_of_one_example_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(convolution, "NATIVE_MULTIPLICATIONS", 0)
    model = nn.Conv2d(4, 6, 3, padding=1, groups=2)
    assert_matches(model, [torch.randn(5, 4, 6, 6)])


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_examples(count: int) -> None:
    model = nn.Conv2d(2, 3, 3).double()
    forms = captured(model, [torch.randn(count, 2, 5, 5, dtype=torch.float64)])
    assert forms["weight"].squared_norms().shape == (count,)
    assert forms["weight"].weighted_sum(torch.ones(count), None).shape == (3, 2, 3, 3)
    assert forms["bias"].weighted_sum(torch.ones(count), None).shape == (3,)


def test_input_that_is_not_contiguous() -> None:
    model = nn.Conv2d(3, 4, 3)
    torch.manual_seed(0)
    channels_last = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    assert_matches(model, [channels_last])
    assert_matches(model, [torch.randn(6, 6, 3, 4).permute(3, 2, 0, 1)])


def test_single_image_without_a_batch_is_refused() -> None:
    model = nn.Conv2d(3, 4, 3)
    Capture(model)
    with pytest.raises(UnsupportedModuleError, match="unsqueeze"):
        model(torch.randn(3, 6, 6))


def test_subclass_with_another_convolution_is_not_taken_for_the_ordinary_one() -> None:
    class Standardised(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):  # type: ignore[no-untyped-def]
            return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    torch.manual_seed(0)
    assert_matches(Standardised(2, 3, 3).double(), [torch.randn(4, 2, 5, 5, dtype=torch.float64)])


@pytest.mark.parametrize("keeps", [True, False])
def test_places_that_cancel_do_not_hide_from_the_norm(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """A large patch seen twice with opposite output gradients, plus small ones: float32 sums leave a rest."""
    if not keeps:
        for module in (per_example, convolution):
            monkeypatch.setattr(module, "DENSE_BYTES", 1)
    torch.manual_seed(0)
    places = 16
    inputs, outputs = torch.randn(3, 8, places), 1e-3 * torch.randn(3, 8, places)
    inputs[..., 1::2] = inputs[..., ::2]
    large = 1e4 * torch.randn(3, 8, places // 2)
    outputs[..., ::2] += large
    outputs[..., 1::2] -= large
    form = Convolution(inputs, outputs, Geometry(torch.Size((8, 8, 1)), (1,), (0,), (1,), 1))
    assert form._keeps == keeps
    truth = (outputs.double() @ inputs.double().mT).unsqueeze(3)
    bounds = form.squared_norms().sqrt()
    for example in range(3):
        alone = torch.zeros(3)
        alone[example] = 1
        added = form.weighted_sum(alone, alone != 0)
        assert added.double().norm() <= bounds[example] * (1 + 1e-9)
        assert truth[example].norm() <= bounds[example] * 1.5 + 1


@pytest.mark.parametrize("keeps", [True, False])
def test_one_bad_example_stays_alone(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    if not keeps:
        for module in (per_example, convolution):
            monkeypatch.setattr(module, "DENSE_BYTES", 1)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3)
    inputs = torch.randn(4, 2, 5, 5)
    inputs[1, 0, 0, 0] = float("nan")
    inputs[2] = 1e30
    forms = captured(model, [inputs])
    norms = sum(form.squared_norms() for form in forms.values())
    assert norms.isfinite().tolist()[::3] == [True, True]
    assert not norms[1].isfinite()
    keep = torch.tensor([True, False, False, True])
    expected = by_func(model, [inputs[[0, 3]]])
    for name, form in forms.items():
        total = form.weighted_sum(keep.float(), keep)
        torch.testing.assert_close(total, expected[name].sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keeps", [True, False])
def test_tiny_inputs_with_huge_output_gradients(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    if not keeps:
        for module in (per_example, convolution):
            monkeypatch.setattr(module, "DENSE_BYTES", 1)
    torch.manual_seed(0)
    inputs, outputs = 1e-30 * torch.randn(2, 3, 8), 1e30 * torch.randn(2, 4, 6)
    form = Convolution(inputs, outputs, Geometry(torch.Size((4, 3, 3)), (1,), (0,), (1,), 1))
    for example in range(2):
        alone = torch.zeros(2)
        alone[example] = 1
        added = form.weighted_sum(alone, alone != 0).double().norm()
        assert added > 0.1
        assert added <= form.squared_norms()[example].sqrt() * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_settings(data: st.DataObject) -> None:
    draw = data.draw
    dimensions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dimensions))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    string = draw(st.sampled_from([None, "same", "valid"]))
    if string == "same":
        stride = (1,) * dimensions
    padding = string or tuple(draw(st.integers(0, 2)) for _ in range(dimensions))
    mode = draw(st.sampled_from(["zeros", "circular", "replicate", "reflect"]))
    size = tuple(d * (k - 1) + draw(st.integers(3, 5)) for d, k in zip(dilation, kernel, strict=True))
    torch.manual_seed(draw(st.integers(0, 99)))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    model = KINDS[dimensions](
        inputs, outputs, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode
    ).double()
    assert_matches(model, [torch.randn(draw(st.integers(1, 4)), inputs, *size, dtype=torch.float64)])


@pytest.mark.parametrize(("channels", "side", "kernel"), [(3, 224, 3), (1, 400, 1)])
@pytest.mark.parametrize("value", [0.1, 0.3333, 1.7])
def test_blank_images_are_bounded(
    channels: int, side: int, kernel: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal terms round the same way each time: the sum and the product that was measured drift apart with the size."""
    monkeypatch.setattr(Convolution, "_keeps", False)
    geometry = Geometry(torch.Size((4, channels, kernel, kernel)), (1, 1), (kernel // 2,) * 2, (1, 1), 1)
    form = Convolution(torch.full((1, channels, side, side), 0.1), torch.full((1, 4, side, side), value), geometry)
    weights = 0.5 / form.squared_norms().sqrt()
    assert 0.48 < form.weighted_sum(weights, None).double().norm() <= 0.5
