"""MultiheadAttention and the transformer layers that contain it."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_loop, captured, loss_of
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.capture import Capture

LENGTH, KEYS, WIDTH, HEADS, COUNT = 4, 5, 6, 2, 3


class Attend(nn.Module):
    """Inputs come batch first; masks have one row per example."""

    def __init__(self, options: dict[str, Any], call: dict[str, Any], cross: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.call, self.cross = call, cross

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        given = (query, key, value) if self.cross else (query, query, query)
        call = dict(self.call)
        if call.pop("padding", False):
            call["key_padding_mask"] = padding[:, : given[1].shape[1]]
        if "attn_mask" in call:
            call["attn_mask"] = make_mask(call["attn_mask"], len(query), given[1].shape[1], query.dtype)
        if not self.attention.batch_first:
            given = tuple(x.transpose(0, 1) for x in given) if self.cross else (query.transpose(0, 1),) * 3
        output, weights = self.attention(*given, **call)
        output = output if self.attention.batch_first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


def make_mask(kind: str, count: int, keys: int, dtype: torch.dtype) -> Tensor:
    future = torch.ones(LENGTH, keys, dtype=torch.bool).triu(1)
    if kind == "causal":
        return torch.zeros(LENGTH, keys, dtype=dtype).masked_fill(future, -torch.inf)
    if kind == "float":
        return torch.arange(LENGTH * keys, dtype=dtype).view(LENGTH, keys) / 10
    return future if kind == "bool" else future.expand(count * HEADS, -1, -1)


def inputs(dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    widths = WIDTH, options.get("kdim") or WIDTH, options.get("vdim") or WIDTH
    lengths = LENGTH, KEYS, KEYS
    tensors = [torch.randn(COUNT, n, d, dtype=dtype) for n, d in zip(lengths, widths, strict=True)]
    padding = torch.zeros(COUNT, KEYS, dtype=torch.bool)
    padding[1, 2:], padding[2, 3] = True, True
    return [*tensors, padding]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "add_bias_kv": True},
]
CALLS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"padding": True},
    {"attn_mask": "float", "average_attn_weights": False},
    {"attn_mask": "bool", "padding": True, "need_weights": False},
    {"attn_mask": "each"},
]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize(("options", "call"), list(itertools.product(OPTIONS, CALLS)), ids=str)
def test_every_option(options: dict[str, Any], call: dict[str, Any], cross: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = Attend({**options, "batch_first": batch_first}, call, cross).double()
    given = inputs(torch.float64, options)
    ordinary = model(*given)
    capture = Capture(model, batch_first=True)
    torch.testing.assert_close(model(*given), ordinary, rtol=1e-10, atol=1e-10)
    capture.detach()
    assert type(model.attention) is nn.MultiheadAttention
    assert_matches(model, given, loop=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{"kdim": 3, "vdim": 7}, {"kdim": 3}, {"vdim": 7, "bias": False}], ids=str)
def test_keys_and_values_of_other_widths(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attend({**options, "batch_first": True}, {"padding": True}, cross=True).to(dtype)
    assert_matches(model, inputs(dtype, options), loop=True)


def test_float32() -> None:
    torch.manual_seed(0)
    assert_matches(Attend({"batch_first": True}, {}, cross=False), inputs(torch.float32, {}), loop=True)


@pytest.mark.parametrize("extra", [{}, {"padding": True}, {"need_weights": False}], ids=str)
def test_causal_hint(extra: dict[str, Any]) -> None:
    torch.manual_seed(0)
    call = {"is_causal": True, "attn_mask": "causal", **extra}
    assert_matches(Attend({"batch_first": True}, call, cross=False).double(), inputs(torch.float64, {}), loop=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_the_same_for_the_same_seed(need_weights: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)
    x = torch.randn(COUNT, LENGTH, WIDTH)
    torch.manual_seed(3)
    ordinary = attention(x, x, x, need_weights=need_weights)[0]
    capture = Capture(attention)
    torch.manual_seed(3)
    watched = attention(x, x, x, need_weights=need_weights)[0]
    torch.testing.assert_close(watched, ordinary)
    assert (attention.eval()(x, x, x)[0] == attention(x, x, x)[0]).all()
    capture.detach()


def test_only_the_output_projection_is_trained() -> None:
    torch.manual_seed(0)
    model = Attend({"batch_first": True}, {}, cross=False).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("out_proj" in name)
    assert_matches(model, inputs(torch.float64, {}), loop=True)


def test_input_without_a_batch_is_refused() -> None:
    attention = nn.MultiheadAttention(WIDTH, HEADS)
    Capture(attention)
    x = torch.randn(LENGTH, WIDTH)
    with pytest.raises(UnsupportedModuleError, match="batch of one"):
        attention(x, x, x)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_encoder(dtype: torch.dtype, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 8, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=dtype
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    assert_matches(model, [torch.randn(COUNT, LENGTH, WIDTH, dtype=dtype)], loop=True)


def test_encoder_and_decoder_sequences_first() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 8, dropout=0.0).double().train()
    source = torch.randn(COUNT, KEYS, WIDTH, dtype=torch.float64)
    target = torch.randn(COUNT, LENGTH, WIDTH, dtype=torch.float64)

    class BatchFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
            return self.inner(source.transpose(0, 1), target.transpose(0, 1), tgt_mask=mask).transpose(0, 1)

    outer = BatchFirst()
    assert_forms(captured(outer, [source, target], batch_first=False), by_loop(outer, [source, target]), 1e-9)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_inference_of_a_watched_encoder(padded: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(COUNT, LENGTH, WIDTH)
    padding = None
    if padded:
        padding = torch.zeros(COUNT, LENGTH, dtype=torch.bool)
        padding[0, 3:] = True
    with torch.no_grad():
        ordinary = model(x, src_key_padding_mask=padding)
        capture = Capture(model)
        watched = model(x, src_key_padding_mask=padding)
        capture.detach()
        after = model(x, src_key_padding_mask=padding)
    open_ = slice(None) if padding is None else ~padding
    torch.testing.assert_close(watched[open_], ordinary[open_])
    torch.testing.assert_close(after[open_], ordinary[open_])


def test_copies_and_pickles_are_ordinary() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
    x = torch.randn(COUNT, LENGTH, WIDTH)
    expected = model(x)
    capture = Capture(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.self_attn) is nn.MultiheadAttention
        torch.testing.assert_close(other(x), expected)
        loss_of(other(x)).backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert capture.take(COUNT) == {}
