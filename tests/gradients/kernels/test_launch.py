"""Direct launches on a GPU: what Triton specialises on is told apart, and a group's results are those of each alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from adadp.gradients.kernels import reference

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from adadp.gradients.forms import together
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.kernels import triton_launch, with_triton
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.gradients.rounding import norms, norms_of


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def same_norms(found: Tensor, tensor: Tensor) -> None:
    torch.testing.assert_close(found, reference.row_norms(tensor), rtol=1e-12, atol=0.0)


def test_every_length_alignment_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order in which each launch would be wrong with a kernel of the one before."""
    monkeypatch.setattr(triton_launch, "_compiled", {})
    for _ in range(3):
        for count in (16, 1, 3, 1, 32, 17):
            for length in (64, 1, 63, 16, 5000, 2, 8192):
                whole = drawn(count * (length + 3) + 5)
                for offset, stride in ((0, length), (1, length), (0, length + 3), (2, length + 1), (4, length)):
                    rows = whole.as_strided((count, length), (stride, 1), offset)
                    same_norms(with_triton.row_norms(rows), rows)
    assert triton_launch._compiled, "nothing was launched directly"


def test_what_is_not_known_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_compiled", {})
    rows = drawn(5, 70)
    monkeypatch.setattr(triton_launch, "_KNOWN", False)
    same_norms(with_triton.row_norms(rows), rows)
    assert not triton_launch._compiled
    monkeypatch.setattr(triton_launch, "_KNOWN", True)
    with pytest.raises(ValueError, match="cpu tensor"):
        with_triton.weighted(rows, torch.ones(5))
    same_norms(with_triton.row_norms(rows), rows)
    listening: list[Any] = []
    hooks = triton_launch.triton.knobs.runtime.launch_enter_hook
    hooks.add(listening.append)
    try:
        same_norms(with_triton.row_norms(rows), rows)
    finally:
        hooks.remove(listening.append)
    assert len(listening) == 2


def test_other_streams_threads_and_graphs() -> None:
    rows = drawn(40, 5000)
    expected = reference.row_norms(rows)
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**6)
            late = rows.clone()  # after the sleep, on this stream alone
            found = with_triton.row_norms(late)
        stream.synchronize()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(with_triton.row_norms(rows)))
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0], expected, rtol=1e-12, atol=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = with_triton.row_norms(rows)
    rows.mul_(2)
    graph.replay()
    torch.testing.assert_close(recorded, 2 * expected, rtol=1e-12, atol=0.0)


def test_norms_of_many() -> None:
    shapes = [(6, 40, 9), (6, 360), (6, 40, 9), (6, 3, 5, 5), (6, 1), (6,), (6, 0, 3), (6, 33)]
    tensors = [drawn(*shape) for shape in shapes] + [drawn(6, 360) for _ in range(40)]
    tensors += [drawn(6, 5, 5, 3).permute(0, 3, 1, 2), drawn(6, 361)[:, 1:], drawn(6, 4).double()]
    for tensor, found in zip(tensors, norms_of(tensors), strict=True):
        torch.testing.assert_close(found, norms(tensor), rtol=0.0, atol=0.0)
        truth = tensor.double().reshape(6, -1).norm(dim=1)
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-150)


def linears(many: int) -> dict[str, PerExample]:
    """Layers of one shape, with others between; one example of one layer is not finite, one is huge."""
    torch.manual_seed(0)
    forms: dict[str, PerExample] = {}
    for layer in range(many):
        inputs, outputs = drawn(5, 100, 70), drawn(5, 100, 130) * 10.0 ** (layer - 5)
        if layer == 1:
            inputs[2, 3, 3], inputs[3] = float("nan"), inputs[3] * 1e15
        forms[f"{layer}"] = Products(inputs, outputs)
        forms[f"{layer} wide"] = Products(drawn(5, 100, 200), outputs)
        forms[f"{layer} dense"] = Dense(drawn(5, 50, 400))
    return forms


@pytest.mark.parametrize("many", [1, 2, 19])
def test_a_group_is_its_members(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        group, alone = linears(many), linears(many)
        found = dict(zip(group, together.squared_norms(list(group.values())), strict=True))
        for name, form in alone.items():
            assert not isinstance(form, Products) or form._way == "half"
            torch.testing.assert_close(found[name], form.squared_norms(), rtol=0.0, atol=0.0, equal_nan=True)
        weights = torch.rand(5, device="cuda", dtype=torch.float64)
        keep = torch.tensor([True, True, False, True, False], device="cuda")
        for names in (list(group), list(group)[::2]):
            sums = together.weighted_sums({name: group[name] for name in names}, weights, keep)
            assert list(sums) == names
            for name in names:
                expected = alone[name].weighted_sum(weights, keep)
                assert sums[name].isfinite().all()
                torch.testing.assert_close(sums[name], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("scaled", [False, True])
def test_bounds_of_convolutions(scaled: bool) -> None:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size((24, 10, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    outputs, inputs = drawn(6, 24, 20, 20), drawn(6, 10, 20, 20)
    outputs[0] = 0
    inputs[1, 0, 0, 0], inputs[2] = float("nan"), 1e33
    inputs[3], outputs[3] = 1e28, 1e28
    inputs[3, 0], inputs[4, :, ::2], inputs[4, :, 1::2] = -1e28, 1.0, -1.0
    scale = drawn(24, 10, 3, 3) if scaled else None
    form = Convolution(inputs, outputs, geometry)
    found = form._measured(scale)
    expected = reference.convolution_bounds([outputs], [inputs], geometry, form.lengths[:2], form._rounding, scale)
    assert found.isfinite().tolist() == expected.isfinite().tolist()
    assert found.isfinite().tolist()[:3] == [True, False, False]
    finite = expected.isfinite()
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-2, atol=0.0)
    assert found[0] == 0


def test_weights_and_keep_of_any_dtype() -> None:
    rows = drawn(6, 77)
    rows[1], rows[4] = float("nan"), float("inf")
    keep = torch.tensor([True, False, True, True, False, True], device="cuda")
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 1e-50], device="cuda", dtype=torch.float64)
    for given in (weights, weights.float()):
        for mask in (keep, keep.float(), keep.double()):
            expected = reference.weighted(rows, given, mask)
            torch.testing.assert_close(with_triton.weighted(rows, given, mask), expected, rtol=0.0, atol=0.0)
            torch.testing.assert_close(with_triton.kept(rows, mask), reference.kept(rows, mask), rtol=0.0, atol=0.0)


def test_convolutions_that_are_alike() -> None:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size((24, 10, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    factors = [(drawn(6, 10, 20, 20), drawn(6, 24, 20, 20) * 10.0**layer) for layer in range(18)]
    factors[1][0][2, 0, 0, 0] = float("nan")
    group, alone = ([Convolution(*pair, geometry, planned=6) for pair in factors] for _ in range(2))
    for found, form in zip(together.squared_norms(group), alone, strict=True):
        torch.testing.assert_close(found, form.squared_norms(), rtol=0.0, atol=0.0, equal_nan=True)
