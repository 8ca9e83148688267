"""Cases of `test_triton.py`: every Triton kernel against the plain version, run with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from adadp.gradients.kernels import reference, triton_half_precision, triton_outer, triton_products, triton_rows
from adadp.gradients.kernels import with_triton as kernels
from adadp.gradients.kernels.reference import Float16Factor
from adadp.gradients.kernels.triton_products import TileBlocks, clamped, convolution_operands, norms
from adadp.gradients.kernels.triton_splits import most_parts, programs_per_tile, whole
from adadp.gradients.layers.convolution import Geometry

assert os.environ.get("TRITON_INTERPRET") == "1"


_patch = interpreter._patch_lang_tensor


def _patch_and_count(tensor: type, scope: interpreter._LangPatchScope) -> None:
    """Triton 3.6 takes an array of one element for a number, which NumPy 2.4 no longer does."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_and_count

CPU = torch.device("cpu")

VECTORS = [(7, 5, 3), (20, 60, 33), (1, 1, 1), (9, 1, 70), (9, 130, 1), (0, 4, 5), (70, 65, 64)]
SEQUENCES = [
    (3, 5, 7, 9), (2, 40, 20, 33), (4, 1, 6, 5), (3, 3, 1, 1), (2, 4, 1, 40), (2, 4, 40, 1),
    (0, 3, 4, 5), (3, 0, 4, 5), (2, 33, 130, 140),
]  # fmt: skip


def same(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def same_sums(found: reference.Sums, expected: reference.Sums) -> None:
    same(found[0], expected[0])
    same(found[1], expected[1])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bounds(*shape: int) -> Tensor:
    """About a third of the values of unit variance are larger; some bounds are zero."""
    bound = drawn(*shape, seed=7).abs() * 2
    return torch.where(bound < 0.2, 0.0, bound)


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("sizes", VECTORS, ids=str)
def test_outer_clamped(sizes: tuple[int, int, int], moments: bool) -> None:
    n, rows, columns = sizes
    outputs, inputs, bound = drawn(n, rows), drawn(n, columns, seed=1), bounds(rows, columns)
    found = kernels.outer_clamped(outputs, inputs, bound, moments)
    same_sums(found, reference.outer_clamped(outputs, inputs, bound, moments))


def test_outer_clamped_of_what_is_not_finite() -> None:
    outputs, inputs, bound = drawn(9, 6), drawn(9, 20, seed=1), bounds(6, 20)
    outputs[1, 2], outputs[3, 4], outputs[5, 0] = math.nan, math.inf, -math.inf
    inputs[2, 3], inputs[3, 5], inputs[6, 7] = math.nan, 0.0, math.inf
    found = kernels.outer_clamped(outputs, inputs, bound, True)
    assert not found[0].isnan().any()
    same_sums(found, reference.outer_clamped(outputs, inputs, bound, True))
    finite = torch.tensor([0, 4, 7, 8])
    bits = kernels.outer_clamped(outputs[finite], inputs[finite], bound)[0]
    outputs[~torch.isin(torch.arange(9), finite)] = math.nan  # the careful way adds the others as before
    torch.testing.assert_close(kernels.outer_clamped(outputs, inputs, bound)[0], bits, rtol=1e-6, atol=1e-6)


def test_the_careful_way_has_the_bits_of_the_quick_one() -> None:
    outputs, inputs, bound = drawn(9, 6), drawn(9, 20, seed=1), bounds(6, 20)
    outputs[4] = 0.0
    quick = kernels.outer_clamped(outputs, inputs, bound)[0]
    outputs[4] = math.nan
    assert torch.equal(kernels.outer_clamped(outputs, inputs, bound)[0], quick)


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("sizes", SEQUENCES, ids=str)
def test_products_clamped(sizes: tuple[int, int, int, int], moments: bool) -> None:
    n, tokens, rows, columns = sizes
    outputs, inputs, bound = drawn(n, tokens, rows), drawn(n, tokens, columns, seed=1), bounds(rows, columns)
    found = kernels.products_clamped(outputs, inputs, bound, moments)
    same_sums(found, reference.products_clamped(outputs, inputs, bound, moments))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sizes", SEQUENCES, ids=str)
def test_products_norms(sizes: tuple[int, int, int, int], scaled: bool) -> None:
    n, tokens, rows, columns = sizes
    outputs, inputs = drawn(n, tokens, rows), drawn(n, tokens, columns, seed=1)
    scale = drawn(rows, columns, seed=2) if scaled else None
    found = kernels.products_norms(outputs, inputs, scale)
    assert found.dtype == torch.float64
    assert found.shape == (n,)
    same(found, reference.products_norms(outputs, inputs, scale))


def test_products_of_what_is_not_finite() -> None:
    outputs, inputs, bound = drawn(6, 5, 6), drawn(6, 5, 20, seed=1), bounds(6, 20)
    outputs[1, 2, 3], inputs[2, 1, 7], outputs[4, 0, 0], inputs[4, 0, 3] = math.nan, math.inf, -math.inf, 0.0
    found = kernels.products_clamped(outputs, inputs, bound, True)
    assert not found[0].isnan().any()
    same_sums(found, reference.products_clamped(outputs, inputs, bound, True))
    finite = kernels.products_norms(outputs, inputs).isfinite()
    assert finite.tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18])
