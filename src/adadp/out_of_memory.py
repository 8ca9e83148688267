"""When a batch does not fit into memory: which one would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from adadp.errors import LotTooLargeError


@contextmanager
def advising(count: int, fits: Callable[[int], bool] = lambda size: True) -> Iterator[None]:
    """Turn running out of memory with `count` examples into advice. `fits(n)` tries n of them out."""
    try:
        yield
        return
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        said = str(error).splitlines()[0]
    # Outside of `except`: the error's traceback holds on to everything that the failed step had made.
    size = 1 << max(0, count - 1).bit_length() - 1 if count > 1 else 0
    while size and not fits(size):
        size //= 2
    if size:
        advice = f"max_physical_batch_size={size} (adadp train: --microbatch {size}) gives it in parts, as the same lot"
    else:
        advice = "not even one fits: the model is too large for this device"
    raise LotTooLargeError(f"a batch of {count} examples does not fit into memory ({said}): {advice}")


def out_of_memory(error: BaseException) -> bool:
    """Whether this is a device that has no more memory. On a CPU torch says so in an ordinary RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
