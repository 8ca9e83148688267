"""Buffers that follow the data: they are saved with the weights, and no noise is added to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from adadp.checks.result_comparison import same_bits
from adadp.errors import UnsupportedModuleError

STATISTICS = (
    "the buffer {} changes when the model runs: statistics of the data that leave training without noise. Freeze it, "
    "or replace the module that keeps it."
)


@contextmanager
def refusing_statistics(module: nn.Module) -> Iterator[None]:
    """Raise where what runs inside writes to a buffer of `module`, which gets its values back.

    A buffer that is new, or of another shape than before, is a cache (a table of positions).
    """
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
    yield
    written = []
    for name, buffer in module.named_buffers():
        known, values = before.get(name, (buffer, None))
        if values is None or buffer.shape != values.shape or same_bits(buffer, values):
            continue
        written.append(name)
        known.data.copy_(values)
        owner, _, own = name.rpartition(".")
        module.get_submodule(owner)._buffers[own] = known
    if written:
        raise UnsupportedModuleError(STATISTICS.format(", ".join(written[:5])))
