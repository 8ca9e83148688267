"""Operations in which a parameter that no layer answers for meets the examples.

Each rule serves the operations of torch that it is registered for, by name. It says where the examples may be in what
the operation is given, and computes the result so that every example has a copy of the shared value
(`Meeting.expand`), or a form of its own (products, convolutions, rows of a table). An operation without a rule is
refused; the trial then has `torch.func` differentiate the smallest module that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.capture.readings import FREE, Reading, of_rows, of_sizes
from adadp.gradients.capture.shared import Shared, back_to_origins, with_values
from adadp.gradients.forms.dense import Dense, merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.gradients.layers.embedding import Rows
from adadp.gradients.layers.layer import Layer, LayerCall
from adadp.gradients.layers.linear import tokens
from adadp.gradients.rounding import accumulation_dtype


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


RULES: dict[str, Rule] = {}
#: Operations that may bring the examples in although only shared values take part.
EXPANDING: set[str] = set()


def _register(rule: Rule, *names: str) -> None:
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

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        top, each, name = _dimensions(operation), reading[1], operation.name
        in_place = name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))
        if (in_place and isinstance(operation.args[0], Shared)) or (
            self._least and min(tensor.ndim for tensor in _tensors(operation)) < self._least
        ):
            raise NoRule
        if name == "masked_fill":  # which takes a single value
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
_register(
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


_register(Expand(), "expand", "expand_as", "broadcast_to")
_register(Repeat(), "repeat", "tile")
EXPANDING.update(("expand", "expand_as", "broadcast_to", "repeat", "tile"))


# ---- products, convolutions, tables ------------------------------------------------------------------------------


class _Formed(Rule, Layer):
    """An operation whose gradients have a form: its output is tapped. `LayerCall.context` begins with `each`."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = self.inputs(operation)
        if isinstance(inputs, Shared) or not isinstance(inputs, Tensor) or inputs.ndim < 2:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    @abstractmethod
    def inputs(self, operation: Operation) -> Any:
        """The argument that holds the examples."""

    def plain(self, operation: Operation) -> Any:
        """The result, without a way back to the parameters."""
        return operation.with_copies(lambda shared: shared.value.detach())


def unfolded(tensor: Tensor, each: int) -> Tensor:
    """[n * each, ...] as [n, each, ...]; the tensor itself for one row an example."""
    return tensor if each == 1 else tensor.unflatten(0, (-1, each))  # type: ignore[no-untyped-call]


def gathered(parts: Sequence[tuple[Any, PerExample | None]]) -> Mapping[str, PerExample]:
    """The parameters' gradients, by name, from those of several shared values (what is not shared is left out)."""
    found: dict[str, list[PerExample]] = {}
    for shared, form in parts:
        if isinstance(shared, Shared) and form is not None:
            for name, part in back_to_origins(shared, form).items():
                found.setdefault(name, []).append(part)
    return {name: merged(forms) for name, forms in found.items()}


class _Linear(_Formed):
    """y = x W^T + b, of tokens."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        """W and b."""
        return operation.argument(1, "weight"), operation.argument(2, "bias")

    def form(self, inputs: Tensor, outputs: Tensor, planned: int | None) -> Products:
        """The gradients of W as it was given."""
        return Products(inputs, outputs, planned=planned)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        weight, bias = self.weights(operation)
        if isinstance(bias, Shared) and bias.value.ndim != 1:
            raise NoRule
        context = (reading[1], weight, bias)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [self.inputs(operation)], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, weight, bias = call.context
        inputs, outputs = (tokens(unfolded(part, each)) for part in (call.saved[0], call.gradients[0]))
        form = self.form(inputs, outputs, call.planned) if isinstance(weight, Shared) else None
        return gathered([(weight, form), (bias, Dense(outputs.sum(1), planned=call.planned))])


class _Matmul(_Linear):
    """y = x W: the weight as Hugging Face's Conv1D keeps it. Other products of matrices broadcast."""

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        return operation.args[1], None

    def form(self, inputs: Tensor, outputs: Tensor, planned: int | None) -> Products:
        return Products(outputs, inputs, planned=planned)

    def readings(self, operation: Operation) -> Sequence[Reading]:
        if self._vector(operation) is None and self._broadcasts(operation):
            return _MATRICES.readings(operation)
        return super().readings(operation)

    def _vector(self, operation: Operation) -> Shared | None:
        """The second factor, if it is a shared vector: x @ v."""
        factor = operation.args[1] if operation.name in ("matmul", "__matmul__") else None
        return factor if isinstance(factor, Shared) and factor.value.ndim == 1 else None

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        vector, inputs = self._vector(operation), operation.args[0]
        if vector is not None:
            return (inputs * aligned(vector, meeting, inputs.ndim, reading[1])).sum(-1)
        if self._broadcasts(operation):
            return _MATRICES.meet(operation, reading, meeting)
        return super().meet(operation, reading, meeting)

    def _broadcasts(self, operation: Operation) -> bool:
        weight = operation.args[1]
        return not (isinstance(weight, Shared) and weight.value.ndim == 2 and operation.name != "bmm")


