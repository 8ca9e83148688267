"""Operations in which a parameter that no layer answers for meets the examples.

Each rule serves the operations of torch that it is registered for, by name. It says where the examples may be in what
the operation is given, and computes the result so that every example has a copy of the shared value
(`Meeting.expand`), or a form of its own (products, convolutions, rows of a table). An operation without a rule is
refused; the trial then has `torch.func` differentiate the smallest module that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adadp.gradients.capture.readings import FREE, ONE_ROW, Reading, of_rows, of_sizes
from adadp.gradients.capture.shared import Shared, with_values
from adadp.gradients.layers.layer import Layer


class NoRule(Exception):  # noqa: N818 - the capture says which module it came from
    """This operation is not known for these arguments."""


class Meeting(Protocol):
    """What a rule may ask of the capture."""

    def expand(self, shared: Shared, fresh: bool = False) -> Tensor:
        """A copy of a shared value for each example, [n, ...]; in memory of their own if `fresh`."""

    def tap_shared(
        self, layer: Layer, values: Sequence[Shared], output: Tensor, saved: Sequence[Tensor], context: Any
    ) -> Tensor:
        """Have `layer` make the per-example gradients of shared values from the output's gradient."""


@dataclass(slots=True)  # not frozen: one is made for every operation on a shared value
class Operation:
    """One operation, as torch was asked for it, of `count` examples."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shared: Sequence[Shared]
    others: Sequence[Tensor]
    count: int

    def label(self) -> tuple[Any, ...]:
        """What tells one place of a module from another: the operation, the parameters, the others' dimensions."""
        names = [name for shared in self.shared for origin in shared.origins for name in origin.names]
        return (self.name, *names, *[other.ndim for other in self.others])

    def with_copies(self, copies: Callable[[Shared], Tensor]) -> Any:
        """The result with each shared value replaced."""
        return self.function(*with_values(self.args, copies), **with_values(self.kwargs, copies))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


class Rule(ABC):
    """How one kind of operation meets the examples."""

    @abstractmethod
    def readings(self, operation: Operation) -> Sequence[Reading]:
        """Where the examples may be, the likeliest first; raises NoRule where that cannot be said."""

    @abstractmethod
    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        """The operation's result, for another reading than FREE."""

    def alone(self, operation: Operation, meeting: Meeting) -> Any:
        """The operation's result for one example, by the same arithmetic as for several; raises NoRule without it.

        Under autocast an operation on the shared value itself may be rounded to bfloat16 where one on copies is not.
        Whether an example is alone in a piece of a lot, which another one decides, would then change what it adds by up
        to 2^-9 of the bound.
        """
        raise NoRule


RULES: dict[str, Rule] = {}
#: Operations that may bring the examples in although only shared values take part.
EXPANDING: set[str] = set()


def register(rule: Rule, *names: str) -> None:
    """Have a rule serve the operations of torch of these names."""
    RULES.update(dict.fromkeys(names, rule))


