"""Examples that are likely to show a fault, made from the structure of the user's items: extreme, long, short, NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.checks.containers import take_apart
from adadp.testing.changed_dataset import Change

_LOOKED_AT = 64  # how many items are read for their values, lengths and classes
IGNORED = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class Example:
    """An example to be added and left out. `index` is its place in the dataset, None for any."""

    name: str
    item: Any
    index: int | None = None
    made: bool = True


@dataclass(frozen=True)
class Surroundings:
    """The other examples of both worlds: the user's own, changed by `change(index of the one under test)`.

    Those at the offsets `always` from that index are in every lot. `examples` names the awkward examples to try among
    them, None for all.
    """

    name: str
    change: Callable[[int], Change]
    always: tuple[int, ...] = ()
    examples: tuple[str, ...] | None = None


class ItemSchema:
    """The structure of a dataset's items: which leaves are numbers, labels and classes."""

    def __init__(self, dataset: Any) -> None:
        self.items = [dataset[index] for index in range(min(_LOOKED_AT, len(dataset)))]
        self.size = len(dataset)
        self.resizable = not hasattr(dataset, "tensors")  # a TensorDataset's items have one size
        leaves = [leaf for item in self.items for leaf in _leaves(item)]
        whole = [leaf for leaf in leaves if _is_array(leaf) and not _is_float(leaf)]
        self.labelled = any(bool((_tensor(leaf) == IGNORED).any()) for leaf in whole)
        self.has_floats = any(_is_float(leaf) for leaf in leaves)
        # Classes: the values of single integers, by their position among the item's leaves.
        self._classes: list[set[int]] = [set() for _ in _leaves(self.items[0])]
        for item in self.items:
            for seen, leaf in zip(self._classes, _leaves(item), strict=False):
                if _is_class(leaf):
                    seen.add(int(leaf))

    def smallest(self) -> Any:
        """The item with the fewest labels that count, then the fewest values, then the smallest class."""
        return min(self.items, key=_weight)

    def rarest(self, item: Any) -> Any:
        """`item` with its classes changed to the largest that were seen, or the smallest where it has that."""
        numbers = iter(range(len(self._classes)))

        def other(leaf: Any) -> Any:
            seen = self._classes[number] if (number := next(numbers, 0)) < len(self._classes) else set()
            if not _is_class(leaf) or len(seen) < 2:
                return leaf
            value = max(seen) if int(leaf) != max(seen) else min(seen)
            return torch.tensor(value, dtype=leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)(value)

        return _mapped(item, other)


def awkward_examples(dataset: Any) -> Iterator[Example]:
    """Every awkward example that can be made from items of this structure."""
    schema = ItemSchema(dataset)
    item, other = schema.items[0], schema.items[-1]
    yield Example("ordinary", item)
    yield Example("duplicate", schema.smallest())
    if not _same(schema.rarest(item), item):
        yield Example("other class", schema.rarest(item))
    if schema.has_floats:
        yield Example("zeros", _floats(item, torch.zeros_like))
        yield Example("opposite", _floats(other, torch.neg))
        yield Example("large", schema.rarest(_floats(item, lambda x: torch.where(x < 0, -1e4, 1e4).to(x.dtype))))
        yield Example("huge", _floats(item, lambda x: torch.where(x < 0, -1e30, 1e30).to(x.dtype)))
        yield Example("not a number", _floats(item, lambda x: torch.full_like(x, math.nan)))
    if schema.labelled:
        yield Example("every label counts", _labels(item, lambda x, seen: torch.where(x == IGNORED, seen, x)))
        yield Example("no label counts", _labels(item, lambda x, _: torch.full_like(x, IGNORED)))
    if schema.resizable and _lengths(item):
        longest = max(max(_lengths(each), default=0) for each in schema.items)
        yield Example("long", _resized(item, 8 * longest))
        yield Example("short", _resized(item, 1))


