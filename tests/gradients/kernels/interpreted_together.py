"""More cases of `test_triton.py`: kernels that work on several tensors at once, and those of normalisations."""

from __future__ import annotations

import math

import pytest
import torch
from gradients.kernels.interpreted import CONVOLUTIONS, convolution, drawn, same

from adadp.gradients.kernels import reference
from adadp.gradients.kernels import with_triton as kernels


@pytest.mark.parametrize("many", [1, 2, 16])
@pytest.mark.parametrize("shape", [(3, 40), (2, 5000), (5, 1), (0, 4)])
def test_norms_of_several(shape: tuple[int, int], many: int) -> None:
    tensors = [drawn(*shape, seed=seed) for seed in range(many)]
    found, expected = (version.alike_norms(tensors) for version in (kernels, reference))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)


def test_more_than_a_kernel_takes() -> None:
    with pytest.raises(ValueError, match="17 tensors"):
        kernels.alike_norms([drawn(2, 3)] * 17)


@pytest.mark.parametrize("keep", [None, torch.tensor([True, False, True])])
@pytest.mark.parametrize("many", [2, 5])
def test_halves_of_several(many: int, keep: torch.Tensor | None) -> None:
    outputs, inputs = ([drawn(3, 40, size, seed=size + seed) for seed in range(many)] for size in (20, 130))
    outputs[1][1, 0, 0], inputs[1] = math.nan, inputs[1] * 1e9
    weights = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    results = []
    for version in (kernels, reference):
        lengths = [torch.cat([reference.row_norms(t.flatten(1)) for t in factor]) for factor in (outputs, inputs)]
        group = [version.alike_halves(*pair, 3) for pair in zip((outputs, inputs), lengths, strict=True)]
        bounds, sums = version.halves_bounds(*group, 1e-4), version.halves_sum(*group, weights, keep)
        assert sums.shape == (many, 20, 130)
        for place in range(many):
            alone = [factor.of(place) for factor in group]
            torch.testing.assert_close(bounds[3 * place : 3 * place + 3], version.halves_bounds(*alone, 1e-4))
            same(sums[place], version.halves_sum(*alone, weights, keep))
        results.append(bounds)
    torch.testing.assert_close(*results, rtol=2**-14, atol=0.0)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 12, 5, 7), 4), ((2, 6, 40), 1), ((2, 5), 5), ((1, 3, 1), 1), ((0, 4, 3), 2), ((2, 2, 1100), 2)],
)
def test_group_norm_sums(shape: tuple[int, ...], groups: int) -> None:
    inputs, outputs = 3 + drawn(*shape), drawn(*shape, seed=1)
    found = kernels.group_norm_sums(outputs, inputs, groups, 1e-5)
    exact = reference.group_norm_sums(outputs.double(), inputs.double(), groups, 1e-5)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("planned", [None, 1, 300])
@pytest.mark.parametrize("shape", [(3, 40, 24), (1, 1, 5), (2, 7, 1), (0, 3, 4), (2, 0, 4), (2, 3, 1300)])
def test_layer_norm_sums(shape: tuple[int, int, int], planned: int | None) -> None:
    inputs, outputs = 3 + drawn(*shape), drawn(*shape, seed=1)
    found = kernels.layer_norm_sums(outputs, inputs, 1e-5, planned)
    exact = reference.layer_norm_sums(outputs.double(), inputs.double(), 1e-5)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_group_norm_of_what_is_not_finite() -> None:
    inputs, outputs = drawn(5, 4, 9), drawn(5, 4, 9, seed=1)
    inputs[1, 0, 0], inputs[2, 2, 1], outputs[3, 1, 1] = math.nan, math.inf, math.nan
    weight, bias = kernels.group_norm_sums(outputs, inputs, 2, 1e-5)
    assert weight.isfinite().all(1).tolist() == [True, False, False, False, True]
    assert bias.isfinite().all(1).tolist() == [True, True, True, False, True]
    weight, bias = kernels.layer_norm_sums(outputs, inputs, 1e-5)
    assert weight.isfinite().all(1).tolist() == [True, False, False, False, True]
    assert bias.isfinite().all(1).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("name", ["3x3", "uneven", "1d", "no examples", "3d"])
def test_convolution_bounds(name: str, many: int) -> None:
    (_, inputs, way), scale = convolution(name), drawn(*CONVOLUTIONS[name][1].weight, seed=2)
    outputs = [drawn(*convolution(name)[0].shape, seed=seed) for seed in range(many)]
    inputs = [inputs * (1 + place) for place in range(many)]
    if outputs[0].numel():
        inputs[-1][0].flatten()[0], outputs[-1][1] = math.nan, 1e33
    lengths = [torch.cat([reference.row_norms(t.flatten(1)) for t in factor]) for factor in (outputs, inputs)]
    for by in (None, scale):
        found, expected = (
            version.convolution_bounds(outputs, inputs, way, (lengths[0], lengths[1]), 1e-3, by, 2)
            for version in (kernels, reference)
        )
        assert found.dtype == torch.float64
        assert found.isfinite().tolist() == expected.isfinite().tolist()
        assert found.isfinite().tolist()[-2:] == [False, False] or not len(outputs[0])
        torch.testing.assert_close(found[found.isfinite()], expected[found.isfinite()], rtol=1e-4, atol=0.0)
