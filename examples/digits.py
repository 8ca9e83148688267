"""Train on scikit-learn's digits with AdaDP's sound form to (epsilon <= 1, delta = 1e-4), and say what that rests on.

This is what `make demo` runs: 1,797 real images that come with scikit-learn, a linear model, 2 CPU cores, seconds.
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, Kronecker, PrivacyEngine, Probe
from adadp.accounting.guarantee import round_up
from adadp.shapes.probes import PinkNoise

EPSILON, DELTA, STEPS, LOT = 1.0, 1e-4, 300, 256

images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16  # a fixed, public scale: never a statistic of the private data
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[180:], order[:180]

model = nn.Linear(64, 10)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=LOT)


def probes(count: int, generator: torch.Generator) -> torch.Tensor:
    """Synthetic 8 x 8 images: they shape the noise and hold nothing of the digits."""
    return PinkNoise((1, 8, 8))(count, generator).flatten(1)


engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    steps=STEPS,
    clipping=Ellipsoid(0.2, shape=Kronecker(before=0.25, after=0.0), source=Probe(probes)),
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

print(f"training on {len(train)} images of digits, {STEPS} steps on lots of about {LOT} ...")
started, step = time.perf_counter(), 0
while step < STEPS:
    for batch, targets in loader:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(batch), targets, reduction="none"))
        optimizer.step()
        schedule.step()
        step += 1
        if step == STEPS:
            break
seconds = time.perf_counter() - started

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
guarantee = engine.guarantee(DELTA)
print(f"accuracy  {accuracy:.1%} on {len(test)} images held out ({seconds:.1f} s)")
print(f"epsilon   {round_up(guarantee.require())}")
print(f"delta     {guarantee.delta:g}")
print(f"\n{guarantee.to_text(80)}")