def surroundings(dataset: Any) -> list[Surroundings]:
    """The user's own data; all others the same; all but one the same; some others NaN."""
    schema = ItemSchema(dataset)
    alike = schema.smallest()
    unlike = schema.rarest(alike)
    found = [Surroundings("own", lambda target: Change()), Surroundings("alike", lambda target: Change({}, alike))]
    if not _same(unlike, alike):

        def but_one(target: int) -> Change:
            return Change({(target + 1) % schema.size: unlike}, alike)

        found.append(Surroundings("alike but one", but_one, (1,), ("ordinary", "other class")))
    if schema.has_floats:
        corrupt = _floats(schema.items[0], lambda x: torch.full_like(x, math.nan))

        def beside(target: int) -> Change:
            near = [target + step for step in (-3, -2, -1, 1, 2, 3)]
            return Change({place % schema.size: corrupt for place in near if place % schema.size != target})

        found.append(Surroundings("corrupt", beside, (), ("ordinary", "large")))
    return found


# ---- items, whatever containers they come in ------------------------------------------------------------------------


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    parts = take_apart(item, leaf=_is_leaf)
    return parts.rebuilt([change(leaf) for leaf in parts.leaves])


def _leaves(item: Any) -> list[Any]:
    return take_apart(item, leaf=_is_leaf).leaves


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, Mapping | tuple | list) or _is_array(value)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf holds several numbers: a tensor, an array, or a list of numbers."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, list) and len(leaf) > 0 and all(isinstance(value, int | float) for value in leaf)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | np.number | Tensor | np.ndarray) or _is_array(leaf)


def _is_float(leaf: Any) -> bool:
    return _is_number(leaf) and _tensor(leaf).is_floating_point()


def _is_class(leaf: Any) -> bool:
    return _is_number(leaf) and not _is_array(leaf) and not isinstance(leaf, bool) and not _is_float(leaf)


def _tensor(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)


def _as(leaf: Any, tensor: Tensor) -> Any:
    """`tensor` converted to the type of `leaf`."""
    if isinstance(leaf, Tensor):
        return tensor
    if isinstance(leaf, np.ndarray):
        return tensor.numpy().astype(leaf.dtype)
    return tensor.tolist() if isinstance(leaf, list) else type(leaf)(tensor.item())


def _floats(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return _mapped(item, lambda leaf: _as(leaf, change(_tensor(leaf).clone())) if _is_float(leaf) else leaf)


def _labels(item: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Change labels: leaves of integers in which some are ignored."""

    def changed(leaf: Any) -> Any:
        if not _is_array(leaf) or _is_float(leaf) or not bool((_tensor(leaf) == IGNORED).any()):
            return leaf
        tensor = _tensor(leaf)
        counted = tensor[tensor != IGNORED]
        return _as(leaf, change(tensor.clone(), counted[0] if counted.numel() else torch.zeros_like(tensor[0])))

    return _mapped(item, changed)


def _lengths(item: Any) -> list[int]:
    """Lengths of an item's sequences of integers."""
    return [len(leaf) for leaf in _leaves(item) if _is_array(leaf) and not _is_float(leaf)]


def _resized(item: Any, length: int) -> Any:
    """Every sequence of integers repeated or cut to `length`; an integer that is their length is changed too."""
    before = _lengths(item)

    def changed(leaf: Any) -> Any:
        if _is_array(leaf) and not _is_float(leaf):
            tensor = _tensor(leaf)
            repeated = torch.cat([tensor] * (-(-length // len(tensor))))[:length]
            return _as(leaf, repeated)
        counts = _is_class(leaf) and before and int(leaf) == before[0] and before[0] > 2
        return _as(leaf, torch.tensor(length)) if counts else leaf

    return _mapped(item, changed)


def _weight(item: Any) -> tuple[int, ...]:
    arrays = [_tensor(leaf) for leaf in _leaves(item) if _is_array(leaf)]
    labels = [tensor for tensor in arrays if not tensor.is_floating_point() and bool((tensor == IGNORED).any())]
    classes = sum(int(leaf) for leaf in _leaves(item) if _is_class(leaf))
    return sum(int((tensor != IGNORED).sum()) for tensor in labels), sum(tensor.numel() for tensor in arrays), classes


def _same(one: Any, other: Any) -> bool:
    pairs = zip(_leaves(one), _leaves(other), strict=True)
    return all(torch.equal(_tensor(a), _tensor(b)) if _is_number(a) else a == b for a, b in pairs)


__all__ = ["Example", "Surroundings", "awkward_examples", "surroundings"]
