"""The paper's clipping as its text can be read, and why the lot reading protects nobody."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.algorithms import Task, create
from adadp.algorithms.published import LotLocal, SquaredAverage
from adadp.clipping import Local
from adadp.errors import NoGuaranteeError

TASK = Task(lot=8, steps=10)
torch.manual_seed(0)
INPUTS, LABELS = torch.randn(8, 3), torch.randint(2, (8,))


def trained(reading: str, steps: int, noise_multiplier: float = 1e-6, inputs: torch.Tensor = INPUTS):
    """Steps on all examples as one lot; with hardly any noise, what is released can be read."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = create("adadp", reading)
    clipping = made.clipping(TASK)
    engine = PrivacyEngine(seed=0)
    loader = DataLoader(TensorDataset(inputs, LABELS), batch_size=len(inputs))
    model, optimizer, lots = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=loader,
        noise_multiplier=noise_multiplier, clipping=clipping,
    )  # fmt: skip
    for _ in range(steps):
        for batch, targets in lots:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
    return engine, model, clipping


def raw_gradients() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    rows = []
    for x, y in zip(INPUTS, LABELS, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        rows.append(model.weight.grad.clone())
    return torch.stack(rows)


def test_the_example_reading_averages_squares_and_the_lot_reading_squares_the_average() -> None:
    rows = raw_gradients()
    for reading, expected in (("example", rows.square().mean(0)), ("lot", rows.mean(0).square())):
        _, _, clipping = trained(reading, 1)
        assert isinstance(clipping, Local)
        found = clipping.shape.mean_square("weight", torch.empty(2, 3))
        torch.testing.assert_close(found, 0.1 * expected, rtol=1e-4, atol=1e-8)  # (1 - gamma') of it, from zero


def test_the_lot_reading_clips_the_average() -> None:
    _, model, clipping = trained("lot", 2)
    assert clipping.local
    average = raw_gradients().mean(0)
    bound = 1.2 * (0.1 * average.square()).sqrt()
    torch.testing.assert_close(model.weight.grad, average.clamp(-bound, bound), rtol=1e-3, atol=1e-5)


def test_before_the_box_is_on_the_average_is_clipped_to_its_norm() -> None:
    clipping = LotLocal(0.5, source=SquaredAverage(), threshold=1e9)
    clipping.parameters, clipping.expected_lot = {"w": torch.zeros(2)}, 4.0
    bounded = clipping.complete({"w": torch.tensor([12.0, 16.0])})["w"] / 4
    torch.testing.assert_close(bounded, torch.tensor([0.3, 0.4]))


def test_one_example_moves_the_lot_reading_by_more_than_its_noise_is_made_for() -> None:
    """PAPER: a clipped average moves by up to 2 s_i where the noise is made for s_i / L."""
    clipping = LotLocal(1.0, source=SquaredAverage())
    clipping.parameters, clipping.expected_lot, clipping.local = {"w": torch.zeros(1)}, 100.0, True
    clipping.bounds = {"w": torch.tensor([0.01])}
    with_it = clipping.complete({"w": torch.tensor([-100.0])})["w"]
    without = clipping.complete({"w": torch.tensor([100.0])})["w"]
    assert float((with_it - without).abs()) == pytest.approx(100 * 2 * 0.01)


@pytest.mark.parametrize("reading", ["example", "lot"])
def test_no_epsilon_is_printed(reading: str) -> None:
    engine, _, _ = trained(reading, 1, noise_multiplier=8.0)
    found = engine.guarantee(1e-5)
    assert found.epsilon is None
    assert found.claimed_epsilon is not None
    with pytest.raises(NoGuaranteeError):
        engine.get_epsilon(1e-5)