class _Addmm(_Matmul):
    """y = b + x W."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(1, "mat1")

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        if operation.kwargs.get("beta", 1) != 1 or operation.kwargs.get("alpha", 1) != 1:
            raise NoRule
        return operation.argument(2, "mat2"), operation.argument(0, "input")

    def _broadcasts(self, operation: Operation) -> bool:
        return False


_MATRICES = Broadcast(least=2)
_register(_Linear(), "linear")
_register(_Matmul(), "matmul", "__matmul__", "mm", "bmm")
_register(_Addmm(), "addmm")


class _Convolve(_Formed):
    """conv1d, conv2d and conv3d with zeros around."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = self.inputs(operation)
        if isinstance(inputs, Shared) or inputs.ndim != operation.argument(1, "weight").ndim:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        inputs, weight = self.inputs(operation), operation.argument(1, "weight")
        if reading[1] != 1:
            raise NoRule
        size = inputs.ndim - 2
        stride, padding, dilation = (
            operation.argument(place, name, default)
            for place, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        if isinstance(padding, str):
            raise NoRule
        stride, padding, dilation = (
            tuple(x) * (size // len(x)) if isinstance(x, Sequence) else (x,) * size for x in (stride, padding, dilation)
        )
        geometry = Geometry(weight.shape, stride, padding, dilation, operation.argument(6, "groups", 1))
        context = (geometry, weight, operation.argument(2, "bias"))
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [inputs], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        geometry, weight, bias = call.context
        outputs = call.gradients[0]
        form = None
        if isinstance(weight, Shared):
            form = Convolution(call.saved[0], outputs, geometry, planned=call.planned)
        summed = outputs.flatten(2).sum(2, dtype=accumulation_dtype(outputs.dtype))
        return gathered([(weight, form), (bias, Dense(summed, planned=call.planned))])


_register(_Convolve(), "conv1d", "conv2d", "conv3d")


class _LookUp(_Formed):
    """Rows of a shared table, by ids that belong to the examples: F.embedding(ids, table), table[ids]."""

    def inputs(self, operation: Operation) -> Any:
        if operation.name == "embedding":
            return operation.argument(0, "input")
        return operation.args[1]

    def _table(self, operation: Operation) -> Shared:
        table = operation.argument(1, "weight") if operation.name == "embedding" else operation.args[0]
        options = (operation.argument(3, "max_norm"), operation.argument(5, "scale_grad_by_freq", False))
        if not isinstance(table, Shared) or (operation.name == "embedding" and (options[0] or options[1])):
            raise NoRule
        return table

    def readings(self, operation: Operation) -> Sequence[Reading]:
        ids, _ = self.inputs(operation), self._table(operation)
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not ids.ndim:
            if isinstance(ids, tuple | list):  # several indices: only those free of examples are known
                return [FREE]
            raise NoRule
        return of_rows(ids.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        table, ids = self._table(operation), self.inputs(operation)
        padding = operation.argument(2, "padding_idx") if operation.name == "embedding" else None
        context = (reading[1], table, padding)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [ids], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, table, padding = call.context
        ids, outputs = unfolded(call.saved[0].long(), each), unfolded(call.gradients[0], each)
        rest = table.value.shape[1:]
        outputs = outputs.reshape(len(ids), -1, rest.numel())
        ids = ids.reshape(len(ids), -1) % len(table.value)  # a negative one counts from the end
        if padding is not None:
            outputs = outputs.masked_fill(ids.eq(padding % len(table.value)).unsqueeze(-1), 0)
        rows = Rows.summed(ids, outputs, (len(table.value), rest.numel()), call.planned)
        if len(rest) == 1:
            return gathered([(table, rows)])
        whole = rows.dense(slice(0, rows.count)).reshape(rows.count, *table.value.shape)
        return gathered([(table, Dense(whole, planned=call.planned))])


_register(_LookUp(), "embedding", "__getitem__")


# ---- norms and activations with parameters -----------------------------------------------------------------------


_NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}


class _Norm(_Formed):
    """A norm with its scale and shift: what each example adds to them is summed as the backward pass comes by."""

    small: ClassVar[bool] = True

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        given = dict(zip(_NORMS[operation.name], operation.args, strict=False)) | operation.kwargs
        inputs, scale, shift = given.pop("input"), given.pop("weight", None), given.pop("bias", None)
        if isinstance(inputs, Shared):
            raise NoRule
        channels = operation.name == "group_norm"

        def normalised(of: Tensor) -> Tensor:
            result: Tensor = operation.function(of, **given)
            return result

        context = (reading[1], normalised, scale, shift, channels)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [inputs], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, normalised, scale, shift, channels = call.context
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))

        def summed(products: Tensor, value: Shared) -> Dense:
            if channels:  # [n, C, ...]
                products = products.flatten(2).sum(2) if products.ndim > 2 else products
            products = unfolded(products, each)
            places = tuple(range(1, products.ndim - value.value.ndim))
            return Dense(products.sum(places) if places else products, planned=call.planned)

        parts: list[tuple[Any, PerExample | None]] = []
        if isinstance(scale, Shared):
            parts.append((scale, summed(outputs * normalised(call.saved[0].to(outputs.dtype)), scale)))
        if isinstance(shift, Shared):
            parts.append((shift, summed(outputs, shift)))
        return gathered(parts)


_register(_Norm(), *_NORMS)


class _Prelu(Rule):
    """prelu: a slope for negative values, one or one a channel."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = operation.argument(0, "input")
        if isinstance(inputs, Shared) or inputs.ndim < 2:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        inputs, slope = operation.argument(0, "input"), operation.argument(1, "weight")
        if not isinstance(slope, Shared):
            raise NoRule
        slope = made(slope, slope.traced().view(-1, *[1] * (inputs.ndim - 2)))
        return F.relu(inputs) - F.relu(-inputs) * aligned(slope, meeting, inputs.ndim, reading[1])


_register(_Prelu(), "prelu")