def test_squares_neither_vanish_nor_overflow(size: float) -> None:
    outputs, inputs = drawn(3, 4, 6) * size, drawn(3, 4, 5, seed=1)
    exact = reference.products_norms(outputs.double(), inputs.double())
    torch.testing.assert_close(kernels.products_norms(outputs, inputs), exact, rtol=1e-5, atol=0.0)
    large = (outputs / size * 1e38).abs(), (inputs * 1e3).abs()  # of one sign: infinities do not cancel
    assert kernels.products_norms(*large).isposinf().all()


@pytest.mark.parametrize("room", [1, 4 * 30 * 4, 2**30])
def test_products_of_any_number_of_examples_at_a_time(room: int) -> None:
    outputs, inputs, bound = drawn(11, 4, 6), drawn(11, 4, 5, seed=1), bounds(6, 5)
    for moments in (False, True):
        expected = reference.products_clamped(outputs, inputs, bound, moments)
        same_sums(triton_rows.products_clamped(outputs, inputs, bound, moments, room=room), expected)
    for scale in (None, bound):
        expected_norms = reference.products_norms(outputs, inputs, scale)
        same(triton_rows.products_norms(outputs, inputs, scale, room=room), expected_norms)


DENSE = [(3, 7), (1, 1), (5, 1), (0, 4), (4, 0), (2, 4096), (3, 9001), (70, 3, 20), (200, 5), (9, 2, 3, 4), (6,)]


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_dense(shape: tuple[int, ...]) -> None:
    gradients, bound = drawn(*shape), bounds(*shape[1:])
    for moments in (False, True):
        found = kernels.dense_clamped(gradients, bound, moments)
        same_sums(found, reference.dense_clamped(gradients, bound, moments))
    for scale in (None, bound) if len(shape) > 1 else (None,):
        norms_found, expected = kernels.dense_norms(gradients, scale), reference.dense_norms(_matrix(gradients), scale)
        torch.testing.assert_close(norms_found, expected.to(torch.float64), rtol=1e-6, atol=0.0)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim > 1 else tensor.unsqueeze(1)


