"""All rows of one person move a release of several processes by at most the bound, however they are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine, Units
from adadp.sampling.loader import PrivateLoader
from distributed.team import values

BOUND, OTHERS, LOTS = 0.5, 20, 3


def rows(*, with_the_first: bool) -> tuple[TensorDataset, list[str]]:
    """The first person has a hundred rows with large gradients among the rows of `OTHERS`, or none."""
    generator = torch.Generator().manual_seed(2)
    ids = ["first" if row % 2 == 0 else str(row // 2 % OTHERS) for row in range(200)]
    inputs = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    inputs[::2] = 50.0  # all one way, so that what is clipped apart adds up
    kept = [row for row in range(200) if with_the_first or ids[row] != "first"]
    return TensorDataset(inputs[kept]), [ids[row] for row in kept]


def sums(dataset: TensorDataset, ids: list[str], reduction: Any, size: int | None) -> Tensor:
    """What several lots that hold every person release, times the denominator; the weights stay."""
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.fill_(0.0)
    units = Units(ids, reduction=reduction, declared=OTHERS + 1)
    engine = PrivacyEngine(seed=3)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(dataset, batch_size=OTHERS + 1),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        unit=units,
        max_physical_batch_size=size,
    )
    found: list[Tensor] = []
    while len(found) < LOTS:
        for (inputs,) in loader:
            optimizer.zero_grad()
            optimizer.backward(private(inputs).square().sum(1))
            optimizer.step()
            if optimizer.stepped:
                found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert engine.guarantee(1e-5).to_dict()["unit"] == "one person"  # in every process
    return torch.stack(found) * (OTHERS + 1)


def moved(rank: int, size: int, bug: str | None) -> list[float]:
    """How far each release moves when the first person, and so everybody's place and process, is taken away."""
    sound = PrivateLoader._own_groups
    if bug is not None:
        PrivateLoader._own_groups = BUGS[bug]  # type: ignore[method-assign]
    found = []
    try:
        for reduction, most in (("mean", None), ("sum", None), ("mean", 24)):
            there = sums(*rows(with_the_first=True), reduction, most)
            gone = sums(*rows(with_the_first=False), reduction, most)
            found += (there - gone).norm(dim=1).tolist()  # the same seed: the same noise
    finally:
        PrivateLoader._own_groups = sound  # type: ignore[method-assign]
    return found


def _a_person_in_two_processes(self: Any, grouping: Any, drawn: Tensor, number: int) -> list[list[int]]:
    groups = grouping.rows_of(drawn.tolist(), number, self._randomness)
    return [[row for row in rows if row // 2 % 2 == dist.get_rank()] for rows in groups]


def _everybody_in_each(self: Any, grouping: Any, drawn: Tensor, number: int) -> list[list[int]]:
    return list(grouping.rows_of(drawn.tolist(), number, self._randomness))


BUGS: dict[str, Any] = {"a person is split": _a_person_in_two_processes, "everybody in each": _everybody_in_each}


def test_a_person_with_a_hundred_rows_moves_a_release_by_at_most_the_bound(tmp_path: Path) -> None:
    found = values(2, tmp_path, moved, None)
    assert found[0] == found[1]
    assert len(found[0]) == 3 * LOTS
    assert max(found[0]) <= BOUND * (1 + 1e-6)
    assert min(found[0]) > 0.9 * BOUND  # and not by less: the person does count


@pytest.mark.parametrize("bug", BUGS)
def test_a_person_who_counts_in_both_processes_is_seen(tmp_path: Path, bug: str) -> None:
    for found in values(2, tmp_path, moved, bug):
        assert max(found) > 1.5 * BOUND
