"""Whose a row is must be sure: what moves rows is refused, so are ids without texts, and no choice is made twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adadp import PrivacyEngine, TrainingStep, Units
from adadp.checks.trial import Trial
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.mechanism.observation import Observer, Unnoised
from adadp.randomness import Randomness
from adadp.sampling.units import Grouping

Item = tuple[Tensor, int]
Collate = Callable[[Sequence[Item]], Any]
BOUND = 1.0


class Sequences(Dataset[Any]):
    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]


def padded(items: Sequence[Item]) -> Any:
    lengths = torch.tensor([len(item[0]) for item in items])
    labels = torch.tensor([item[1] for item in items])
    return pad_sequence([item[0] for item in items], batch_first=True), lengths, labels


def longest_first(items: Sequence[Item]) -> Any:
    """As tutorials do for pack_padded_sequence."""
    return padded(sorted(items, key=lambda item: -len(item[0])))


def by_label(items: Sequence[Item]) -> Any:
    return padded(sorted(items, key=lambda item: item[1]))


def masked(items: Sequence[Item]) -> Any:
    """Draws random numbers, and keeps the order."""
    values, lengths, labels = padded(items)
    return values * (torch.rand(values.shape[:2]) < 0.8).unsqueeze(2), lengths, labels


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        there = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return self.head((values * there.unsqueeze(2)).sum(1) / lengths.unsqueeze(1))


def people(others: int = 8, somebody: bool = True, *, alike: bool = False) -> tuple[list[Item], list[str]]:
    """Others have two rows each; somebody has eight, of many lengths and all of one direction."""
    generator = torch.Generator().manual_seed(0)
    items = [
        (0.01 * torch.randn(3 if alike else 1 + 2 * (row % 2) + row // 2 % 2, 3, generator=generator), row // 2 % 2)
        for row in range(2 * others)
    ]
    ids = [str(row // 2) for row in range(2 * others)]
    if somebody:
        items += [(torch.full((3 if alike else 1 + row // 2, 3), 5.0), 1) for row in range(8)]
        ids += ["somebody"] * 8
    return items, ids


class Sums(Observer):
    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def noising(self, release: Unnoised) -> None:
        self.found.append({name: value.clone() for name, value in release.sums.items()})


def released(items: list[Item], ids: list[str], collate: Collate, *, function: bool = False, **options: Any) -> Any:
    """The first lot's sums, of everybody."""
    torch.manual_seed(0)
    model = Mean()
    lot = options.pop("lot", 9)
    unit = {} if "augmentations" in options else {"unit": Units(ids, declared=9)}
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(Sequences(items), batch_size=lot, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        **unit,
        **options,
    )
    sums = Sums()
    optimizer.observe(sums)

    def losses(values: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return 100 * nn.functional.cross_entropy(model(values, lengths), labels, reduction="none")

    step = TrainingStep(optimizer, losses)
    for batch in loader:
        if function:
            step(*batch)
        else:
            optimizer.zero_grad()
            optimizer.backward(losses(*batch))
            optimizer.step()
        return sums.found[0]


def moved(collate: Collate, **options: Any) -> float:
    """How far somebody with eight rows moves the sums, in units of the bound."""
    one, other = (released(*people(somebody=there), collate, **options) for there in (True, False))
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one)) / BOUND


@pytest.mark.parametrize("function", [False, True], ids=["a loop", "a step"])
@pytest.mark.parametrize("collate", [longest_first, by_label])
def test_a_collate_function_that_sorts_is_refused(collate: Collate, function: bool) -> None:
    with pytest.raises(ConfigurationError, match="another order than their items"):
        moved(collate, function=function)


def test_items_of_one_length_show_a_sort_too() -> None:
    with pytest.raises(ConfigurationError, match="another order"):
        released(*people(alike=True), longest_first)
    with pytest.raises(ConfigurationError, match="another order"):
        released(*people(), longest_first, augmentations=2, lot=24)


@pytest.mark.parametrize("collate", [padded, masked])
def test_collate_functions_that_keep_the_order_are_taken(collate: Collate) -> None:
    assert moved(collate) <= BOUND * (1 + 1e-5) or collate is masked  # which draws other numbers for other rows
    released(*people(), collate, augmentations=2, lot=24)


def test_rows_that_are_sorted_count_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is refused: without the check somebody moves a release by more than is charged."""
    made = Trial.__init__

    def unordered(self: Trial, *args: Any, **options: Any) -> None:
        made(self, *args, **{**options, "ordered": False})

    monkeypatch.setattr(Trial, "__init__", unordered)
    assert moved(longest_first) > 3


def loop(change: Callable[[Tensor], Tensor], **options: Any) -> None:
    """A loop that does this to the rows of inputs and labels."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(24, 3), torch.arange(24) % 2), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        **options,
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs = model(change(inputs))
        optimizer.backward(nn.functional.cross_entropy(outputs, change(labels), reduction="none"))
        optimizer.step()


def test_a_loop_that_moves_rows_is_refused() -> None:
    def turned(rows: Tensor) -> Tensor:
        return rows.flip(0)

    for options in ({"unit": [row // 2 for row in range(24)]}, {"augmentations": 2}, {"pad_lots": True}):
        with pytest.raises(TrainingLoopError, match="in another order"):
            loop(turned, **options)
        loop(lambda rows: rows, **options)
        loop(lambda rows: rows + 0.01 * torch.randn_like(rows) if rows.is_floating_point() else rows, **options)
    loop(turned)  # each row counts for itself


class Unnamed:
    """Prints as its address: two objects for one person would be two persons."""


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([Unnamed(), Unnamed()], "has none of its own"),
        ([torch.tensor([1, 2])] * 2, "one value"),
        ([np.zeros(2)] * 2, "one value"),
        ({"a", "b"}, "one for each row"),
        ({"a": 0, "b": 1}, "one for each row"),
    ],
)
def test_ids_that_tell_nobody_apart_are_refused(ids: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Units(ids)


def test_rows_are_chosen_anew_in_another_attempt() -> None:
    """Who has fewer rows in front would otherwise decide whether two attempts at a lot choose alike."""
    grouping = Grouping(Units(["a"] * 50, max_rows=5))

    def chosen(attempt: int) -> list[list[int]]:
        return grouping.rows_of([0], 3, Randomness(5, attempt=attempt))

    assert chosen(0) == chosen(0)
    assert chosen(7) == chosen(7)
    assert chosen(0) != chosen(7)
