"""An ordinary private step can be read top to bottom in ten files or fewer (docs/architecture.md walks them)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adadp
from adadp import PrivacyEngine

ROOT = Path(adadp.__file__).parent
MOST_FILES = 10

#: Where a step goes that a reader of it need not follow, and why.
LEAVES = {
    "checks/": "each function raises, or notes something for the guarantee: no number of a release is made there",
    "gradients/capture/slot.py": "stands in for parameters while the model runs, so that an unseen use is refused",
    "gradients/capture/tree.py": "which layer answers for each module, and its slots",
    "gradients/capture/work.py": "what runs at the moment: holds it, and computes nothing",
    "gradients/capture/readings.py": "says whether the examples are where they were in the trials; nothing else here",
    "gradients/capture/hooks.py": "what torch calls around each module: passes on to the capture",
    "clipping/early.py": "an optimisation of Local: for every other clipping it returns at once",
    "gradients/layers/": "one layer's rule: its input and output gradient in, its per-example gradients out",
    "gradients/forms/": "linear algebra with one layer's per-example gradients: norms, and sums with given weights",
    "gradients/rounding.py": "the arithmetic that the forms use, and how many bits it has",
    "gradients/kernels/": "the same numbers as the forms would compute, faster",
    "distributed/": "for a process alone: passes the charge on and returns",
    "randomness.py": "the generator: returns standard normal numbers",
    "out_of_memory.py": "turns an error of the device into advice; does nothing else",
}


def visited() -> list[str]:
    """The files of adadp that run from a batch in the loop's hands until `optimizer.step()` returns, in that order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.setdefault(path.relative_to(ROOT).as_posix())

    for lot, (inputs, targets) in enumerate(loader):
        if lot == 5:  # between the trials of lots 1 and 10
            sys.setprofile(note)
        try:
            optimizer.zero_grad()
            optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
            optimizer.step()
        finally:
            sys.setprofile(None)
        assert optimizer.stepped
    return list(files)


def is_leaf(path: str) -> bool:
    return any(path == leaf or (leaf.endswith("/") and path.startswith(leaf)) for leaf in LEAVES)


def test_a_step_is_read_in_ten_files_or_fewer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = visited()
    followed = [path for path in files if not is_leaf(path)]
    assert len(followed) <= MOST_FILES, f"a step passes through {len(followed)} files:\n" + "\n".join(followed)
    assert {"mechanism/optimizer.py", "mechanism/step.py", "sampling/lot.py"} <= set(followed)
