"""Rows that are learnt but never tried: a second attack on parameters that no layer answers for, and on layers' rows.

What is learnt of a new situation (other lengths, other parameters trained) is not tried until the next trial is due;
calls are told apart by their number, which chance or a longer input may shift; torch.func goes by shapes alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.compare import assert_same, released_and_expected
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from soundness.field.stand import World, by_example
from soundness.test_shared_values import COUNT, LENGTH, SIZE, Rows, assert_sound, one_loud, replaced

# ---- situations that are learnt, and trained on before a trial is due ------------------------------------------------


def opposite() -> tuple[Tensor, Tensor]:
    inputs = 0.001 * torch.randn(COUNT, LENGTH, SIZE, generator=torch.Generator().manual_seed(0))
    others = inputs.clone()
    inputs[3], others[3] = 5.0, -5.0
    return inputs, others


def unfreezing(world: World) -> None:
    for epoch in range(4):
        if epoch == 2:
            world.model.requires_grad_(True)
        by_example(world)


def freeze(world: World) -> None:
    world.model.inner.requires_grad_(False)


class TimeFirst(nn.Module):
    """A layer on [T * n, d], or on [T, d, n] as [n, d, T], time first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = {"linear": nn.Linear(SIZE, SIZE, bias=False), "conv": nn.Conv1d(SIZE, SIZE, 1)}
        bare = nn.ParameterDict({"weight": nn.Parameter(torch.eye(SIZE))})
        self.inner, self.head, self.kind = layers.get(kind, bare), nn.Linear(SIZE, 3), kind

    def forward(self, inputs: Tensor) -> Tensor:
        steps = inputs.transpose(0, 1)
        if self.kind == "conv":
            made = self.inner(steps.transpose(1, 2)).transpose(1, 2)
        else:
            flat = steps.flatten(0, 1)
            made = self.inner(flat) if self.kind == "linear" else functional.linear(flat, self.inner["weight"])
        return self.head((inputs + made.view_as(steps).transpose(0, 1)).mean(1))


@pytest.mark.parametrize("kind", ["linear", "bare", "conv"])
def test_time_first_no_longer_frozen(kind: str) -> None:
    """While it was frozen nothing was recorded to try; unfrozen, it is learnt, and the next trial is lots away."""
    assert_sound(replaced(*opposite(), lambda: TimeFirst(kind), unfreezing, before=freeze))


def test_a_convolution_of_as_many_prototypes_as_examples_no_longer_frozen() -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(SIZE, 3)
            self.register_buffer("images", torch.randn(COUNT, 1, SIZE, generator=torch.Generator().manual_seed(1)))

        def forward(self, inputs: Tensor) -> Tensor:
            classes, hidden = self.inner(self.images).mean(1), inputs.mean(1)
            return self.head(hidden + inputs[:, 0, :1] * (hidden @ classes.T @ classes))

    assert_sound(replaced(*one_loud(), Prototypes, unfreezing, before=freeze))


class ByLength(nn.Module):
    """Works on long inputs in another way than on short ones."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.head, self.way = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 3), way

    def forward(self, inputs: Tensor) -> Tensor:
        count, length, _ = inputs.shape
        if length <= LENGTH // 2:
            made = self.inner(inputs.flatten(0, 1)).view_as(inputs)
        elif self.way == "chunks":
            made = torch.cat([self.inner(part) for part in inputs.flatten(0, 1).chunk(2)]).view_as(inputs)
        else:
            made = self.inner(inputs.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, count)).transpose(0, 1)
        return self.head((inputs + made).mean(1))


@pytest.mark.parametrize("way", ["chunks", "time first"])
def test_longer_inputs_take_another_path(way: str) -> None:
    """Sequence lengths that are warmed up: the first lots are tried, the longer ones that follow only learnt."""

    class Cut:
        length = LENGTH // 2

        def __call__(self, items: list[Any]) -> tuple[Tensor, Tensor]:
            inputs, targets = default_collate(items)
            return inputs[:, : self.length].contiguous(), targets

    cut = Cut()

    def loop(world: World) -> None:
        for epoch in range(4):
            cut.length = LENGTH // 2 if epoch < 2 else LENGTH
            by_example(world)

    assert_sound(replaced(*opposite(), lambda: ByLength(way), loop, loader={"collate_fn": cut}))


# ---- calls that are told apart by their number -----------------------------------------------------------------------


class Reused(nn.Module):
    """One layer for the examples and for a table of waves; now and then, or at first, one of the calls is left out."""

    def __init__(self, skip: float = 0.0, since: int = 0) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)
        self.skip, self.since, self.steps = skip, since, 0
        self.register_buffer("waves", torch.randn(LENGTH, SIZE, generator=torch.Generator().manual_seed(3)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        if self.since:  # a loop over tokens
            hidden = hidden + (self.inner(inputs[:, 0]) + self.inner(inputs[:, 1])).unsqueeze(1) / 2
        elif not (self.training and torch.rand(()).item() < self.skip):  # stochastic depth
            hidden = (inputs.mean(1) + self.inner(inputs.mean(1))).unsqueeze(1)
        if self.steps >= self.since:
            hidden = hidden + self.inner(self.waves[: inputs.shape[1]])
        return self.head((hidden * inputs[:, :1, :1]).mean(1))


def test_a_call_that_chance_leaves_out() -> None:
    """Without it the table comes first, where the trials saw examples, and has as many rows."""

    def often(world: World) -> None:
        for _ in range(40):
            by_example(world)

    assert_sound(replaced(*one_loud(), lambda: Reused(skip=0.1), often))


def test_one_call_more_than_tried_of_a_module_called_in_a_loop() -> None:
    def counting(world: World) -> None:
        for _ in range(5):
            by_example(world)
            world.model.steps += 1

    assert_sound(replaced(*one_loud(), lambda: Reused(since=2), counting))


# ---- torch.func goes by shapes ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_as_many_positions_as_examples_given_to_a_module_that_goes_through_func() -> None:
    """Each example is differentiated with one position's row: another function's gradient, without a word."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(5)))

        def forward(self, inputs: Tensor, places: Tensor) -> Tensor:
            return torch.einsum("ntd,de->nte", inputs + places, self.weight).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.register_buffer("waves", torch.randn(4, 6, generator=torch.Generator().manual_seed(3)))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.block(inputs, self.waves)

    class AsMany(Rows):
        def batch(self, count: int) -> dict[str, Tensor]:
            return {name: value[:, :4] if name == "inputs" else value for name, value in super().batch(count).items()}

    assert_same(*released_and_expected(Model(), AsMany()), 1e-4)
