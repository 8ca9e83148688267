"""Batches and arguments as lists of leaves, of which some hold one row for each example.

`take_apart` flattens nested containers, and `Parts.rebuilt` makes the same container with other leaves, so that a
module or a loss can be run on other rows than it was given. `Arguments` adds where the rows are. An object that is no
known container but may hold tensors is not flattened: `Parts.unknown` names its class, and the trial refuses it.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

#: Types of values that hold no examples: they are passed on as they are.
_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Generator, np.generic, np.dtype, nn.Module, types.FunctionType,
    types.MethodType, types.BuiltinFunctionType, types.ModuleType, functools.partial,
)  # fmt: skip

_Builder = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True)
class Parts:
    """A container's leaves in order, the key or field name of each ("" if it has none), and how to rebuild it."""

    leaves: list[Any]
    names: list[str]
    unknown: tuple[str, ...]  # classes of objects that may hold tensors and cannot be flattened
    _build: _Builder

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        """The same container with other leaves."""
        return self._build(iter(leaves))


def take_apart(value: Any, count: int | None = None, leaf: Callable[[Any], bool] = lambda _: False) -> Parts:
    """Flatten lists, tuples, named tuples, mappings, dataclasses and packed sequences, however nested.

    Tensors and arrays are leaves. So is a list with one entry for each of `count` examples (`one_each`), and whatever
    `leaf` says.
    """
    leaves: list[Any] = []
    names: list[str] = []
    unknown: dict[str, None] = {}

    def whole(value: Any) -> bool:
        return isinstance(value, Tensor | np.ndarray) or one_each(value, count) or leaf(value)

    build = _apart(value, "", whole, leaves, names, unknown)
    return Parts(leaves, names, tuple(unknown), build)


