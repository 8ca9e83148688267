"""A mean loss that is released beside the gradient: one coordinate of one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, PrivacyEngine, Released
from adadp.clipping import Adaptive, Clipping, Flat, PaidLoss, PerLayer
from adadp.errors import ConfigurationError
from adadp.mechanism.observation import Unnoised
from adadp.shapes import Paid

MOST, NOISE = 4.0, 1.5


def made_private(
    clipping: Clipping, inputs: Tensor, targets: Tensor, noise: float = NOISE, **more: Any
) -> tuple[nn.Module, Any, Any, PrivacyEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = PrivacyEngine(seed=1)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"noise_multiplier": noise, "clipping": clipping, **more}
    return *engine.make_private(module=model, optimizer=optimizer, data_loader=data, **settings), engine


def step(
    model: nn.Module, optimizer: Any, loader: Any, change: Callable[[Tensor], Tensor] = lambda losses: losses
) -> None:
    for inputs, targets in loader:
        optimizer.zero_grad()
        optimizer.backward(change((model(inputs) - targets).square().mean(1)))
        optimizer.step()


class Sums:
    """Takes down what one lot's sums are in units of their noise."""

    def __init__(self) -> None:
        self.lengths: list[float] = []

    def noising(self, seen: Unnoised) -> None:
        scaled = [(value / seen.stddev[name]).double().flatten() for name, value in seen.sums.items()]
        self.lengths.append(float(torch.cat(scaled).norm() * seen.noise_multiplier))

    def noised(self, seen: Unnoised, noisy: Any) -> None: ...

    def stepped(self, lot: int, released: Any) -> None: ...


INNER = {
    "flat": lambda: Flat(0.5),
    "adaptive": lambda: Adaptive(0.5),
    "per layer": lambda: PerLayer(0.5),
    "ellipsoid, released": lambda: Ellipsoid(0.5, source=Released()),
    "ellipsoid, paid": lambda: Ellipsoid(0.5, source=Paid(every=1)),
}


@pytest.mark.parametrize("extreme", [1e-9, 1.0, 1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("name", INNER)
def test_one_example_is_at_most_the_bound_in_all_that_is_released(name: str, extreme: float) -> None:
    """Gradient, the inner clipping's statistics and loss together; an example at the bound of all comes to 1."""
    model, optimizer, loader, _ = made_private(PaidLoss(INNER[name](), MOST), torch.randn(1, 3), torch.ones(1, 1))
    optimizer.observe(sums := Sums())
    for _ in range(3):
        step(model, optimizer, loader, lambda losses: losses * extreme)
    assert len(sums.lengths) == 3
    assert max(sums.lengths) <= 1 + 1e-6
    if extreme == 1e6:
        assert max(sums.lengths) > 0.95


def test_the_mean_is_that_of_cut_losses() -> None:
    inputs = torch.randn(64, 3)
    clipping = PaidLoss(Flat(1.0), MOST)
    model, optimizer, loader, engine = made_private(
        clipping, inputs, torch.arange(64.0)[:, None], noise=1e-3, max_physical_batch_size=10
    )
    with torch.no_grad():
        wanted = (model(inputs) - torch.arange(64.0)[:, None]).square().mean(1).clamp(max=MOST).mean()
    step(model, optimizer, loader)
    assert clipping.mean is not None
    assert float(clipping.mean) == pytest.approx(float(wanted), abs=1e-3)
    assert "1 step" in engine.guarantee(1e-5).sampling


def test_its_noise_is_what_is_said() -> None:
    clipping = PaidLoss(Flat(1.0), MOST, share=0.01)
    model, optimizer, loader, _ = made_private(clipping, torch.randn(8, 3), torch.zeros(8, 1))
    means = []
    for _ in range(300):
        step(model, optimizer, loader, lambda losses: losses * 0)
        means.append(float(clipping.mean))
    found = torch.tensor(means)
    assert float(found.std()) == pytest.approx(5 * NOISE * MOST / 8, rel=0.2)
    assert abs(float(found.mean())) < 1.5


def test_it_costs_what_the_step_costs() -> None:
    ordinary = made_private(Flat(1.0), torch.randn(8, 3), torch.zeros(8, 1))
    paid = made_private(PaidLoss(Flat(1.0)), torch.randn(8, 3), torch.zeros(8, 1))
    for model, optimizer, loader, _ in (ordinary, paid):
        step(model, optimizer, loader)
    assert ordinary[3].get_epsilon(1e-5) == paid[3].get_epsilon(1e-5)
    radii = [one[1]._step.clipping.stddev(1.0) for one in (ordinary, paid)]
    assert radii[1]["0.weight"] == pytest.approx(radii[0]["0.weight"] / 0.99**0.5)


def test_scalar_losses_and_wrong_numbers_are_refused() -> None:
    model, optimizer, loader, _ = made_private(PaidLoss(Flat(1.0)), torch.randn(8, 3), torch.zeros(8, 1))
    inputs, targets = next(iter(loader))
    (model(inputs) - targets).square().mean().backward()
    with pytest.raises(ConfigurationError, match="losses for each example"):
        optimizer.step()
    for wrong in ({"most": 0.0}, {"most": float("inf")}, {"share": 1.0}):
        with pytest.raises(ConfigurationError):
            PaidLoss(Flat(1.0), **wrong)