@pytest.mark.parametrize("shape", [shape for shape in DENSE if len(shape) == 2], ids=str)
def test_row_norms(shape: tuple[int, int]) -> None:
    rows = drawn(*shape)
    assert kernels.row_norms(rows).dtype == torch.float64
    torch.testing.assert_close(kernels.row_norms(rows), reference.row_norms(rows), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(kernels.row_norms(rows[:, ::2]), reference.row_norms(rows[:, ::2]), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(kernels.row_norms(rows[::2]), reference.row_norms(rows[::2]), rtol=1e-14, atol=0.0)


def test_norms_of_rows_of_every_size() -> None:
    rows = drawn(6, 5000)
    rows[0], rows[1] = rows[0] * 1e-38, rows[1] * 1e35
    rows[2, 4999], rows[3, 1], rows[4] = math.nan, -math.inf, 0.0
    found = kernels.row_norms(rows)
    assert found[4] == 0.0
    torch.testing.assert_close(found, reference.row_norms(rows), rtol=1e-14, atol=0.0, equal_nan=True)
    alone = torch.cat([kernels.row_norms(rows[n : n + 1]) for n in range(6)])
    torch.testing.assert_close(found, alone, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_weighted_and_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, weights = drawn(*shape), drawn(shape[0], seed=1)
    weights[::2], tensor[::2], tensor[1::4] = 0.0, math.nan, math.inf
    for name in ("weighted", "kept"):
        found = getattr(kernels, name)(tensor, weights.to(dtype))
        expected = getattr(reference, name)(tensor, weights.to(dtype))
        assert not found.isnan().any()
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert torch.equal(kernels.kept(tensor, weights)[1::2], tensor[1::2])


def test_dense_of_what_is_not_contiguous() -> None:
    gradients, bound = drawn(6, 10, 8)[::2, ::3].mT, bounds(4, 8).T
    same_sums(kernels.dense_clamped(gradients, bound, True), reference.dense_clamped(gradients, bound, True))
    same(kernels.dense_norms(gradients, bound), reference.dense_norms(gradients, bound))
    weights = drawn(6)[::2]
    same(kernels.weighted(gradients, weights), reference.weighted(gradients, weights))


def test_dense_of_what_is_not_finite() -> None:
    gradients, bound = drawn(40, 30), bounds(30)
    gradients[3, 4], gradients[20, 5], gradients[39, 6] = math.nan, math.inf, -math.inf
    found = kernels.dense_clamped(gradients, bound, True)
    assert not found[0].isnan().any()
    same_sums(found, reference.dense_clamped(gradients, bound, True))


@pytest.mark.parametrize(
    "blocks", [TileBlocks(16, 16, 16, 4, 2), TileBlocks(32, 16, 32, 4, 2), TileBlocks(16, 64, 16, 4, 2)]
)
def test_tiles_of_any_size(blocks: TileBlocks) -> None:
    way = geometry((40, 6, 3, 3), (1, 1), (1, 1), (1, 1))
    outputs, inputs, bound = drawn(3, 40, 7, 5), drawn(3, 6, 7, 5, seed=1), bounds(40, 6, 3, 3)
    operands = convolution_operands(outputs, inputs, way)
    expected = reference.convolution_clamped(outputs, inputs, way, bound, True)
    same_sums(clamped(operands, bound, True, "ieee", blocks), expected)
    same(norms([operands], bound, "ieee", blocks).sum(1), reference.convolution_norms(outputs, inputs, way, bound))


def same_halves(found: Float16Factor, expected: Float16Factor, tokens: int) -> None:
    """The same values and units; beyond the tokens and columns that there are, zeros."""
    assert found.size == expected.size
    assert torch.equal(found.unit, expected.unit)
    assert torch.equal(found.values[:, :tokens, : found.size], expected.values)
    assert not found.values[:, tokens:].any()
    assert not found.values[:, :, found.size :].any()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e30, 1e-37, 1e-44])
@pytest.mark.parametrize("sizes", [(3, 16, 7), (2, 40, 130), (2, 33, 1), (0, 20, 5)], ids=str)
def test_halves(sizes: tuple[int, int, int], scale: float) -> None:
    tensor = drawn(*sizes) * scale
    lengths = reference.row_norms(tensor.flatten(1))
    found = kernels.halves(tensor, lengths)
    same_halves(found, reference.halves(tensor, lengths), sizes[1])
    whole = found.values[:, : sizes[1], : sizes[2]].double() * found.unit.double().view(-1, 1, 1)
    lost = (whole - tensor.double()).flatten(1).norm(dim=1)
    assert (lost <= lengths * 2**-11 + 2.0**-151 * math.sqrt(max(1, tensor[:1].numel()))).all()
    assert found.values.abs().max() < 2**15 if found.values.numel() else True


def test_halves_of_what_is_not_finite() -> None:
    tensor = drawn(5, 20, 6)
    tensor[1, 2, 3], tensor[2, 0, 0], tensor[3] = math.nan, -math.inf, 0.0
    lengths = reference.row_norms(tensor.flatten(1))
    found = kernels.halves(tensor, lengths)
    same_halves(found, reference.halves(tensor, lengths), 20)
    assert found.values.isfinite().all()
    assert found.unit.ne(0).tolist() == [True, False, False, True, True]


HALVED = [(3, 16, 7, 9), (2, 40, 20, 33), (5, 64, 1, 130), (0, 16, 4, 5), (2, 33, 130, 140)]


@pytest.mark.parametrize("sizes", HALVED, ids=str)
def test_products_of_halves(sizes: tuple[int, int, int, int]) -> None:
    n, tokens, rows, columns = sizes
    factors = drawn(tokens, n, rows).transpose(0, 1) * 1e-7, drawn(n, tokens, 2 * columns, seed=1)[..., ::2] * 1e9
    lengths = [reference.row_norms(factor.flatten(1)) for factor in factors]
    own = [kernels.halves(factor, length) for factor, length in zip(factors, lengths, strict=True)]
    plain = [reference.halves(factor, length) for factor, length in zip(factors, lengths, strict=True)]
    for scale in (None, drawn(rows, columns, seed=2).T.contiguous().T, torch.zeros(rows, columns)):
        found, expected = (
            version.halves_bounds(*both, 1e-4, scale) for version, both in ((kernels, own), (reference, plain))
        )
        torch.testing.assert_close(found, expected, rtol=2**-15, atol=0.0)
    weights, keep = drawn(n, seed=3).square().double() / 100, torch.arange(n) != 1
    for chosen in (None, keep):
        sums, other = (
            version.halves_sum(*both, weights, chosen) for version, both in ((kernels, own), (reference, plain))
        )
        torch.testing.assert_close(sums, other, rtol=2e-5, atol=2e-3)
    bound = bounds(rows, columns) * 1e3
    for moments in (False, True):
        sums, other = (
            version.halves_clamped(*both, 0.5, keep, bound, moments)
            for version, both in ((kernels, own), (reference, plain))
        )
        torch.testing.assert_close(sums[0], other[0], rtol=2e-5, atol=0.2)
        assert (sums[1] is None) == (other[1] is None) == (not moments)
        if sums[1] is not None and other[1] is not None:
            torch.testing.assert_close(sums[1], other[1], rtol=2e-5, atol=1.0)


def test_bounds_of_halves_too_large_to_be_weighted() -> None:
    outputs, inputs = drawn(4, 16, 3), drawn(4, 16, 5, seed=1)
    inputs[1], outputs[1] = 1e33, 0.0
    inputs[2] = 3e38
    factors = [kernels.halves(tensor, reference.row_norms(tensor.flatten(1))) for tensor in (outputs, inputs)]
    assert kernels.halves_bounds(*factors, 1e-4).isfinite().tolist() == [True, False, False, True]
    assert kernels.halves_bounds(*factors, 1e-4, torch.zeros(3, 5)).isfinite().tolist() == [True, False, False, True]
    everybody = torch.ones(4, dtype=torch.bool)
    assert kernels.halves_clamped(*factors, 1e38, everybody, torch.ones(3, 5))[0].isfinite().all()


def test_inputs_that_are_not_contiguous() -> None:
    outputs, inputs = drawn(6, 4, 12).mT[::2, ::3], drawn(10, 4, 6, seed=1).permute(2, 1, 0)[::2]
    bound = bounds(10, 4).T
    expected = reference.products_clamped(outputs, inputs, bound, True)
    same_sums(kernels.products_clamped(outputs, inputs, bound, True), expected)
    same(kernels.products_norms(outputs, inputs, bound), reference.products_norms(outputs, inputs, bound))
    outputs, inputs = outputs[:, 0], inputs[:, 0]
    expected = reference.outer_clamped(outputs, inputs, bound, True)
    same_sums(kernels.outer_clamped(outputs, inputs, bound, True), expected)


def geometry(
    weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> Geometry:
    return Geometry(torch.Size(weight), tuple(stride), tuple(padding), tuple(dilation), groups)


CONVOLUTIONS = {
    "3x3": ((2, 5, 8, 8), geometry((7, 5, 3, 3), (1, 1), (1, 1), (1, 1))),
    "stride 2": ((2, 4, 9, 7), geometry((6, 4, 3, 3), (2, 2), (1, 1), (1, 1))),
    "1x1": ((2, 6, 5, 5), geometry((17, 6, 1, 1), (1, 1), (0, 0), (1, 1))),
    "1x1, stride 2": ((2, 6, 6, 6), geometry((4, 6, 1, 1), (2, 2), (0, 0), (1, 1))),
    "1x1, padded": ((2, 3, 4, 4), geometry((4, 3, 1, 1), (1, 1), (2, 1), (1, 1))),
    "5x5": ((2, 3, 9, 9), geometry((20, 3, 5, 5), (1, 1), (2, 2), (1, 1))),
    "uneven": ((2, 4, 11, 6), geometry((6, 2, 3, 2), (2, 1), (2, 1), (2, 3), 2)),
    "depthwise": ((2, 4, 6, 6), geometry((8, 1, 3, 3), (1, 1), (1, 1), (1, 1), 4)),
    "no padding": ((2, 3, 7, 8), geometry((5, 3, 3, 3), (1, 1), (0, 0), (1, 1))),
    "one place": ((2, 3, 3, 3), geometry((5, 3, 3, 3), (1, 1), (0, 0), (1, 1))),
    "one line": ((2, 3, 3, 9), geometry((5, 3, 3, 3), (1, 1), (0, 1), (1, 1))),
    "no examples": ((0, 3, 6, 6), geometry((5, 3, 3, 3), (1, 1), (1, 1), (1, 1))),
    "1d": ((2, 4, 20), geometry((6, 4, 5), (2,), (2,), (1,))),
    "1d, dilated, grouped": ((2, 4, 20), geometry((6, 2, 3), (1,), (4,), (4,), 2)),
    "3d": ((2, 2, 4, 4, 4), geometry((3, 2, 2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
}


def convolution(name: str) -> tuple[Tensor, Tensor, Geometry]:
    shape, way = CONVOLUTIONS[name]
    inputs = drawn(*shape)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(shape) - 3]
    sizes = convolve(inputs, torch.zeros(way.weight), None, way.stride, way.padding, way.dilation, way.groups).shape
    return drawn(*sizes, seed=1), inputs, way


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_clamped(name: str) -> None:
    outputs, inputs, way = convolution(name)
    bound = bounds(*way.weight)
    for moments in (False, True):
        found = kernels.convolution_clamped(outputs, inputs, way, bound, moments)
        same_sums(found, reference.convolution_clamped(outputs, inputs, way, bound, moments))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_norms(name: str) -> None:
    outputs, inputs, way = convolution(name)
    for scale in (None, drawn(*way.weight, seed=2)):
        found = kernels.convolution_norms(outputs, inputs, way, scale)
        assert found.dtype == torch.float64
        same(found, reference.convolution_norms(outputs, inputs, way, scale))


def test_convolution_of_what_is_not_finite_or_contiguous() -> None:
    outputs, inputs, way = convolution("3x3")
    outputs, inputs = outputs.to(memory_format=torch.channels_last), inputs.transpose(2, 3).contiguous().transpose(2, 3)
    inputs[0, 1, 2, 3], outputs[1, 2, 0, 0] = math.nan, math.inf
    bound = bounds(*way.weight)
    found = kernels.convolution_clamped(outputs, inputs, way, bound, True)
    assert not found[0].isnan().any()
    same_sums(found, reference.convolution_clamped(outputs, inputs, way, bound, True))
    assert not kernels.convolution_norms(outputs, inputs, way).isfinite().any()


def shared_by(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, each: int) -> None:
    """As many programs for a tile as there are times `each` examples."""
    monkeypatch.setattr(kernel, "programs_per_tile", lambda tiles, n, *rest, **memory: (-(-n // each), each))


@pytest.mark.parametrize("each", [1, 2, 4, 5, 9, 12])
def test_vectors_shared_by_any_number_of_programs(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    outputs, inputs, bound = drawn(9, 70), drawn(9, 66, seed=1), bounds(70, 66)
    outputs[4, 3], inputs[6, 5] = math.nan, math.inf
    shared_by(monkeypatch, triton_outer, each)
    for moments in (False, True):
        found = kernels.outer_clamped(outputs, inputs, bound, moments)
        same_sums(found, reference.outer_clamped(outputs, inputs, bound, moments))


@pytest.mark.parametrize("each", [1, 2, 3, 5, 7])
def test_halves_shared_by_any_number_of_programs(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    factors = drawn(5, 40, 20), drawn(5, 40, 33, seed=1)
    factors[0][3, 1, 1] = math.nan
    lengths = [reference.row_norms(factor.flatten(1)) for factor in factors]
    both = [kernels.halves(factor, length) for factor, length in zip(factors, lengths, strict=True)]
    plain = [reference.halves(factor, length) for factor, length in zip(factors, lengths, strict=True)]
    shared_by(monkeypatch, triton_half_precision, each)
    weights, keep, bound = drawn(5, seed=3).double(), torch.arange(5) != 1, bounds(20, 33) * 3
    same(kernels.halves_sum(*both, weights, keep), reference.halves_sum(*plain, weights, keep))
    for moments in (False, True):
        found = kernels.halves_clamped(*both, 0.5, keep, bound, moments)
        same_sums(found, reference.halves_clamped(*plain, 0.5, keep, bound, moments))
    measured, expected = (v.halves_bounds(*f, 1e-4) for v, f in ((kernels, both), (reference, plain)))
    torch.testing.assert_close(measured, expected, rtol=2**-15, atol=0.0)


@pytest.mark.parametrize("each", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["3x3", "uneven", "one place", "1d"])
def test_convolution_of_examples_one_after_the_other(monkeypatch: pytest.MonkeyPatch, name: str, each: int) -> None:
    """One that is not finite leaves nothing behind for the next in its program."""
    shared_by(monkeypatch, triton_products, each)
    (_, *shape), way = CONVOLUTIONS[name]
    outputs = drawn(5, *convolution(name)[0].shape[1:])
    inputs, bound = drawn(5, *shape, seed=1), bounds(*way.weight)
    outputs[2, 0].flatten()[0] = math.nan
    found = kernels.convolution_clamped(outputs, inputs, way, bound, True)
    same_sums(found, reference.convolution_clamped(outputs, inputs, way, bound, True))
    for scale in (None, bound):
        lengths, expected = (v.convolution_norms(outputs, inputs, way, scale) for v in (kernels, reference))
        assert lengths.isfinite().tolist() == [True, True, False, True, True]
        same(lengths[lengths.isfinite()], expected[expected.isfinite()])


def test_the_same_bits_each_time() -> None:
    outputs, inputs, way = convolution("uneven")
    bound = bounds(*way.weight)
    runs = [kernels.convolution_clamped(outputs, inputs, way, bound, True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))  # type: ignore[arg-type]
    outputs, inputs, bound = drawn(40, 6), drawn(40, 5, seed=1), bounds(6, 5)
    sums = [kernels.outer_clamped(outputs, inputs, bound)[0] for _ in range(2)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("examples", [1, 3, 16, 600, 8192])
@pytest.mark.parametrize("tiles", [1, 16, 108, 400])
def test_every_example_has_one_program(tiles: int, examples: int) -> None:
    splits, each = programs_per_tile(tiles, examples, 4, 8, 4, CPU)
    assert each % 4 == 0
    assert (splits - 1) * each < examples <= splits * each
    if examples >= 600:
        assert tiles * splits >= 132  # every multiprocessor has something to do


@pytest.mark.parametrize("part", [1, 7, 60_000, 10**7])
@pytest.mark.parametrize("examples", [1, 64, 600, 8192])
@pytest.mark.parametrize("tiles", [1, 16, 400])
def test_parts_of_a_sum_take_no_more_memory_than_what_is_summed(tiles: int, examples: int, part: int) -> None:
    kept = 1060
    splits, each = programs_per_tile(tiles, examples, 4, 8, 4, CPU, kept=kept, part=part)
    assert (splits - 1) * each < examples <= splits * each
    assert splits == 1 or splits * part <= examples * kept
    free, _ = programs_per_tile(tiles, examples, 4, 8, 4, CPU)
    assert splits == free if free == 1 or free * part <= examples * kept else splits < free
    most = most_parts(examples, kept, part)
    assert most == 1 or most * part <= examples * kept < (most + 1) * part


@pytest.mark.parametrize("moments", [False, True])
def test_vectors_leave_half_of_their_memory(monkeypatch: pytest.MonkeyPatch, moments: bool) -> None:
    """A sum larger than its vectors has one part, which is the sum; squares are counted as sums are."""
    made: list[int] = []
    monkeypatch.setattr(triton_outer, "whole", lambda parts: made.append(parts.numel()) or whole(parts))
    for n, rows, columns in ((40, 100, 90), (200, 66, 8), (200, 8, 6)):
        made.clear()
        found = kernels.outer_clamped(drawn(n, rows), drawn(n, columns, seed=1), bounds(rows, columns), moments)
        assert len(made) == 1 + moments
        assert sum(made) <= max(n * (rows + columns) // 2, len(made) * rows * columns)
        assert all(part.untyped_storage().nbytes() == 4 * rows * columns for part in found if part is not None)
        assert (made[0] > rows * columns) == (n == 200)


def test_how_examples_are_shared_is_planned() -> None:
    """As a lot of 600 would be, however many were drawn; and no plan is too large to be made."""
    alone = programs_per_tile(16, 600, 4, 8, 4, CPU, kept=1060, part=240_000)
    for drawn_ in (1, 550, 600, 650, 2000):
        splits, each = programs_per_tile(16, drawn_, 4, 8, 4, CPU, planned=600, kept=1060, part=240_000)
        assert each == alone[1]
        assert (splits - 1) * each < drawn_ <= splits * each
    assert programs_per_tile(1, 600, 8, 1, 1, CPU, planned=10**9)[0] == 1


def test_more_entries_than_32_bits_count_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_ENTRIES", 10)
    for name in ("outer_clamped", "dense_clamped", "dense_norms", "products_norms", "products_clamped"):
        monkeypatch.setattr(reference, name, lambda *given, name=name: name)
    outputs, inputs, bound = torch.randn(3, 2, 4), torch.randn(3, 2, 5), torch.rand(4, 5)
    assert kernels.outer_clamped(outputs[:, 0], inputs[:, 0], bound) == "outer_clamped"
    assert kernels.dense_clamped(torch.randn(3, 4, 5), bound) == "dense_clamped"
    assert kernels.dense_norms(torch.randn(3, 4, 5)) == "dense_norms"
    assert kernels.products_norms(outputs, inputs) == "products_norms"
    assert kernels.products_clamped(outputs, inputs, bound) == "products_clamped"
