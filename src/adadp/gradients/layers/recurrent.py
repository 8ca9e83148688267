"""nn.RNN, nn.GRU and nn.LSTM: layers, directions, projections, padded and packed sequences; and their cells.

torch's own kernels do not show the gradient of each step, so the steps are taken here, one by one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from adadp.gradients.layers.layer import Taps, no_batch, supports
from adadp.gradients.layers.rewritten import Rewritten

Steps = nn.RNNBase | nn.RNNCellBase
State = tuple[Tensor, ...]  # the hidden state; for an LSTM also the cell's, each [n, width]


class _Recurrent(Rewritten):
    """Everything but the arithmetic of one step."""

    @abstractmethod
    def step(self, taps: Taps, module: Steps, suffix: str, seen: Tensor, state: State) -> State:
        """The next state, from what the input contributes to the gates [n, gates * width] and the last state."""

    def hidden(self, taps: Taps, module: Steps, suffix: str, state: State) -> Tensor:
        """What the last hidden state contributes to the gates."""
        return self.linear(taps, module, state[0], f"weight_hh{suffix}", f"bias_hh{suffix}")

    def run(self, taps: Taps, module: nn.Module, input: Any, hx: Any = None) -> Any:
        assert isinstance(module, nn.RNNBase)
        packed = input if isinstance(input, PackedSequence) else None
        inputs, lengths = _padded(taps, module, input)
        steps: Tensor | None = None
        if lengths is not None:
            steps = (torch.arange(inputs.shape[1]) < lengths.unsqueeze(1)).to(inputs.device)
        directions = 2 if module.bidirectional else 1
        initial = _initial(module, hx, inputs, module.num_layers * directions)
        final: list[State] = []
        for level in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                suffix = f"_l{level}" + ("_reverse" if direction else "")
                state = tuple(part[level * directions + direction] for part in initial)
                order = range(inputs.shape[1] - 1, -1, -1) if direction else range(inputs.shape[1])
                output, state = self._along(taps, module, suffix, inputs, state, order, steps)
                outputs.append(output)
                final.append(state)
            inputs = torch.cat(outputs, 2) if module.bidirectional else outputs[0]
            if module.dropout and module.training and level < module.num_layers - 1:
                inputs = F.dropout(inputs, module.dropout)
        states = tuple(torch.stack(parts) for parts in zip(*final, strict=True))
        return _unpadded(module, packed, inputs, lengths), states if isinstance(module, nn.LSTM) else states[0]

    def _along(
        self,
        taps: Taps,
        module: nn.RNNBase,
        suffix: str,
        inputs: Tensor,
        state: State,
        order: Iterable[int],
        steps: Tensor | None,
    ) -> tuple[Tensor, State]:
        """One direction of one layer; a sequence's state stands still where it has no step (`steps` [n, T])."""
        seen = self.linear(taps, module, inputs, f"weight_ih{suffix}", f"bias_ih{suffix}").unbind(1)
        outputs: dict[int, Tensor] = {}
        for time in order:
            following = self.step(taps, module, suffix, seen[time], state)
            if steps is not None:
                here = steps[:, time, None]
                following = tuple(torch.where(here, new, old) for new, old in zip(following, state, strict=True))
            state = following
            outputs[time] = state[0]
        return torch.stack([outputs[time] for time in range(len(seen))], 1), state


def _padded(taps: Taps, module: nn.RNNBase, given: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
    """Inputs [n, T, d] in the batch's own order and, of packed ones, their lengths [n], on the CPU."""
    if isinstance(given, PackedSequence):
        return pad_packed_sequence(given, batch_first=True)
    if given.ndim != 3:
        raise no_batch(taps, module, given, "[n, length, d] (or [length, n, d] with batch_first=False)")
    return given if module.batch_first else given.transpose(0, 1), None


def _unpadded(module: nn.RNNBase, packed: PackedSequence | None, outputs: Tensor, lengths: Tensor | None) -> Any:
    """The outputs in the form in which the inputs came."""
    if packed is None or lengths is None:
        return outputs if module.batch_first else outputs.transpose(0, 1)
    if packed.sorted_indices is not None:
        outputs, lengths = outputs[packed.sorted_indices], lengths[packed.sorted_indices.cpu()]
    data = pack_padded_sequence(outputs, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def _initial(module: nn.RNNBase, hx: Any, inputs: Tensor, rows: int) -> State:
    """The states to begin with, each [layers * directions, n, width]."""
    if hx is not None:
        return tuple(hx) if isinstance(module, nn.LSTM) else (hx,)
    hidden = inputs.new_zeros(rows, len(inputs), module.proj_size or module.hidden_size)
    if not isinstance(module, nn.LSTM):
        return (hidden,)
    return hidden, inputs.new_zeros(rows, len(inputs), module.hidden_size)


@supports(nn.RNN)
class RNN(_Recurrent):
    """h' = tanh or relu of the sum."""

    def step(self, taps: Taps, module: Steps, suffix: str, seen: Tensor, state: State) -> State:
        total = seen + self.hidden(taps, module, suffix, state)
        return (total.relu() if module.nonlinearity == "relu" else total.tanh(),)


@supports(nn.GRU)
class GRU(_Recurrent):
    """Reset and update gates; the reset gate multiplies the hidden state's contribution, bias included."""

    def step(self, taps: Taps, module: Steps, suffix: str, seen: Tensor, state: State) -> State:
        seen_reset, seen_update, seen_new = seen.chunk(3, 1)
        reset, update, new = self.hidden(taps, module, suffix, state).chunk(3, 1)
        candidate = (seen_new + (seen_reset + reset).sigmoid() * new).tanh()
        return (candidate + (seen_update + update).sigmoid() * (state[0] - candidate),)


@supports(nn.LSTM)
class LSTM(_Recurrent):
    """Input, forget and output gates, and a projection of the hidden state where proj_size is given."""

    def step(self, taps: Taps, module: Steps, suffix: str, seen: Tensor, state: State) -> State:
        taken, kept, new, shown = (seen + self.hidden(taps, module, suffix, state)).chunk(4, 1)
        cell = kept.sigmoid() * state[1] + taken.sigmoid() * new.tanh()
        hidden = shown.sigmoid() * cell.tanh()
        if isinstance(module, nn.LSTM) and module.proj_size:
            hidden = self.linear(taps, module, hidden, f"weight_hr{suffix}", None)
        return hidden, cell


class _OneStep(_Recurrent):
    """A cell: the caller makes the loop."""

    def run(self, taps: Taps, module: nn.Module, input: Tensor, hx: Any = None) -> Any:
        assert isinstance(module, nn.RNNCellBase)
        if input.ndim != 2:
            raise no_batch(taps, module, input, "[n, d]")
        several = isinstance(module, nn.LSTMCell)
        if hx is None:
            state: State = (input.new_zeros(len(input), module.hidden_size),) * (2 if several else 1)
        else:
            state = tuple(hx) if several else (hx,)
        following = self.step(taps, module, "", self.linear(taps, module, input, "weight_ih", "bias_ih"), state)
        return following if several else following[0]


@supports(nn.RNNCell)
class RNNCell(_OneStep, RNN):
    """One step of an RNN."""


@supports(nn.GRUCell)
class GRUCell(_OneStep, GRU):
    """One step of a GRU."""


@supports(nn.LSTMCell)
class LSTMCell(_OneStep, LSTM):
    """One step of an LSTM."""
