"""adadp.checks.same_dataset: what processes compare of their datasets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from adadp.checks.same_dataset import look_of

ROWS = torch.arange(40.0).view(20, 2)


class Files(Dataset[Any]):
    """Opens what it reads with its first item, and may return another view each time."""

    def __init__(self, order: list[int], noise: Any = None) -> None:
        self.order, self.noise, self.opened = order, noise, False

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.opened = True
        row = ROWS[self.order[index]].numpy()
        return {"x": row if self.noise is None else row + self.noise(), "y": index % 2, "name": f"row {index % 3}"}


def test_the_order_of_rows_is_compared() -> None:
    tensors = TensorDataset(ROWS)
    assert look_of(tensors) == look_of(TensorDataset(ROWS.clone()))
    assert look_of(tensors) != look_of(TensorDataset(ROWS.roll(1, 0)))
    assert look_of(tensors) != look_of(TensorDataset(ROWS.double()))
    assert look_of(Subset(tensors, [1, 2])) == look_of(Subset(tensors, list(np.array([1, 2]))))
    assert look_of(Subset(tensors, [1, 2])) != look_of(Subset(tensors, [2, 1]))
    there, back = list(range(20)), list(range(19, -1, -1))
    assert look_of(Files(there)) == look_of(Files(there))
    assert look_of(Files(there)) != look_of(Files(back))
    assert look_of(Subset(Files(there), [1, 2])) != look_of(Subset(Files(back), [1, 2]))


def test_views_are_compared_where_a_seed_repeats_them() -> None:
    there = list(range(20))
    assert look_of(Files(there, lambda: np.random.rand())) == look_of(Files(there, lambda: np.random.rand()))
    drawn = np.random.default_rng(0)
    assert look_of(Files(there, drawn.random)) == ("Files", 20, None)


def test_the_dataset_is_left_as_it_was() -> None:
    files = Files(list(range(20)))
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    look_of(files)
    assert not files.opened
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()
