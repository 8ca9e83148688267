"""Values made of parameters alone, and the point where they meet the examples.

A parameter that no layer answers for (a class token, a table of positions, the scale of a norm) is a `Shared` tensor
while modules run, and so is what a layer makes of an input without examples. Operations on shared values and on values
free of data give shared values, in an ordinary graph that leads back to the parameters. Where one meets a tensor of
examples it is expanded over them (`Capture.expand`): autograd then brings the gradient of each example's copy, and
the graph, run backwards for each example, turns it into the parameters' per-example gradients.

Which operations may meet examples, and how, is in `adadp.gradients.capture.operations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import Dense, merged, stored_or_recomputed
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer, LayerCall


class Origin(ABC):
    """Where the graph of shared values begins: a parameter, or what a layer made of an input without examples."""

    start: Tensor  # where the graph begins
    names: Collection[str]  # of the parameters behind it, in the tree

    @abstractmethod
    def is_itself(self, value: Tensor) -> bool:
        """Whether a value is the origin's own, so that their gradients are the same."""

    @abstractmethod
    def forms(self, gradients: PerExample) -> Mapping[str, PerExample]:
        """The parameters' per-example gradients, from those of `start`."""


@dataclass(frozen=True, eq=False)
class ParameterOrigin(Origin):
    """A parameter itself, in one pass.

    `start` is a view of `leaf` that the pass made: a graph that another pass began at the leaf may have been made on
    another CUDA stream, and could not be gone back through while a CUDA graph is recorded.
    """

    leaf: Tensor
    name: str
    start: Tensor

    @property
    def names(self) -> Collection[str]:  # type: ignore[override]
        return (self.name,)

    def is_itself(self, value: Tensor) -> bool:
        return value is self.leaf

    def forms(self, gradients: PerExample) -> Mapping[str, PerExample]:
        return {self.name: gradients}


@dataclass(frozen=True, eq=False)
class LayerOrigin(Origin):
    """The output of a layer that was given an input without examples, the same for all of them."""

    start: Tensor
    layer: Layer
    module: nn.Module
    context: Any
    saved: Sequence[Tensor]
    own: Mapping[str, str]  # the module's own name of each trainable parameter -> its name in the tree
    output: Tensor  # a copy of the start: the model may write into it

    @classmethod
    def of(cls, output: Tensor, layer: Layer, module: nn.Module, context: Any, saved: Sequence[Tensor],
           own: Mapping[str, str]) -> LayerOrigin:  # fmt: skip
        """The origin of what a layer returned."""
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            return cls(leaf, layer, module, context, [tensor.detach() for tensor in saved], own, leaf.clone())

    def is_itself(self, value: Tensor) -> bool:
        return value is self.output and value._version == 0

    @property
    def names(self) -> Collection[str]:  # type: ignore[override]
        return self.own.values()

    def forms(self, gradients: PerExample) -> Mapping[str, PerExample]:
        whole = gradients.dense(slice(0, gradients.count))
        saved = [tensor.unsqueeze(0).expand(gradients.count, *tensor.shape) for tensor in self.saved]
        if self.start.shape[0] == 1:  # [1, T, ...]: one example's worth
            whole, saved = whole.squeeze(1), [tensor.squeeze(1) for tensor in saved]
        call = LayerCall(self.module, self.context, saved, [whole], self.own.keys(), gradients.planned)
        return {self.own[name]: form for name, form in self.layer.per_example(call).items()}


class Operations(Protocol):
    """What shared values are made in (`adadp.gradients.capture.meetings`)."""

    @property
    def number(self) -> int:
        """The number of the pass that runs."""

    def operation(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: Sequence[Shared],
        others: Sequence[Tensor],
    ) -> Any:
        """The result of an operation of torch on shared values and other tensors."""


class Shared(Tensor):
    """A value made of parameters alone. As a tensor of C++ it is a leaf that wants a gradient: what gets one there went
    past `__torch_function__` and was not seen (`Tree.refuse_unseen_uses`)."""

    value: Tensor  # the same numbers, in the graph that leads back to the origins' leaves
    origins: tuple[Origin, ...]
    meetings: Operations

    in_pass: int  # the pass in which a parameter's own graph was begun

    def traced(self) -> Tensor:
        """The value to compute with: of a parameter itself, where the graph of the pass that runs now begins."""
        origin = self.origins[0]
        if not isinstance(origin, ParameterOrigin) or self.value is not origin.leaf:
            return self.value
        if self.in_pass != self.meetings.number:
            with torch.enable_grad():
                origin = ParameterOrigin(origin.leaf, origin.name, origin.leaf.view_as(origin.leaf))
            self.origins, self.in_pass = (origin,), self.meetings.number
        return origin.start

    @staticmethod
    def make(value: Tensor, origins: Sequence[Origin], meetings: Operations) -> Shared:
        """The shared value of these numbers, `value`, whose graph begins at the leaves of `origins`."""
        shared: Shared = Tensor._make_subclass(Shared, value.detach(), True)
        shared.value, shared.origins, shared.meetings = value, tuple(dict.fromkeys(origins)), meetings
        shared.in_pass = 0
        return shared

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operation(func, args, kwargs or {})


