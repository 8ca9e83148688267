"""How the examples of a tile are shared between programs."""

from __future__ import annotations

import math
from functools import cache

import torch

REGISTERS_FOR = 8  # warps that can have all the registers they may ask for, on one multiprocessor


@cache
def programs_per_tile(
    tiles: int, examples: int, warps: int, overhead: int, multiple: int, device: torch.device
) -> tuple[int, int]:
    """How many programs share the examples of each tile, and how many of them each takes, in multiples of `multiple`.

    So many that the device is full until the end: the least number of rounds times the length of one, a program's start
    and end counted as `overhead` examples. Of shapes and the device alone, so that sums have the same bits each time.
    """
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    room = units * max(1, REGISTERS_FOR // warps)

    def rounds(each: int) -> int:
        return math.ceil(tiles * math.ceil(examples / each) / room) * (each + overhead)

    choices = range(multiple, examples + multiple, multiple)
    each = min(choices, key=lambda each: (rounds(each), -each))
    return math.ceil(examples / each), each
