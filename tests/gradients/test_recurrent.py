"""RNN, GRU and LSTM: torch's own outputs, and the gradients of each sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_loop, captured, loss_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.capture import Capture

COUNT, LENGTH, WIDTH, HIDDEN = 4, 5, 3, 4
KINDS = {
    "tanh": lambda **o: nn.RNN(WIDTH, HIDDEN, **o),
    "relu": lambda **o: nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", **o),
    "gru": lambda **o: nn.GRU(WIDTH, HIDDEN, **o),
    "lstm": lambda **o: nn.LSTM(WIDTH, HIDDEN, **o),
    "projected": lambda **o: nn.LSTM(WIDTH, HIDDEN, proj_size=2, **o),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False},
]


class Sequences(nn.Module):
    """Batch first in and out, whatever the recurrent module wants; returns outputs and final states."""

    def __init__(self, recurrent: nn.RNNBase, given_state: bool, lengths: list[int] | None = None) -> None:
        super().__init__()
        self.recurrent, self.given_state, self.lengths = recurrent, given_state, lengths

    def forward(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        hx = self.state(x) if self.given_state else None
        if self.lengths is not None:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output, states = self.recurrent(packed, hx)
            assert isinstance(output, PackedSequence)
            output = pad_packed_sequence(output, batch_first=True, total_length=LENGTH)[0]
        elif self.recurrent.batch_first:
            output, states = self.recurrent(x, hx)
        else:
            output, states = self.recurrent(x.transpose(0, 1), hx)
            output = output.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return [output, *(state.transpose(0, 1) for state in states)]

    def state(self, x: Tensor) -> Any:
        """A state of each example's own, made from its first step."""
        module = self.recurrent
        rows = module.num_layers * (2 if module.bidirectional else 1)
        first = x[:, 0, :1].T.unsqueeze(2)
        hidden = (first * torch.linspace(0.1, 1, module.proj_size or HIDDEN, dtype=x.dtype)).repeat(rows, 1, 1)
        cell = (first * torch.linspace(-1, 1, HIDDEN, dtype=x.dtype)).repeat(rows, 1, 1)
        return (hidden, cell) if isinstance(module, nn.LSTM) else hidden


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(COUNT, LENGTH, WIDTH, dtype=dtype), torch.tensor([3, 5, 1, 3])]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind: str, options: dict[str, Any], given_state: bool, packed: bool) -> None:
    torch.manual_seed(0)
    model = Sequences(
        KINDS[kind](batch_first=not given_state, **options), given_state, [1] if packed else None
    ).double()
    given = inputs(torch.float64)
    ordinary = model(*given)
    capture = Capture(model)
    for watched, expected in zip(model(*given), ordinary, strict=True):
        torch.testing.assert_close(watched, expected, rtol=1e-10, atol=1e-10)
    capture.detach()
    assert_matches(model, given, loop=True)


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str) -> None:
    torch.manual_seed(0)
    assert_matches(Sequences(KINDS[kind](batch_first=True), False), inputs(torch.float32), loop=True)


def test_packed_sequences_come_back_as_they_came() -> None:
    torch.manual_seed(0)
    gru = nn.GRU(WIDTH, HIDDEN, bidirectional=True).double()
    x, lengths = inputs(torch.float64)
    for packed in (
        pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False),
        pack_padded_sequence(x, torch.tensor([5, 4, 4, 1]), batch_first=True),
    ):
        ordinary, state = gru(packed)
        capture = Capture(gru)
        watched, watched_state = gru(packed)
        capture.detach()
        torch.testing.assert_close(watched.data, ordinary.data)
        torch.testing.assert_close(watched_state, state)
        assert torch.equal(watched.batch_sizes, ordinary.batch_sizes)
        assert (watched.sorted_indices is None) == (ordinary.sorted_indices is None)


def test_dropout_between_layers() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, HIDDEN, num_layers=2, dropout=0.5, batch_first=True)
    x = torch.randn(COUNT, LENGTH, WIDTH)
    Capture(model)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    with torch.no_grad():
        expected = model(x)[0]
    torch.testing.assert_close(model(x)[0], expected)


def test_input_without_a_batch_is_refused() -> None:
    model = nn.GRU(WIDTH, HIDDEN)
    Capture(model)
    with pytest.raises(UnsupportedModuleError, match="batch of one"):
        model(torch.randn(LENGTH, WIDTH))


def test_copy_is_ordinary() -> None:
    model = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    x = torch.randn(COUNT, LENGTH, WIDTH)
    expected = model(x)[0]
    capture = Capture(model)
    other = copy.deepcopy(model)
    assert type(other) is nn.LSTM
    torch.testing.assert_close(other(x)[0], expected)
    loss_of(other(x)[0]).backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert capture.take(COUNT) == {}


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells(cell: type[nn.Module]) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(WIDTH, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for time in range(2):
                state = self.cell(x[:, time], state)
            return state[0] if isinstance(state, tuple) else state

    torch.manual_seed(0)
    model = Loop().double()
    x = torch.randn(COUNT, 2, WIDTH, dtype=torch.float64)
    assert_forms(captured(model, [x]), by_loop(model, [x]), 1e-9)


def test_inside_a_module_that_goes_through_torch_func() -> None:
    """torch computes an LSTM from a list of its weights: the parameters must not receive an ordinary gradient."""
    model = nn.Sequential(nn.LSTM(WIDTH, HIDDEN, batch_first=True))
    capture = Capture(model, through_func=[""])
    loss_of(model(torch.randn(COUNT, LENGTH, WIDTH))[0]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(UnsupportedModuleError, match="per-example gradients"):
        capture.take(COUNT)
