"""A loop written for Opacus runs with the import changed and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine


def test_an_opacus_loop_runs_with_only_the_import_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    assert not ModuleValidator.is_valid(model)
    assert "BatchNorm" in ModuleValidator.validate(model, strict=False)[0]
    model = ModuleValidator.fix(model)
    assert ModuleValidator.validate(model, strict=True) == []
    data = TensorDataset(torch.randn(200, 1, 8, 8), torch.randint(3, (200,)))
    train_loader = DataLoader(data, batch_size=50, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()

    privacy_engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=2,
        target_epsilon=5.0,
        target_delta=1e-5,
        max_grad_norm=1.0,
    )
    batches = 0
    for _ in range(2):
        model.train()
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer
        ) as memory_safe_loader:
            for images, targets in memory_safe_loader:
                assert len(images) <= 16
                optimizer.zero_grad()
                loss = criterion(model(images), targets)
                loss.backward()
                optimizer.step()
                batches += 1
    assert batches > 8  # lots of about 50 came in pieces
    epsilon = privacy_engine.get_epsilon(delta=1e-5)
    assert 4.9 < epsilon <= 5.0
    assert privacy_engine.accountant.get_epsilon(delta=1e-5) == epsilon
    assert train_loader.max_physical_batch_size is None
