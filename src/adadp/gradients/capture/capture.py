"""Seeing what each layer received and what came back to it, in one ordinary backward pass.

Hooks replace a layer's parameters by detached aliases while it runs, so autograd computes the layer's input gradient
and *not* its weight gradient, and thread its output through a `Tap`. When the backward pass reaches the tap, the
layer's input and its output gradient are both known: per-example gradients are made of nothing else.

What must not happen is that a parameter receives an ordinary gradient, summed over examples that nobody clipped. So
while any module of the tree runs, every trainable parameter that no layer is using is replaced by a *shared value*
(`adadp.gradients.capture.shared`), which sees the operations on it and is expanded over the examples where it meets
them. A gradient that reaches one past those operations is a use that was not seen, and is refused. A gradient that
reaches the parameter itself comes from outside the forward pass: a term of the loss on the weights.

Where examples are in what a layer or an operation is given is learnt in trials (`adadp.gradients.capture.readings`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.hooks import WatchedPart, refuse_tracing
from adadp.gradients.capture.meetings import Meetings, UnruledError
from adadp.gradients.capture.readings import FREE, ONE_ROW, UNTRIED, Readings, Situation
from adadp.gradients.capture.shared import Shared, refuse_shared
from adadp.gradients.capture.slot import past
from adadp.gradients.capture.tap import Record, Tap, TappedCall, backward_pass, refuse_count, refuse_misplaced, unfolded
from adadp.gradients.capture.tree import UNSEEN, Tree
from adadp.gradients.capture.work import Frame, Observed, Work
from adadp.gradients.forms.dense import merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer
from adadp.gradients.rounding import exact_arithmetic


class FirstCall(Protocol):
    """Called with a module's arguments before it runs, outermost modules only."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None: ...