class _Unknown(Rule):
    """An operation without a rule: it may take values free of examples, and nothing else."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        lengths = [other.shape[0] if other.ndim else None for other in operation.others]
        found = [of_rows(length, operation.count) for length in lengths]
        return next((readings for readings in found if readings != [FREE]), [FREE])

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        raise NoRule


UNKNOWN = _Unknown()


# ---- operations that broadcast -----------------------------------------------------------------------------------


class Broadcast(Rule):
    """Entry by entry, dimensions aligned at the end: an example's copy stands beside its row.

    `least` is how many dimensions belong to the operation itself (2 for a product of matrices).
    """

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def readings(self, operation: Operation) -> Sequence[Reading]:
        top = _dimensions(operation)
        lengths = {other.shape[0] for other in operation.others if other.ndim == top > self._least}
        lengths -= {1} if len(lengths) > 1 else set()
        if len(lengths) > 1 or (self._least and top <= self._least):
            raise NoRule
        return of_rows(next(iter(lengths), None), operation.count) if lengths != {1} else [FREE]

    def alone(self, operation: Operation, meeting: Meeting) -> Any:
        if not _dimensions(operation):
            raise NoRule
        return self.meet(operation, ONE_ROW, meeting)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        top, each, name = _dimensions(operation), reading[1], operation.name
        in_place = name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))
        if (in_place and isinstance(operation.args[0], Shared)) or (
            self._least and min(tensor.ndim for tensor in _tensors(operation)) < self._least
        ):
            raise NoRule
        if name == "masked_fill" and isinstance(operation.args[-1], Shared):  # it takes a single value
            whole, mask, value = operation.args
            return torch.where(mask, aligned(value, meeting, top, each).to(whole.dtype), whole)
        return operation.with_copies(lambda shared: aligned(shared, meeting, top, each))


def _tensors(operation: Operation) -> list[Tensor]:
    return [*operation.others, *(shared.value for shared in operation.shared)]


def _dimensions(operation: Operation) -> int:
    return max(tensor.ndim for tensor in _tensors(operation))


def aligned(shared: Shared, meeting: Meeting, dimensions: int, each: int) -> Tensor:
    """Copies [n * each, ...] of a shared value that broadcasts over the first of so many dimensions."""
    size = shared.value.ndim
    if size == dimensions and shared.value.shape[0] != 1:
        raise NoRule  # something else than examples is in its first dimension
    copies = meeting.expand(shared)
    if size == dimensions:
        copies = copies.squeeze(1)
    elif size < dimensions - 1:
        copies = copies.reshape(len(copies), *[1] * (dimensions - 1 - size), *copies.shape[1:])
    if each > 1:
        copies = copies.unsqueeze(1).expand(-1, each, *[-1] * (copies.ndim - 1)).flatten(0, 1)
    return copies


_OTHER_WORDS = (
    "true_divide divide multiply subtract rsub maximum minimum fmax fmin where lerp lerp_ addcmul addcmul_ addcdiv "
    "addcdiv_ masked_fill copysign hypot scaled_dot_product_attention"
)
_WORDS = "add sub mul div truediv pow floordiv mod eq ne lt le gt ge and or"
register(
    Broadcast(),
    *(f"__{kind}{word}__" for word in _WORDS.split() for kind in ("", "i", "r")),
    *(f"{word}{end}" for word in _WORDS.split() for end in ("", "_")),
    *_OTHER_WORDS.split(),
)


# ---- expansions --------------------------------------------------------------------------------------------------


class Expand(Rule):
    """`expand` to the number of examples: x.expand(len(batch), -1, -1)."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        sizes, value = self._sizes(operation), operation.shared[0].value
        new = len(sizes) - value.ndim
        return of_sizes(
            [(d, size) for d, size in enumerate(sizes) if d < new or (value.shape[d - new] == 1 and size > 1)],
            operation.count,
        )

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        sizes, (shared, *_) = self._sizes(operation), operation.shared
        sizes[reading[1]] = 1
        copies = meeting.expand(made(shared, shared.traced().expand(sizes)))
        return copies.squeeze(reading[1] + 1).movedim(0, reading[1])

    def _sizes(self, operation: Operation) -> list[int]:
        if operation.name == "expand_as":
            return list(operation.args[1].shape)
        sizes, value = _sizes(operation, "size"), operation.shared[0].value
        new = len(sizes) - value.ndim
        return [value.shape[d - new] if size == -1 else size for d, size in enumerate(sizes)]


class Repeat(Rule):
    """`repeat` as often as there are examples; in memory of its own, as `repeat` makes it."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        return of_sizes(enumerate(_sizes(operation, "repeats", "dims")), operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        times, (shared, *_) = list(_sizes(operation, "repeats", "dims")), operation.shared
        times[reading[1]] = 1
        copies = meeting.expand(made(shared, shared.traced().repeat(times)), fresh=True)
        return copies.movedim(0, reading[1]).flatten(reading[1], reading[1] + 1)


def _sizes(operation: Operation, *names: str) -> list[int]:
    given = operation.args[1:]
    if not given:
        return list(next(operation.kwargs[name] for name in names if name in operation.kwargs))
    return list(given[0]) if isinstance(given[0], Sequence) else list(given)


def made(like: Shared, value: Tensor) -> Shared:
    """A shared value computed from another one."""
    return Shared.make(value, like.origins, like.meetings)


register(Expand(), "expand", "expand_as", "broadcast_to")
register(Repeat(), "repeat", "tile")
EXPANDING.update(("expand", "expand_as", "broadcast_to", "repeat", "tile"))
