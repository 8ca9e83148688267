"""Gradients of the scales and shifts of normalisations, in one pass over inputs and output gradients.

The normalised input is never made. Everything is summed in float64, where squares of float32 are exact: for a group, of
which a program sees a part at a time, sum (x - mean) b = sum x b - mean sum b then loses nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels import reference
from adadp.gradients.kernels.reference import Plan
from adadp.gradients.kernels.triton_launch import launch
from adadp.gradients.kernels.triton_splits import cdiv, next_power_of_2, whole

TILE = 1024  # entries whose sums a program of four warps keeps
WIDEST = 4096  # of the tokens that a program of more warps normalises
PROGRAMS = 4 * 132  # that keep an H100 or H200 busy


def group_norm_sums(outputs: Tensor, inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Each example's gradients of a group normalisation's weight and bias, [n, channels], from [n, channels, ...].

    They are the sums over places of output gradients times normalised inputs, and of output gradients.
    """
    count, channels = inputs.shape[:2]
    each = channels // groups
    if inputs.numel() == 0 or each > TILE:
        return reference.group_norm_sums(outputs, inputs, groups, eps)
    found = torch.empty(2, count, channels, dtype=torch.float32, device=inputs.device)
    height = next_power_of_2(each)
    places = inputs.numel() // (count * channels)
    launch(
        _group_norm, count * groups, outputs.contiguous(), inputs.contiguous(), found, each, places,
        count * channels, float(eps),
        CHANNELS=height, PLACES=min(TILE // height, next_power_of_2(places)), num_warps=4,
    )  # fmt: skip
    return found[0], found[1]


@triton.jit(do_not_specialize=["apart"])
def _group_norm(
    outputs, inputs, found, channels, places, apart, eps, CHANNELS: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)  # of all examples'
    channel = tl.arange(0, CHANNELS)
    known = channel < channels
    start = group * channels * places
    of_input = tl.zeros([CHANNELS, PLACES], tl.float64)
    of_square = tl.zeros([CHANNELS, PLACES], tl.float64)
    of_output = tl.zeros([CHANNELS, PLACES], tl.float64)
    of_product = tl.zeros([CHANNELS, PLACES], tl.float64)
    for first in range(0, places, PLACES):
        place = first + tl.arange(0, PLACES)
        at = start + channel[:, None] * places + place[None, :]
        inside = known[:, None] & (place < places)[None, :]
        value = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float64)
        output = tl.load(outputs + at, mask=inside, other=0.0).to(tl.float64)
        of_input += value
        of_square += value * value
        of_output += output
        of_product += value * output
    many = tl.cast(channels * places, tl.float64)
    mean = tl.sum(tl.sum(of_input, 1), 0) / many
    variance = tl.sum(tl.sum(of_square, 1), 0) / many - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays
    bias = tl.sum(of_output, 1)
    weight = (tl.sum(of_product, 1) - mean * bias) / tl.sqrt(variance + eps)
    tl.store(found + group * channels + channel, weight.to(tl.float32), mask=known)
    tl.store(found + apart + group * channels + channel, bias.to(tl.float32), mask=known)


def layer_norm_sums(outputs: Tensor, inputs: Tensor, eps: float, planned: Plan = None) -> tuple[Tensor, Tensor]:
    """Each example's gradients of a layer normalisation's weight and bias, [n, d], from tensors [n, T, d].

    They are the sums over tokens of output gradients times normalised inputs, and of output gradients.
    """
    count, tokens, size = inputs.shape
    if inputs.numel() == 0 or size > WIDEST:
        return reference.layer_norm_sums(outputs, inputs, eps)
    width = next_power_of_2(size)
    height = max(1, TILE // width)
    # Programs share an example's tokens as the public number of examples says, so that one more changes no other's sum.
    wanted = cdiv(PROGRAMS, max(1, count if planned is None else planned))
    each = height * cdiv(tokens, height * wanted)
    parts = torch.empty(cdiv(tokens, each), 2, count, size, dtype=torch.float32, device=inputs.device)
    launch(
        _layer_norm, count * len(parts), outputs.contiguous(), inputs.contiguous(), parts, count, tokens, each, size,
        float(eps), TOKENS=height, SIZE=width, num_warps=max(4, width // 256),
    )  # fmt: skip
    weight, bias = whole(parts).unbind()
    return weight, bias


@triton.jit(do_not_specialize=["count", "each"])
def _layer_norm(outputs, inputs, parts, count, tokens, each, size, eps, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    example = tl.program_id(0) % count
    part = tl.program_id(0) // count
    column = tl.arange(0, SIZE)
    weight = tl.zeros([TOKENS, SIZE], tl.float64)
    bias = tl.zeros([TOKENS, SIZE], tl.float64)
    last = tl.minimum(part * each + each, tokens)
    for first in range(part * each, last, TOKENS):
        token = first + tl.arange(0, TOKENS)
        at = (example.to(tl.int64) * tokens + token)[:, None] * size + column[None, :]
        inside = (token < last)[:, None] & (column < size)[None, :]
        value = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float64)
        output = tl.load(outputs + at, mask=inside, other=0.0).to(tl.float64)
        mean = tl.sum(value, 1) / size
        centred = tl.where(inside, value - mean[:, None], 0.0)
        deviation = tl.sqrt(tl.sum(centred * centred, 1) / size + eps)
        weight += output * (centred / deviation[:, None])
        bias += output
    at = part.to(tl.int64) * 2 * count + example
    tl.store(parts + at * size + column, tl.sum(weight, 0).to(tl.float32), mask=column < size)
    tl.store(parts + (at + count) * size + column, tl.sum(bias, 0).to(tl.float32), mask=column < size)
