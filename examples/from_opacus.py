"""Moving from Opacus: a program for images of digits that was written for it, with one import changed.

    python examples/from_opacus.py              # with adadp
    python examples/from_opacus.py --opacus     # the same program with Opacus, if it is installed

`examples/from_opacus.ipynb` goes on from here, to what adadp can do that this loop does not use. With ADADP_SHORT in
the environment it trains for one epoch only.
"""

from __future__ import annotations

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "--opacus" in sys.argv:
    from opacus import PrivacyEngine
else:
    from adadp.integrations.opacus import PrivacyEngine  # the line that changed

EPOCHS = 1 if "ADADP_SHORT" in os.environ else 15
EPSILON, DELTA, BATCH = 3.0, 1e-4, 128


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def loaders() -> tuple[DataLoader, DataLoader]:
    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16  # a fixed, public scale: never a statistic of private data
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = (TensorDataset(images[part], labels[part]) for part in (order[180:], order[:180]))
    return DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(test, batch_size=256)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()


def test(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        found = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(found).mean().item()


train_loader, test_loader = loaders()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine = PrivacyEngine()
model, optimizer, train_loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=1.0,
)
train(model, optimizer, train_loader)
print(f"accuracy {test(model, test_loader):.1%}, epsilon {engine.get_epsilon(DELTA):.3f}")
