"""A table: private preprocessing and private training under one budget, on scikit-learn's breast cancer data.

`examples/table.ipynb` tells it step by step. With ADADP_SHORT in the environment it trains for 20 steps only.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ledger, PrivacyEngine
from adadp.preprocessing import TablePreprocessor, noise_multiplier_for_share

EPSILON, DELTA = 3.0, 1e-4
STEPS = 20 if "ADADP_SHORT" in os.environ else 200
LOT = 128

data = load_breast_cancer()  # 569 people, 30 measurements in very different units
order = np.random.default_rng(0).permutation(len(data.target))
train, test = order[100:], order[:100]
columns = {name: data.data[:, place] for place, name in enumerate(data.feature_names)}

ledger = Ledger(dataset="breast-cancer")  # Ledger("spent.jsonl", dataset=...) keeps it on the disk
sigma = noise_multiplier_for_share(
    epsilon=EPSILON, delta=DELTA, share=0.3
)  # few people: a tenth is enough for thousands
with ledger.start({"preprocessing": "TablePreprocessor"}) as run:
    table = TablePreprocessor(sigma).fit({name: column[train] for name, column in columns.items()}, ledger=run)
    run.note(assumptions=table.assumptions_)
inputs = torch.as_tensor(table.transform(columns), dtype=torch.float32)
labels = torch.as_tensor(data.target)

model = nn.Linear(inputs.shape[1], 2)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = DataLoader(TensorDataset(inputs[train], labels[train]), batch_size=LOT)
engine = PrivacyEngine(ledger=ledger)
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=EPSILON,  # of all that the ledger holds: what the preprocessing cost counts
    target_delta=DELTA,
    steps=STEPS,
    max_grad_norm=1.0,
)
step = 0
while step < STEPS:
    for rows, outcomes in loader:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(rows), outcomes, reduction="none"))
        optimizer.step()
        step += 1
        if step == STEPS:
            break

with torch.no_grad():
    accuracy = (model(inputs[test]).argmax(1) == labels[test]).float().mean().item()
print(f"accuracy  {accuracy:.0%} on {len(test)} people held out")
print(engine.guarantee(DELTA).to_text(80))