class Capture:
    """Watches one module tree and collects its per-example gradients. Nothing is written on the parameters.

    Args:
        module: the root of the tree.
        batch_first: whether sequences come as [n, T, ...]; if not, as [T, n, ...].
        through_func: names of modules that `torch.func` differentiates as a whole; `notices` says which.
        chunk: how many examples torch.func differentiates at a time.

    Raises:
        UnsupportedModuleError: a module of the tree has no per-example gradients.

    Guarantee: every use of a trainable parameter in the forward pass is either part of what `take` returns, example by
    example, or makes `take` raise.
    """

    def __init__(
        self, module: nn.Module, *, batch_first: bool = True, through_func: Iterable[str] = (), chunk: int = 32
    ) -> None:
        self.module = module
        self.batch_first = batch_first
        self.chunk = chunk
        self.on_first_call: FirstCall | None = None
        self.before_pass: Callable[[], None] | None = None  # called before the model runs on a microbatch
        self.after_call: Callable[[Any], None] | None = None  # called with what an outermost module returned
        #: Why gradients of the next outermost call must not be used, though it may run: it could not be tried.
        self.refusal: str | None = None
        #: Makes of a parameter's gradients all that is needed of them, as soon as they are complete.
        self.bound_early: Callable[[str, PerExample], PerExample] | None = None
        self.readings = Readings()
        self.work = Work()
        self.meetings = Meetings(self)
        self._batch: int | None = (
            None  # how many examples an outermost module seems to be given outside of a microbatch
        )
        self.notices: list[tuple[str, str]] = []  # name and class of each module that goes through torch.func unasked
        self.running: list[Frame] = []
        self._refusal: str | None = None  # why the call that is tapped next must not be used
        self._depth = 0  # how many of them run with gradients wanted
        self.passes = 0  # how many were begun
        self.anchor = torch.zeros((), requires_grad=True)
        self.staged: list[Record] = []
        self.observed: Observed | None = None
        self._asleep = threading.local()  # a thread's own: others may run the model meanwhile
        self._sleepers = 0  # threads that differentiate modules: torch.func puts tensors of its own in their places
        self._handles: list[Any] = []
        self._through_func = frozenset(through_func)
        self._watch()

    def _watch(self) -> None:
        self._tree = Tree(self.module, self._through_func, self.chunk, self.meetings)
        self._parts: dict[int, WatchedPart] = {}
        for module in self._tree.watched:
            layer = self._tree.layer(module)
            slots = list(self._tree.slots_of(module).values()) if layer is not None else []
            self._parts[id(module)] = part = WatchedPart(self, module, layer, slots)
            # First of all: a hook that computes with the parameters must not find the parameters themselves.
            self._handles.append(module.register_forward_pre_hook(part.before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(part.after, with_kwargs=True, always_call=True))
            if layer is not None:
                layer.install(module, self)

    def send_through_func(self, unruled: UnruledError) -> None:
        """Have torch.func differentiate the module that holds what has no rule, from the next pass on.

        Raises `unruled` where it is torch.func's already, or nothing holds it.
        """
        name = unruled.holder
        if name is None or name in self._through_func:
            raise unruled
        self.detach()
        self._through_func |= {name}
        self._watch()
        self.readings.forget_since({})
        self.notices.append((name or "the model", type(self.module.get_submodule(name)).__name__))

    # ---- between passes ----------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove every hook; the module is an ordinary one again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part in self.module.modules():
            if layer := self._tree.layer(part):
                layer.uninstall(part)

    @property
    def attached(self) -> bool:
        """Whether the module is watched still. If not, its gradients are those of all examples together."""
        return bool(self._handles)

    @property
    def tag(self) -> object:
        """Which microbatch is being worked on."""
        return self.work.tag

    @property
    def count(self) -> int | None:
        """How many examples it has; None outside a microbatch."""
        return self.work.count

    @property
    def recorded(self) -> bool:
        """Whether a backward pass came through a watched layer since the last `take`."""
        return bool(self.work.records)

    @property
    def records(self) -> int:
        """How many calls of layers backward passes came through since the last `take`."""
        return len(self.work.records)

    @property
    def halved(self) -> bool:
        """Whether output gradients came in half precision since the last `take`."""
        return any(record.halved for record in self.work.records)

    def work_on(self, tag: object, count: int, planned: int | None = None) -> None:
        """What runs from now on works on the microbatch `tag` of `count` examples.

        `planned` is the public number of examples that forms choose their arithmetic for (see `PerExample`).
        """
        self.work = replace(
            self.work, tag=tag, count=count, planned=planned, uses=Counter(), anchors=[], derived=[]
        )  # fmt: skip
        self.bound_early = None

    # ---- while modules run -------------------------------------------------------------------------------------

    @property
    def awake(self) -> bool:
        """Whether calls of modules are to be seen: no layer runs them again to differentiate them.

        A compiled module still calls hooks that it was compiled with after they were removed.
        """
        return bool(self._handles) and not getattr(self._asleep, "here", False)

    def watches(self, module: nn.Module) -> bool:
        """Whether a call of `module` is to be seen now: it is part of the tree, and not a copy."""
        return self.awake and module in self._tree

    def enter(self, part: WatchedPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A watched module is about to run: lend its layer the parameters; begin a pass if it is the outermost one."""
        active = torch.is_grad_enabled()
        if not active:
            self.running.append(Frame(part, False, False))
            return
        if not self._depth:
            refuse_tracing()
            self._begin(part.module, args, kwargs)
            part = self._parts[id(part.module)]  # the trial may have sent it through torch.func
        layer = part.layer
        shared = layer is not None and any(isinstance(one, Shared) for one in (*args, *kwargs.values()))
        self.running.append(Frame(part, True, shared))
        self._depth += 1
        part.calls = part.calls + 1 if part.in_pass == self.passes else 0
        part.in_pass = self.passes
        if layer is None:
            return
        if self.readings.learning:
            self.readings.called(self.module_name(part.module), part.calls + 1)
        if any(slot.taken for slot in part.slots):  # by torch.func.functional_call: it has other weights for this call
            self.running[-1].shared = shared = True
        if not shared:
            for slot in part.slots:
                slot.lend()
        elif layer.atomic:
            refuse_shared(self.module_name(part.module), (args, kwargs))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        self._batch = len(given[0]) if given and self.count is None else None
        shapes = tuple([tuple(leaf.shape[1:]) for leaf in given])
        situation = Situation(self.module_name(module), shapes, self._tree.trained())
        # What checkpointing runs again in the backward pass was part of a module that ran before.
        if self.count is not None and not self.work.aside and backward_pass() == -1:
            self.readings.situation = situation
            # What they run themselves is no part of a checkpoint that this call may be in.
            # Detached: a node that keeps its own output is never freed.
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
                if self.on_first_call is not None:
                    self.on_first_call(module, args, kwargs, self.count)
                if self.before_pass is not None:
                    self.before_pass()
        if backward_pass() == -1:
            self.readings.situation = situation
        self._begin_pass()

    def leave(self, part: WatchedPart, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A watched module has run, or raised: its layer taps the output, and the parameters are guarded again."""
        if not self.running or not self.running[-1].active:  # empty when the check of the first call refused it
            self.running = self.running[:-1]
            return None
        layer = None if self.running[-1].shared else part.layer
        try:
            if self.observed is not None:
                # A PackedSequence is sorted by length, so its rows cannot be assigned to examples.
                parts = tree_leaves(output, is_leaf=lambda one: isinstance(one, PackedSequence))
                leaves = [leaf.detach().clone() for leaf in parts if isinstance(leaf, Tensor)]
                self.observed.outputs.append((self.module_name(part.module), leaves))
            if layer is not None:
                for slot in part.slots:
                    slot.hide()
                output = None if output is None else layer.after(self, part.module, args, kwargs, output)
        finally:
            self.running.pop()
            self._depth -= 1
            if not self._depth:
                self._tree.restore()
        if not self._depth and self.after_call is not None and self.count is not None and not self.work.aside:
            self.after_call(output)
        return None if layer is None else output

    def refuse_replaced(self) -> None:
        """Raise where a parameter was replaced since the capture began."""
        self._tree.refuse_replaced()

    def _begin_pass(self) -> None:
        self.meetings.unread = None
        self.passes += 1
        if not self._sleepers:
            self._tree.refuse_replaced()
        self._tree.guard()
        # `backward()` accumulates into the anchor, `torch.autograd.grad` does not: only the former commits what
        # the taps have staged, so that gradients taken for another purpose leave nothing behind.
        staged: list[Record] = []
        self.staged = staged
        self.anchor = torch.zeros((), requires_grad=True)
        if self.count is not None or self.observed is not None or self.work.aside:
            self.work.anchors.append(self.anchor)
        records, refusals = self.work.records, self.work.refusals
        refusal, self.refusal = self.refusal, None

        def commit(_: Tensor) -> None:
            records.extend(record for record in staged if record.backward == backward_pass())
            staged.clear()
            if refusal is not None:
                refusals.append(refusal)

        self.anchor.register_post_accumulate_grad_hook(commit)  # type: ignore[no-untyped-call]

    # ---- what layers call (Taps) -------------------------------------------------------------------------------

    def tap(
        self,
        layer: Layer,
        module: nn.Module,
        outputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        context: Any = None,
        used: Collection[str] | None = None,
    ) -> tuple[Tensor, ...]:
        """Keep `saved` and `context` until the gradients of `outputs` arrive; returns the outputs to use instead."""
        names = {
            own: slot.name
            for own, slot in self._tree.slots_of(module).items()
            if slot.parameter.requires_grad and (used is None or own in used)
        }
        if not names:
            return tuple(outputs)
        each, rows = 1, self.rows
        refusal, self._refusal = self._refusal, None
        if rows != 1 and not self.tried(module):
            refusal = UNTRIED.format(self.module_name(module))
        if saved and rows is not None and self.batch_first and (layer.tokenwise or layer.repeatable):
            inputs = saved[0]
            usual = inputs.ndim and inputs.shape[0] == rows
            if not (usual and self.readings.plain) and (layer.tokenwise or len(inputs) == 1 != rows):
                reading, unread = self.meetings.reading_of(inputs, rows)
                refusal = refusal or unread
                if reading == FREE:
                    return (self.meetings.of_layer(outputs[0], layer, module, context, saved, names),)
                each = reading[1]
        if not self.readings.plain and self.readings.learning:
            if saved and self.batch_first and rows is not None and not layer.own_rows:
                inputs = saved[0]
                fits = inputs.ndim and inputs.shape[0] == rows * each
                self.readings.saw(self.module_name(module), unfolded(inputs, each) if fits else None)
            return tuple(outputs)
        call = self.called(layer, module, names, context, each)
        call.refusal = refusal
        if self.observed is not None and saved:
            given, returned = call.unfolded(saved[0].detach()), call.unfolded(outputs[0].detach())
            self.observed.inputs.append((self.module_name(module), given, returned))
            if each > 1:
                self.observed.outputs.append((self.module_name(module), [given.clone()]))
        kept = [tensor.detach() for tensor in saved]
        return tuple(Tap.apply(self.anchor, call, len(outputs), *outputs, *kept))  # type: ignore[no-untyped-call]

    def tried(self, module: nn.Module) -> bool:
        """Whether a trial saw the call of the module that runs; outside of lots nothing is asked for."""
        if not self.sure:
            return True
        part = self.running[-1].part
        return part.module is not module or self.readings.tried(self.module_name(module), part.calls)

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether an argument of the module that runs has a row for each example; else it is the same for all."""
        rows = self.rows
        if not tensor.ndim or rows is None or rows == 1 or not self.batch_first:
            return bool(tensor.ndim and (rows is None or tensor.shape[0] == rows))
        reading, refusal = self.meetings.reading_of(tensor, rows)
        if reading[1] > 1 and self.sure:
            refusal = refusal or UNTRIED.format(self.module_name(self.running[-1].part.module))
        self._refusal = self._refusal or refusal  # of the call that is tapped next
        if self.readings.learning and reading == ONE_ROW:
            self.readings.saw(self.module_name(self.running[-1].part.module), tensor)
        return reading == ONE_ROW

    def called(
        self, layer: Layer, module: nn.Module, names: Mapping[str, str], context: Any, each: int = 1
    ) -> TappedCall:
        """The record of one call, to be kept until a backward pass comes through it."""
        recomputed, work = backward_pass() != -1, self.work
        if self.observed is None and not recomputed:
            for name in names.values():
                work.uses[name] += 1
        return TappedCall(self, layer, module, names, context, work.tag, work.planned, self.staged, recomputed, each)

    @property
    def rows(self) -> int | None:
        """How many examples the model runs on; outside of a microbatch, where no trial asks for more, as it seems."""
        count = self.work.count
        return self._batch if count is None and self.on_first_call is None else count

    @property
    def sure(self) -> bool:
        """Whether a lot is worked on, and trials come before lots: what they did not see is then not guessed."""
        return self.on_first_call is not None and self.work.count is not None and not self.work.aside

    def alias(self, module: nn.Module, name: str) -> Tensor | None:
        """The value of a module's parameter, cut off from the graph."""
        slot = self._tree.slots_of(module).get(name)
        return None if slot is None else slot.alias

    def constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer, a parameter's value or a view of one: no example is in it."""
        return self._tree.constant(tensor, self.passes)

    def holder(self, names: Collection[str]) -> str | None:
        """The name of the smallest of the modules that run which holds all parameters of these names, or None."""
        return self._tree.holder(names, [frame.part.module for frame in self.running])

    def module_name(self, module: nn.Module) -> str:
        """The module's name in the tree, for messages."""
        return self._tree.name(module)

    # ---- while the backward pass runs --------------------------------------------------------------------------

    def complete(self, call: TappedCall) -> bool:
        """Whether nothing else will come to the parameters of a call, so that they can be bounded at once.

        If something does come, with a second backward pass, it is refused (`Clamped.joined`).
        """
        known = self.bound_early is not None and call.tag is self.tag and not call.recomputed
        return known and all(self.work.uses[name] == 1 for name in call.names.values())

    def bounded(self, record: Record) -> dict[str, PerExample] | None:
        """What is needed of a complete call's gradients, by the module's own names.

        None where they are not this microbatch's, or cannot be made: if they are meant for the step, `take` says why.
        An error here would be one of the user's backward pass, and the lot could be released without its gradients.
        """
        assert self.bound_early is not None
        try:
            with self._sleeping(), exact_arithmetic():
                forms = record.forms()
                if any(form.count != self.count for form in forms.values()):
                    return None
                return {own: self.bound_early(record.call.names[own], form) for own, form in forms.items()}
        except Exception:
            return None

    @contextmanager
    def _sleeping(self) -> Iterator[None]:
        """Watch nothing that this thread runs: layers run modules again to differentiate them."""
        self._asleep.here = True
        self._sleepers += 1
        try:
            yield
        finally:
            self._asleep.here = False
            self._sleepers -= 1

    # ---- after the backward pass -------------------------------------------------------------------------------

    @contextmanager
    def observing(self) -> Iterator[Observed]:
        """Note what every module gives and every layer is given, for the passes inside."""
        self.observed = Observed()
        try:
            yield self.observed
        finally:
            self.observed = None

    @contextmanager
    def aside(self, count: int, *, trial: bool = False) -> Iterator[None]:
        """Collect into a place of its own: gradients taken inside do not mix with those already recorded.

        Args:
            count: how many examples the model runs on inside.
            trial: whether a pass may be broken off to learn where the examples are, and begun again.
        """
        outer = self.work, self.refusal, self.bound_early
        self.work, self.refusal, self.bound_early = Work(object(), count, aside=True, trial=trial), None, None
        try:
            yield
        finally:
            self.work, self.refusal, self.bound_early = outer

    def differentiate(self, total: Tensor, *also: Tensor, retain_graph: bool = False) -> None:
        """A backward pass from `total` that the layers see and that no parameter gets a gradient from.

        `also` are leaves that do get one.
        """
        if total.requires_grad and (self.work.anchors or also):
            torch.autograd.backward(total, inputs=[*self.work.anchors, *also], retain_graph=retain_graph)

    def look(self) -> dict[str, PerExample]:
        """The gradients recorded so far, of however many examples, forgotten here as by `take`.

        What has run may still be differentiated, and is recorded then.
        """
        records = list(self.work.records)
        self.work.records.clear()
        with self._sleeping(), exact_arithmetic():
            return self._forms(records, None)

    def discard(self) -> None:
        """Forget what was recorded. A pass that has run may still be differentiated, and is recorded then."""
        self.work.records.clear()
        self.work.refusals.clear()

    def take(self, count: int) -> dict[str, PerExample]:
        """The gradients recorded since the last call, by parameter name; they are forgotten here.

        Args:
            count: how many examples the microbatch has.

        Raises:
            UnsupportedModuleError: a parameter was used where no layer saw it, or a gradient has not `count` examples.
            TrainingLoopError: a gradient belongs to another microbatch, or to a call made inside a backward pass.
        """
        taken, self.work.records = self.work.records, []
        records = list(taken)
        taken.clear()  # the pass that filled it holds it still, and with it all that was recorded
        self._tree.refuse_unseen_uses(self.meetings.unread)
        derived, self.work.derived = self.work.derived, []
        unseen = next((shared for shared in derived if past(shared)), None)
        if unseen is not None:
            raise UnsupportedModuleError(self.meetings.unread or UNSEEN.format(", ".join(unseen.origins[0].names)))
        refusals = list(self.work.refusals)
        self.work.refusals.clear()
        if refusals:
            raise UnsupportedModuleError(refusals[0])
        with self._sleeping(), exact_arithmetic():
            return self._forms(records, count)

    def _forms(self, records: Sequence[Record], count: int | None) -> dict[str, PerExample]:
        parts: dict[str, list[PerExample]] = {}
        for record in records:
            call = record.call
            refuse_misplaced(call, self.tag)
            if call.refusal is not None:
                raise UnsupportedModuleError(call.refusal)
            for own, form in record.forms().items():
                if count is not None:
                    refuse_count(call, form, count)
                parts.setdefault(call.names[own], []).append(form)
        return {name: merged(forms) for name, forms in parts.items()}
