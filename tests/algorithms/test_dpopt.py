"""DPOPT's noise: descent against the closed form, and Lemma 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.algorithms import Task, create
from adadp.algorithms.allocation import closed_form, descend
from adadp.algorithms.dpopt import Optimised
from adadp.probes import Vectors


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 4), sigma=st.floats(0.1, 50))
def test_descent_finds_what_the_lagrangian_gives(seed: int, spread: float, sigma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    bounds = 10.0 ** (spread * torch.randn(200, generator=generator, dtype=torch.float64).clamp(-2, 2) / 2)
    weights = 10.0 ** (spread * torch.randn(200, generator=generator, dtype=torch.float64).clamp(-2, 2))
    exact = closed_form(bounds, weights, sigma)
    found = descend(bounds, weights, sigma)
    assert float((bounds / found).square().sum()) <= 1 / sigma**2
    assert float((bounds / exact).square().sum()) == pytest.approx(1 / sigma**2)
    loss, best = float((weights * found.square()).sum()), float((weights * exact.square()).sum())
    assert best * (1 - 1e-9) <= loss <= best * 1.001
    torch.testing.assert_close(found, exact, rtol=5e-3, atol=0)


def test_a_warm_start_gets_there_too_and_zero_bounds_get_no_noise() -> None:
    bounds, weights = torch.rand(50) + 0.1, torch.rand(50) + 0.1
    first = descend(bounds, weights, 2.0)
    again = descend(bounds, 1.1 * weights.flip(0), 2.0, start=first)
    torch.testing.assert_close(again, closed_form(bounds, weights.flip(0), 2.0), rtol=1e-3, atol=0)
    bounds[:10] = 0
    found = descend(bounds, weights, 2.0)
    assert found[:10].eq(0).all()
    assert float((bounds[10:] / found[10:]).square().sum()) <= 0.25


@pytest.mark.parametrize("reading", ["sound", "published"])
def test_what_passes_the_box_is_hidden_by_the_noise(reading: str) -> None:
    """Lemma 1 at its worst: an example with every coordinate at its bound, at every step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    made = create("dpopt", reading)
    clipping = made.clipping(Task(lot=16, steps=8, probes=Vectors(4)))
    assert isinstance(clipping, Optimised)
    data = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    model, optimizer, lots = PrivacyEngine(seed=0).make_private(
        module=model, optimizer=made.optimizer(model.parameters()), data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=2.0, clipping=clipping,
    )  # fmt: skip
    shaped = False
    for _ in range(6):
        for batch, targets in lots:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
            if clipping.local:
                stddev = clipping.stddev(2.0)
                spent = sum(float((bound / stddev[name]).square().sum()) for name, bound in clipping.bounds.items())
                assert spent <= 0.25
                ratio = (stddev["weight"] / clipping.bounds["weight"]).flatten()
                shaped |= float(ratio.max() / ratio.min()) > 1.01
    assert shaped, "the noise is not that of a box of equal shares"
