"""The tap on a layer's output: it keeps the layer's inputs until the gradients of its outputs arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer, LayerCall
from adadp.gradients.rounding import exact_arithmetic

if TYPE_CHECKING:
    from adadp.gradients.capture.capture import Capture


@dataclass(slots=True)  # not frozen: one is made in every call of a layer, which would take five times as long
class TappedCall:
    """One call of one layer, before a backward pass came through it."""

    capture: Capture
    layer: Layer
    module: nn.Module
    names: Mapping[str, str]  # the module's own name of each trainable parameter it used -> its name in the tree
    context: Any
    tag: object  # which microbatch was being worked on
    planned: int | None  # how many examples such a microbatch is planned for
    staged: list[Record]
    recomputed: bool  # made while a backward pass was running
    each: int = 1  # rows of one example, one after the other: examples and tokens in one dimension
    refusal: str | None = None  # why gradients that come through here must not be used

    def unfolded(self, tensor: Tensor) -> Tensor:
        """A tensor of the call with examples alone in the first dimension."""
        return unfolded(tensor, self.each)


class Record:
    """A call that a backward pass came through, with the gradients of its outputs, or with forms made from them."""

    def __init__(self, call: TappedCall, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        self.call = call
        self.backward = backward_pass()  # torch's number of that pass
        self.halved = any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients)
        self._parts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = (saved, gradients)
        self._forms: Mapping[str, PerExample] = {}
        if call.capture.complete(call) and (bounded := call.capture.bounded(self)) is not None:
            self._forms, self._parts = bounded, None
        elif call.layer.small:
            with exact_arithmetic():
                self._forms, self._parts = self.forms(), None

    def forms(self) -> Mapping[str, PerExample]:
        """The per-example gradients, by the module's own names; made in `exact_arithmetic`."""
        if self._parts is None:
            return self._forms
        call, (saved, gradients) = self.call, self._parts
        if call.each > 1:
            saved, gradients = tuple(map(call.unfolded, saved)), tuple(map(call.unfolded, gradients))
        wanted = call.names.keys()
        return call.layer.per_example(LayerCall(call.module, call.context, saved, gradients, wanted, call.planned))


def backward_pass() -> int:
    """The number of the backward pass that is running, -1 where none is."""
    return torch._C._current_graph_task_id()


def unfolded(tensor: Tensor, each: int) -> Tensor:
    """[n * each, ...] as [n, each, ...]; the tensor itself for one row an example."""
    return tensor if each == 1 else tensor.unflatten(0, (-1, each))  # type: ignore[no-untyped-call]


def refuse_count(call: TappedCall, form: PerExample, count: int) -> None:
    """Raise where a call's gradients are not those of `count` examples."""
    if form.count != count:
        raise UnsupportedModuleError(
            f"{call.capture.module_name(call.module)}: its input holds {form.count} examples where the microbatch has "
            f"{count}. A module that reshapes, repeats or drops examples has no per-example gradients. Keep "
            "examples in the first dimension (batch_first=False for [T, N, ...] sequences) from the loader to the "
            "loss."
        )


def refuse_misplaced(call: TappedCall, tag: object) -> None:
    """Raise where a call was made for another microbatch than `tag`, or inside a backward pass."""
    if call.recomputed:
        raise TrainingLoopError(
            f"{call.capture.module_name(call.module)} ran again inside the backward pass: reentrant checkpointing "
            "is not supported. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    if call.tag is not tag:
        raise TrainingLoopError(
            "a backward pass of an earlier lot or microbatch was not followed by optimizer.step(). Call step() "
            "after every batch of the loader; lots larger than memory are cut by max_physical_batch_size=."
        )


class Tap(torch.autograd.Function):
    """The identity that keeps a layer's inputs and hands on its output gradients.

    What it returns shares the memory of a layer's outputs, and the count of changes in it: a model that writes into it
    meets the same errors as without a tap.

    The inputs go through `save_for_backward`, so non-reentrant checkpointing drops and recomputes them like any
    other saved tensor. `anchor` is a leaf that makes the graph exist where neither input nor (detached) weights require
    a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: TappedCall, outputs: int, *tensors: Tensor) -> Any:
        ctx.call, ctx.rest = call, len(tensors) - outputs
        ctx.save_for_backward(*tensors[outputs:])
        return tuple([tensor.detach() for tensor in tensors[:outputs]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: the gradients are to be differentiated themselves
            gradients = tuple(_Once.apply(gradient) for gradient in gradients)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            detached = tuple(gradient.detach() for gradient in gradients)
            ctx.call.staged.append(Record(ctx.call, ctx.saved_tensors, detached))
        return torch.zeros(()), None, None, *gradients, *[None] * ctx.rest


class Expand(torch.autograd.Function):
    """A copy of a value made of parameters for each example; keeps the gradients of the copies."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: TappedCall, value: Tensor, count: int) -> Tensor:
        ctx.call = call
        return value.unsqueeze(0).expand(count, *value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            ctx.call.staged.append(Record(ctx.call, (), tuple(gradient.detach() for gradient in gradients)))
        return torch.zeros(()), None, None, None


class _Once(torch.autograd.Function):
    """The identity, for gradients that must not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModuleError(
            "a gradient of the private module is differentiated itself (a gradient penalty, create_graph=True): what "
            "then comes back to its layers is not per example. Leave the term out, or compute it on public inputs "
            "with a copy of the module."
        )