def _operate(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(function, "__name__", "") in _ON_THE_LEAF:
        with torch._C.DisableTorchFunctionSubclass():  # of the tensor itself: for the gradient that must not come
            return function(*args, **kwargs)
    name = getattr(function, "__name__", "")
    if name in _LIKE and not isinstance(args[0], Shared):  # a parameter is the pattern, and does not take part
        return function(*with_values(args, lambda shared: shared.value.detach()), **kwargs)
    shared, others = taking_part((args, kwargs))
    if name in _ATTRIBUTES or name in _LIKE:
        others = []
    return shared[0].meetings.operation(function, args, kwargs, shared, others)


_operation = torch.compiler.disable(_operate)  # type: ignore[no-untyped-call]
_LIKE = {"type_as", "view_as", "reshape_as", "to"}
_ATTRIBUTES = {"__get__", "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "size", "dim"}
_ON_THE_LEAF = {"_is_view", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


def taking_part(arguments: Any) -> tuple[list[Shared], list[Tensor]]:
    """The shared values among nested arguments, and the other tensors."""
    shared: list[Shared] = []
    others: list[Tensor] = []

    def look(argument: Any) -> None:
        if isinstance(argument, Tensor):
            shared.append(argument) if isinstance(argument, Shared) else others.append(argument)
        elif isinstance(argument, tuple | list):
            for part in argument:
                look(part)
        elif isinstance(argument, dict):
            for part in argument.values():
                look(part)

    look(arguments)
    return shared, others


def passed(shared: Shared) -> bool:
    """Whether an autograd.Function returned a shared value as it got it: what it does to gradients is not seen."""
    with torch._C.DisableTorchFunctionSubclass():
        return not shared.is_leaf


def with_values(arguments: Any, of: Callable[[Shared], Tensor]) -> Any:
    """Nested arguments in which each shared value is replaced by what `of` returns for it."""
    if isinstance(arguments, Shared):
        return of(arguments)
    if isinstance(arguments, tuple | list):
        parts = [with_values(part, of) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else type(arguments)(parts)
    if isinstance(arguments, dict):
        return {name: with_values(part, of) for name, part in arguments.items()}
    return arguments


def made_shared(result: Any, like: Sequence[Shared], derived: list[Shared]) -> Any:
    """A result of values alone: its tensors that lead back to a parameter are shared again, and added to `derived`."""
    if isinstance(result, Tensor):
        if not result.requires_grad or isinstance(result, Shared):
            return result
        shared = Shared.make(result, [origin for one in like for origin in one.origins], like[0].meetings)
        derived.append(shared)
        return shared
    if isinstance(result, tuple | list):
        parts = [made_shared(part, like, derived) for part in result]
        return type(result)(parts) if type(result) in (tuple, list) else tuple(parts)
    return result


@contextmanager
def kept_whole() -> Iterator[None]:
    """What the graph of shared values saves is kept: checkpointing must not drop it, the step needs it."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        yield


class Expansion(Layer):
    """The copies of a shared value for each example: their gradients, taken back to the parameters.

    `LayerCall.context` is the value. Forms are by the parameters' names in the tree.
    """

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        return back_to_origins(call.context, Dense(call.gradients[0], planned=call.planned))


EXPANSION = Expansion()


def back_to_origins(shared: Shared, form: PerExample) -> Mapping[str, PerExample]:
    """The parameters' per-example gradients, by their names in the tree, from those of a shared value."""
    value, origins = shared.value, shared.origins
    parts: dict[str, list[PerExample]] = {}
    for origin in origins:
        gradients = form if origin.is_itself(value) else _through_graph(value, origin.start, form)
        for name, found in origin.forms(gradients).items():
            parts.setdefault(name, []).append(found)
    return {name: merged(found) for name, found in parts.items()}


def _through_graph(value: Tensor, start: Tensor, form: PerExample) -> PerExample:
    """The gradients of `start`, from which `value` was computed."""
    if _reshaped(value, start):
        return Dense(form.dense(slice(0, form.count)).reshape(form.count, *start.shape), planned=form.planned)

    def make(examples: slice) -> Tensor:
        return _backwards(value, start, form.dense(examples).to(value.dtype))

    return stored_or_recomputed(make, _Like(form.count, start.shape, form.planned))


def _reshaped(value: Tensor, start: Tensor) -> bool:
    """Whether a value is its start in another shape and no more: all of the same memory, in the same order."""
    same = value._base is not None and value._base is start._base and value.data_ptr() == start.data_ptr()
    return same and value.numel() == start.numel() and value.is_contiguous() and start.is_contiguous()


def _backwards(value: Tensor, start: Tensor, gradients: Tensor) -> Tensor:
    with torch.enable_grad():
        (found,) = torch.autograd.grad(
            [value], [start], [gradients], retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    return gradients.new_zeros(len(gradients), *start.shape) if found is None else found.detach()


class _Like(Dense):
    """Which examples of which parameter: for forms that are made like it."""

    def __init__(self, count: int, shape: Sequence[int], planned: int) -> None:
        PerExample.__init__(self, count, shape, planned)


def refuse_shared(name: str, arguments: Any) -> None:
    """Raise where a module that has a rule of its own for its inputs is given a shared value."""
    if taking_part(arguments)[0]:
        raise UnsupportedModuleError(
            f"{name} is given parameters as its input, without examples. Expand them over the batch first: "
            "query.expand(len(x), -1, -1)."
        )