def _apart(
    value: Any,
    name: str,
    whole: Callable[[Any], bool],
    leaves: list[Any],
    names: list[str],
    unknown: dict[str, None],
) -> _Builder:
    def below(values: Sequence[Any], keys: Sequence[Any] | None = None) -> list[_Builder]:
        return [
            _apart(v, name if keys is None else str(keys[i]), whole, leaves, names, unknown)
            for i, v in enumerate(values)
        ]

    if whole(value):
        leaves.append(value)
        names.append(name)
        return next
    if isinstance(value, PackedSequence):
        order = value.sorted_indices is None
        built = below(pad_packed_sequence(value, batch_first=True))
        return lambda it: _packed(*[build(it) for build in built], ordered=order)
    if isinstance(value, tuple | list):
        built = below(value)
        return lambda it: _sequence(value, [build(it) for build in built])
    if isinstance(value, Mapping):
        keys = list(value)
        built = below([value[key] for key in keys], keys)
        return lambda it: _mapping(value, dict(zip(keys, [build(it) for build in built], strict=True)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        built = below([getattr(value, field) for field in fields], fields)
        return lambda it: _dataclass(value, dict(zip(fields, [build(it) for build in built], strict=True)))
    if not isinstance(value, _CONSTANT) and _holds_data(value, 3):
        unknown[type(value).__name__] = None
    return lambda it: value


def one_each(value: Any, count: int | None) -> bool:
    """Whether a list has an entry for each of `count` examples, and not a batch in each entry."""
    if type(value) is not list or count is None or len(value) != count or not value:
        return False
    batches = [isinstance(v, Tensor | np.ndarray) and v.ndim > 0 and count in v.shape[:2] for v in value]
    return not all(batches) and not any(isinstance(v, Mapping | tuple) for v in value)


def _packed(padded: Tensor, lengths: Tensor, *, ordered: bool) -> PackedSequence:
    """Pack again. Rows chosen from a batch sorted by length may be in any order, which torch then has to sort."""
    descending = ordered and bool((lengths[:-1] >= lengths[1:]).all())
    return pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=descending)


def _sequence(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, list):
        return parts if type(value) is list else type(value)(parts)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return parts
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, part in parts.items():
            made[key] = part
        return made
    return type(value)(parts)  # type: ignore[call-arg]


def _dataclass(value: Any, parts: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for field, part in parts.items():
        object.__setattr__(made, field, part)  # works on frozen dataclasses too, and nobody else holds this copy
    return made


def _holds_data(value: Any, depth: int) -> bool:
    """Whether an object may hold examples: it refers to a tensor or array, or its attributes cannot be read."""
    if isinstance(value, Tensor | np.ndarray):
        return True
    if isinstance(value, _CONSTANT):
        return False
    if isinstance(value, Mapping):
        return any(_holds_data(v, depth - 1) for v in value.values()) if depth else True
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds_data(v, depth - 1) for v in value) if depth else True
    inside = getattr(value, "__dict__", None)
    if inside is None or not depth:
        return True
    return any(_holds_data(v, depth - 1) for v in inside.values())


def tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """Every tensor that a result holds, in order, also in attributes of objects (the parameters of a distribution)."""
    found: list[Tensor] = []
    for leaf in _entries(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif leaf is not value or not isinstance(leaf, _CONSTANT):
            inside = [] if isinstance(leaf, _CONSTANT) else [v for k, v in sorted(vars(leaf).items()) if k[:2] != "__"]
            found += [tensor for v in inside if depth for tensor in tensors_in(v, depth - 1)]
    return found


def _entries(value: Any) -> list[Any]:
    """A known container's leaves; any other object itself, if its attributes can be read."""
    parts = take_apart(value)
    if parts.leaves or not parts.unknown:
        return parts.leaves
    return [value] if hasattr(value, "__dict__") else []


def dimension(leaf: Any, count: int, dimensions: Sequence[int]) -> int | None:
    """The first of `dimensions` in which a leaf has `count` rows; None where it holds no rows of examples."""
    if isinstance(leaf, list):
        return 0
    if not isinstance(leaf, Tensor | np.ndarray):
        return None
    return next((d for d in dimensions if leaf.ndim > d and leaf.shape[d] == count), None)


def chosen(leaf: Any, dim: int | None, indices: Sequence[int]) -> Any:
    """Rows of a leaf, detached from any graph; the leaf itself where it has no rows."""
    if dim is None:
        return leaf
    if isinstance(leaf, list):
        return [leaf[i].detach() if isinstance(leaf[i], Tensor) else leaf[i] for i in indices]
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, dim)
    return leaf.detach().index_select(dim, torch.tensor(indices, device=leaf.device))


@dataclass(frozen=True)
class Arguments:
    """What a module or a loss is called with: `dims[i]` is the dimension of leaf i that holds the `count` examples.

    None for a leaf that holds no rows: it is the same for all examples.
    """

    parts: Parts
    dims: list[int | None]
    count: int

    @classmethod
    def read(cls, value: Any, count: int, dimensions: Sequence[int]) -> Arguments:
        """Find the rows of `count` examples: in each leaf the first of `dimensions` that has this length."""
        parts = take_apart(value, count)
        return cls(parts, [dimension(leaf, count, dimensions) for leaf in parts.leaves], count)

    @property
    def leaves(self) -> list[Any]:
        return self.parts.leaves

    @property
    def has_rows(self) -> bool:
        """Whether any leaf holds examples."""
        return any(dim is not None for dim in self.dims)

    def pairs(self) -> Iterator[tuple[Any, int | None]]:
        """Each leaf with its dimension of examples."""
        return zip(self.parts.leaves, self.dims, strict=True)

    def rows_of(self, leaves: Sequence[Any]) -> int:
        """How many examples other leaves of these arguments hold."""
        for leaf, dim in zip(leaves, self.dims, strict=True):
            if dim is not None:
                return int(leaf.shape[dim]) if isinstance(leaf, Tensor) else len(leaf)
        return self.count

    def with_leaves(self, leaves: list[Any], count: int) -> Arguments:
        """The same arguments with other leaves, of `count` rows."""
        return Arguments(dataclasses.replace(self.parts, leaves=leaves), self.dims, count)

    def chosen(self, rows: Sequence[int]) -> Arguments:
        """The same arguments with some of the rows."""
        return self.with_leaves([chosen(leaf, dim, rows) for leaf, dim in self.pairs()], len(rows))
