"""How the examples of a tile are shared between programs, each of which has a part of the sum."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from adadp.gradients.kernels.reference import Plan

REGISTERS_FOR = 8  # warps that can have all the registers they may ask for, on one multiprocessor
ROUNDS = 32  # of programs, at most: in more, how full the last one is hardly counts


def cdiv(length: int, step: int) -> int:
    """How many steps a length takes. Triton's own takes microseconds: it answers in kernels too."""
    return -(-length // step)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def programs_per_tile(
    tiles: int, examples: int, warps: int, overhead: int, multiple: int, device: torch.device,
    *, planned: Plan = None, kept: int = 1, part: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """How many programs share the examples of each tile, and how many of them each takes, in multiples of `multiple`.

    So many that the device is full until the end: the least number of rounds times the length of one, a program's start
    and end counted as `overhead` examples. But no more than have room for their parts (`most_parts`). It follows from
    shapes, the device and the `planned` number of examples alone (`examples` if None), so that sums have the same bits
    each time and one example more does not change how the others are added up.
    """
    planned = max(1, examples if planned is None else planned)
    each = _each(tiles, planned, warps, overhead, multiple, device, most_parts(planned, kept, part))
    return math.ceil(examples / each), each


def most_parts(examples: int, kept: int, part: int) -> int:
    """How many parts of `part` numbers take no more memory than `kept` numbers of each example; at least one."""
    return max(1, examples * kept // part if part else examples)


def whole(parts: Tensor) -> Tensor:
    """The sum of parts [splits, ...]; where there is but one, that is it."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


@cache
def _each(
    tiles: int, examples: int, warps: int, overhead: int, multiple: int, device: torch.device, most: int
) -> int:  # fmt: skip
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    room = units * max(1, REGISTERS_FOR // warps)

    def each(parts: int) -> int:
        return multiple * math.ceil(examples / (parts * multiple))

    def length(parts: int) -> int:
        return math.ceil(tiles * parts / room) * (each(parts) + overhead)

    choices = range(1, max(1, min(most, math.ceil(examples / multiple), ROUNDS * room // tiles)) + 1)
    return each(min(choices, key=length))
