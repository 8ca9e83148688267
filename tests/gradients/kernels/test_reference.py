"""The plain versions of passes over rows, against what they say they are."""

from __future__ import annotations

import math

import pytest
import torch

from adadp.gradients.kernels import kernel, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_rows_without_weight_are_zero_whatever_they_hold(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 3, 2)
    tensor[0], tensor[2, 1, 1] = math.nan, math.inf
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0]).to(dtype)
    found = reference.weighted(tensor, weights)
    assert found.dtype == torch.float32
    assert torch.equal(found[::2], torch.zeros(2, 3, 2))
    assert torch.equal(found[1], tensor[1] * float(weights[1]))
    assert torch.equal(found[3], tensor[3])
    same = reference.kept(tensor, weights)
    assert torch.equal(same[::2], torch.zeros(2, 3, 2))
    assert torch.equal(same[1::2], tensor[1::2])


def test_row_norms_neither_overflow_nor_vanish() -> None:
    rows = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0]])
    expected = torch.tensor([5e30, 5e-30, 0.0], dtype=torch.float64)
    torch.testing.assert_close(reference.row_norms(rows), expected, rtol=1e-6, atol=0.0)


def test_stored_gradients_are_clamped_and_measured() -> None:
    gradients = torch.tensor([[[3.0], [-4.0]], [[math.nan], [0.5]]])
    total, squares = reference.dense_clamped(gradients, torch.tensor([[1.0], [2.0]]), True)
    assert squares is not None
    assert total.flatten().tolist() == [1.0, -1.5]
    assert squares.flatten().tolist() == [9.0, 16.25]
    assert reference.dense_norms(gradients[:1]).tolist() == [25.0]
    assert reference.dense_norms(gradients[:1], torch.tensor([[2.0], [0.5]])).tolist() == [pytest.approx(40.0)]


@pytest.mark.parametrize("name", ["row_norms", "weighted", "kept"])
def test_they_are_taken_on_a_cpu(name: str) -> None:
    assert kernel(name, torch.zeros(1)) is getattr(reference, name)
