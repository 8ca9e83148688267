"""What K views of each example cost: `python -m adadp_lab.bench.augmentations [--out FILE]`.

A private step on a lot of 256 examples with K views each, beside plain SGD on the same rows and beside a private step
that takes each row for an example. All are measured in turn, in one process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.sampling.lot import grouped_microbatches, microbatches
from adadp_lab.bench.clock import milliseconds, peak_mib
from adadp_lab.bench.machine import versions
from adadp_lab.report.records import write_json

LOT, VIEWS, IMAGE = 256, (1, 4, 16), (1, 28, 28)
_FIRST = 101  # the first lot: none of those that are timed is a trial's
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    ),
}  # fmt: skip
Step = tuple[Callable[[], None], Callable[[], None]]  # the step, and what gives its gradients back


def rows(views: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(LOT * views, *IMAGE, generator=generator)
    return inputs, torch.arange(LOT).repeat_interleave(views) % 10


def plain(make: Callable[[], nn.Module], views: int) -> Step:
    """SGD on all rows."""
    model, (inputs, targets) = make(), rows(views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, optimizer.zero_grad


def private(make: Callable[[], nn.Module], views: int, *, together: bool) -> Step:
    """A private step on the same rows: each `views` of them one contribution, or each row one."""
    model, (inputs, targets) = make(), rows(views)
    units, of_one = (LOT, views) if together else (LOT * views, 1)
    _, optimizer, loader = PrivacyEngine(seed=0).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(inputs[:units], targets[:units]), batch_size=units), augmentations=of_one,
    )  # fmt: skip
    loader.lots.note(reasons=["the benchmark gave rows that the loader did not draw"])
    number = _FIRST

    def step() -> None:
        nonlocal number
        number += 1
        if loader.grouping is None:
            part = microbatches(number, range(units), None, units, False)[0]
        else:
            groups = [[example] * of_one for example in range(units)]
            part = grouped_microbatches(number, groups, None, units, False, loader.grouping)[0]
        loader.lots.hand_out(part)
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
        optimizer.step()

    return step, optimizer.zero_grad


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Median milliseconds and MiB of every step of one model, and what K views cost over plain SGD and over K = 1."""
    make = MODELS[name]
    steps: dict[str, Step] = {}
    for views in VIEWS:
        steps[f"sgd, K={views}"] = plain(make, views)
        steps[f"private, K={views}"] = private(make, views, together=True)
        steps[f"rows apart, K={views}"] = private(make, views, together=False)
    times = milliseconds({key: step for key, (step, _) in steps.items()}, rounds)
    took = {key: statistics.median(values) for key, values in times.items()}
    held = {key: peak_mib(step, clear, "cpu") for key, (step, clear) in steps.items()}
    found: dict[str, Any] = {"milliseconds": took, "mib": held, "ratios": {}}
    for views in VIEWS:
        private_step, rows_apart = f"private, K={views}", f"rows apart, K={views}"
        found["ratios"][f"K={views}"] = {
            "time over SGD on the same rows": took[private_step] / took[f"sgd, K={views}"],
            "time over rows that are examples": took[private_step] / took[rows_apart],
            "time over K=1": took[private_step] / took["private, K=1"],
            "memory over SGD on the same rows": held[private_step] / held[f"sgd, K={views}"],
            "memory over K=1": held[private_step] / held["private, K=1"],
        }
    return found


def main() -> None:
    """Measure, print the ratios, and write all of it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {name: measured(name, options.rounds) for name in options.models.split(",")}
    for name, values in found.items():
        for views, ratios in values["ratios"].items():
            print(f"{name}, {views}: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items()))
    if options.out is not None:
        write_json(options.out, {"machine": versions(torch.device("cpu")), "lot": LOT, "models": found})


if __name__ == "__main__":
    main()
