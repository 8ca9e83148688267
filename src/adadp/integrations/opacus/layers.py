"""Opacus' recurrent layers, attention and wrapper for several processes: torch's own, which the engine knows.

Layers have torch's arithmetic, names of parameters and state_dict. Opacus' DPLSTM, DPGRU, DPRNN and
DPMultiheadAttention write the same state_dict, so weights go from one to the other. Opacus' cells do not: theirs are
"ih.weight" and "hh.weight" where torch has "weight_ih" and "weight_hh".
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: torch's own: `make_private` switches its reduction off, and adds bounded sums up instead (docs/distributed.md).
DifferentiallyPrivateDistributedDataParallel = DistributedDataParallel


class DPLSTM(nn.LSTM):
    """nn.LSTM. `forward(input, hx)`; Opacus calls the second argument `state_init`: give it by position."""


class DPGRU(nn.GRU):
    """nn.GRU."""


class DPRNN(nn.RNN):
    """nn.RNN, with arguments in Opacus' order (bias before the nonlinearity)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
        **more: Any,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers=num_layers,
            nonlinearity=nonlinearity,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **({"proj_size": proj_size} if proj_size else {}),  # which torch refuses, by name
            **more,
        )


class DPRNNCell(nn.RNNCell):
    """nn.RNNCell."""


class DPGRUCell(nn.GRUCell):
    """nn.GRUCell."""


class DPLSTMCell(nn.LSTMCell):
    """nn.LSTMCell."""


class DPMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention."""
