"""Averaged weights are post-processing: torch's own averages work on a private module, and carry what it cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.engine import is_private

EXAMPLES = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)


def made_private(engine: PrivacyEngine, model: nn.Module, augmentations: int = 1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(EXAMPLES, batch_size=20)
    return engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        augmentations=augmentations, max_physical_batch_size=12,
    )  # fmt: skip


@pytest.mark.parametrize("augmentations", [1, 3])
def test_an_average_of_private_weights_costs_nothing_and_carries_what_they_cost(augmentations: int) -> None:
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = made_private(engine, nn.Linear(4, 3), augmentations)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    wanted: torch.Tensor | None = None
    for inputs, targets in loader:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
        optimizer.step()
        if optimizer.stepped:
            averaged.update_parameters(model)
            value = model.weight.detach().clone()
            wanted = value if wanted is None else 0.5 * wanted + 0.5 * value
    torch.testing.assert_close(averaged.module.weight, wanted)
    found = engine.guarantee(1e-4)
    assert found.epsilon is not None
    assert not found.untried  # reading the weights is not touching them
    assert not is_private(averaged.module)
    assert averaged(torch.randn(2, 4)).shape == (2, 3)
    later = PrivacyEngine(seed=2)
    made_private(later, averaged.module)
    assert later.guarantee(1e-4).epsilon == pytest.approx(found.epsilon)
