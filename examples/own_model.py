"""A model of your own: what is refused and mended, parameters of your own, and the weights in the plain module again.

Data are the 1,797 digits that come with scikit-learn. With ADADP_SHORT in the environment it trains for 20 steps only.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adadp
from adadp import PrivacyEngine

EPSILON, DELTA = 2.0, 1e-4
STEPS = 20 if "ADADP_SHORT" in os.environ else 300


class Block(nn.Module):
    """A residual block with a gate, which is a parameter of the block's own: no layer that the engine knows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.second(torch.tanh(self.norm(self.first(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(nn.functional.max_pool2d(self.blocks(self.stem(images)), 2).flatten(1))


values, numbers = load_digits(return_X_y=True)
images = torch.as_tensor(values).float().reshape(-1, 1, 8, 8) / 16  # a fixed, public scale
labels = torch.as_tensor(numbers)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[180:], order[:180]
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=256)
plan = {"target_epsilon": EPSILON, "target_delta": DELTA, "steps": STEPS}

# Batch normalisation mixes the examples of a batch: nobody's influence would be bounded. It is refused ...
net = Net()
try:
    PrivacyEngine().make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader, **plan
    )
except adadp.PrivacyError as refused:
    print(f"refused: {refused}\n")

# ... and replaced by a norm within each example. `net` keeps its other parameters.
net = adadp.fix(net)
plain = copy.deepcopy(net)  # the same module without an engine, for later
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
engine = PrivacyEngine()
model, optimizer, private = engine.make_private_with_epsilon(
    module=net, optimizer=optimizer, data_loader=loader, max_physical_batch_size=128, **plan
)
step = 0
while step < STEPS:
    for batch, targets in private:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(batch), targets, reduction="none"))
        optimizer.step()
        step += optimizer.stepped  # a lot that comes in pieces is one step
        if step == STEPS:
            break

with tempfile.TemporaryDirectory() as folder:  # weights are what may leave the house
    path = Path(folder) / "model.safetensors"
    save_file(model.state_dict(), path)
    plain.load_state_dict(load_file(path))  # the plain module: plain torch from here on
with torch.no_grad():
    accuracy = (plain.eval()(images[test]).argmax(1) == labels[test]).float().mean().item()
print(f"accuracy  {accuracy:.1%} on {len(test)} images held out")
print(engine.guarantee(DELTA).to_text(80))
