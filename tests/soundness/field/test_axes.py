"""Which axis is the examples', and in which order they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from soundness.field.stand import Bounded, End, NoNumber, Refused, end

# ---- [N, T, ...] and [T, N, ...] ----------------------------------------------------------------------------------


class Projected(nn.Module):
    """A linear layer on [n, T, 4], then a mean over T."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.between(torch.tanh(self.inner(inputs))).mean(1))


class Encoded(Projected):
    """nn.TransformerEncoderLayer is [T, n, ...] by default, and people transpose around it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def between(self, hidden: Tensor) -> Tensor:
        return self.encoder(hidden.transpose(0, 1)).transpose(0, 1)


class Recurrent(Projected):
    """So is nn.GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4)

    def between(self, hidden: Tensor) -> Tensor:
        return self.recurrent(hidden.transpose(0, 1))[0].transpose(0, 1)


class Bare(nn.Module):
    """One trained layer, where the axis alone decides."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.recurrent = nn.GRU(4, 4) if recurrent else None
        self.head.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs)
        if self.recurrent is not None:
            hidden = hidden + self.recurrent(hidden.transpose(0, 1))[0].transpose(0, 1) * 0.1
        return self.head(hidden.mean(1))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def ending(make: Callable[[], nn.Module], count: int, length: int, large: bool = False, **settings: Any) -> End:
    """One example is replaced by zeros; with `large`, one of large tokens among small ones."""
    inputs = torch.randn(count, length, 4, generator=torch.Generator().manual_seed(0)) * (0.01 if large else 1.0)
    others, targets = inputs.clone(), torch.zeros(count, dtype=torch.long)
    others[-1] = 0.0
    if large:
        inputs[-1] = 1.0
    worlds = TensorDataset(inputs, targets), TensorDataset(others, targets)
    return end(*worlds, make, cross_entropy, bounds=(1e-3,) if large else (1e-3, 0.1), limit=2.0, **settings)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [16, 12], ids=["as long as the lot", "shorter"])
@pytest.mark.parametrize("make", [Projected, Encoded, Recurrent], ids=lambda make: make.__name__)
def test_layouts_are_told_apart_or_refused(make: type[nn.Module], length: int, batch_first: bool) -> None:
    ended = ending(make, 16, length, batch_first=batch_first)
    assert isinstance(ended, Bounded | Refused | NoNumber), ended


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("recurrent", [True, False], ids=["before a GRU", "alone"])
def test_a_wrong_axis_that_happens_to_fit_is_refused_or_right(recurrent: bool, size: int) -> None:
    """batch_first=False is meant for the GRU; the linear layer before it is [n, T, ...], with T = n."""
    ended = ending(lambda: Bare(recurrent), size, size, large=True, batch_first=False)
    assert isinstance(ended, Bounded | Refused | NoNumber), ended


@pytest.mark.parametrize(("make", "length"), [(Projected, 16), (Projected, 12), (Recurrent, 12)])
def test_layouts_that_are_right(make: type[nn.Module], length: int) -> None:
    ended = ending(make, 16, length)
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("size", [16, 64])
def test_the_right_axis_is_right_where_the_other_is_as_long(size: int) -> None:
    ended = ending(lambda: Bare(False), size, size, large=True)
    assert isinstance(ended, Bounded), ended


class TimeFirst(nn.Module):
    """All of the model is [T, n, ...]: what batch_first=False is for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.recurrent, self.head = nn.Linear(4, 4), nn.GRU(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.recurrent(torch.tanh(self.inner(inputs.transpose(0, 1))))[0])[-1]


def test_a_model_that_is_time_first_throughout_is_right() -> None:
    ended = ending(TimeFirst, 16, 12, batch_first=False)
    assert isinstance(ended, Bounded), ended


# ---- examples in another order inside the model -------------------------------------------------------------------


class Packed(nn.Module):
    """The old idiom: sort by length, pack, LSTM, sort back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words)[order], lengths[order].cpu(), batch_first=True)
        return self.head(self.recurrent(packed)[1][0][0][order.argsort()])


class PackedByTorch(Packed):
    """enforce_sorted=False: torch sorts, and the layer sees the examples in their order."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.recurrent(packed)[1][0][0])


class Sorted(nn.Module):
    """The same with a plain layer: sorted rows go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.within, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        return self.head(torch.tanh(self.within(torch.tanh(self.before(inputs))[order]))[order.argsort()])


class SortedLinear(nn.Module):
    """... and nothing but products, where an example of zeros shifts all others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.within = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 2).requires_grad_(False)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        return self.head(self.within(self.before(inputs)[order])[order.argsort()]).clamp(-50, 50) * 0.01


def sorted_within(make: type[nn.Module], inputs: Tensor, lengths: Tensor, bounds: tuple[float, ...]) -> End:
    targets = torch.zeros(len(inputs), dtype=torch.long)
    worlds = [
        TensorDataset(inputs[:count], lengths[:count], targets[:count]) for count in (len(inputs), len(inputs) - 1)
    ]
    return end(*worlds, make, lambda model, batch: functional.cross_entropy(model(*batch[:2]), batch[2]), bounds=bounds)


COUNT = 16
LENGTHS = {
    "lengths differ": torch.randint(2, 9, (COUNT,), generator=torch.Generator().manual_seed(0)),
    "the first four are alike": torch.tensor([5] * 4 + [3 + i % 2 for i in range(COUNT - 5)] + [9]),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("make", [Packed, Sorted], ids=lambda make: make.__name__)
def test_sorting_inside_the_model_is_refused_or_right(make: type[nn.Module], lengths: Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 20, (COUNT, 9), generator=generator)
    inputs = words if make is Packed else torch.randn(COUNT, 6, generator=generator)
    ended = sorted_within(make, inputs, lengths, (1e-3, 1e-2))
    assert isinstance(ended, Bounded | Refused | NoNumber), ended


def test_sorting_inside_the_model_at_its_worst_is_refused_or_right() -> None:
    count = 33
    inputs = torch.zeros(count, 6)
    inputs[:, 0] = torch.where(torch.arange(count) % 2 == 0, 1.0, 300.0)
    inputs[-1] = 0.0
    lengths = torch.tensor([9] * 4 + [8] * (count - 5) + [20])  # in order, but for the last, which is the longest
    ended = sorted_within(SortedLinear, inputs, lengths, (1e-3,))
    assert isinstance(ended, Bounded | Refused | NoNumber), ended


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sorting_by_torch_is_right(lengths: Tensor) -> None:
    words = torch.randint(1, 20, (COUNT, 9), generator=torch.Generator().manual_seed(1))
    ended = sorted_within(PackedByTorch, words, lengths, (1e-3, 1e-2))
    assert isinstance(ended, Bounded), ended
