"""A dataset as one number, by which several processes find that they were not given the same one."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from adadp.checks.containers import take_apart
from adadp.checks.dataset_items import fetched
from adadp.checks.seeds import seeded

#: How many items stand for a dataset that computes them.
_SOME = 8


def look_of(dataset: Any) -> object:
    """Kind and length; all values of a `TensorDataset` in their order, or else a few items; indices of a `Subset`.

    Processes that read the same rows in another order would have an example in several of their parts. Items that are
    not the same when they are fetched again with the same seed are left out of it.
    """
    if isinstance(dataset, Subset):
        return "Subset", _digest(torch.tensor([*dataset.indices], dtype=torch.int64)), look_of(dataset.dataset)
    kind, length = type(dataset).__qualname__, len(dataset)
    if isinstance(dataset, TensorDataset):
        return kind, length, _digest([*dataset.tensors])
    places = sorted({place * (length - 1) // (_SOME - 1) for place in range(_SOME)}) if length else []
    first, again = _some(dataset, places), _some(dataset, places)
    return kind, length, first if first == again else None


def _some(dataset: Any, places: list[int]) -> bytes | None:
    try:
        with seeded(0):
            # Of a copy: a file that the first item opens must not be shared with workers that are forked later.
            return _digest(fetched(copy.copy(dataset), places))
    except Exception:  # the loop will say what is wrong
        return None


def _digest(value: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for leaf in take_apart(value, leaf=_plain).leaves:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous()
            found.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            found.update(leaf.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind != "O":
            found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif hasattr(leaf, "tobytes"):  # an image
            found.update(leaf.tobytes())
        else:
            found.update(repr(leaf).encode(errors="surrogatepass"))
    return found.digest()


def _plain(value: Any) -> bool:
    return isinstance(value, str | bytes | int | float) or (hasattr(value, "tobytes") and hasattr(value, "mode"))
