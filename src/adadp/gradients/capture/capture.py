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
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.hooks import Hooks
from adadp.gradients.capture.operations import EXPANDING, RULES, UNKNOWN, NoRule, Operation
from adadp.gradients.capture.readings import FREE, Reading, Readings, UnreadError, of_rows
from adadp.gradients.capture.shared import (
    EXPANSION,
    LayerOrigin,
    Shared,
    kept_whole,
    made_shared,
    refuse_shared,
    taking_part,
    with_values,
)
from adadp.gradients.capture.slot import past
from adadp.gradients.capture.tap import Expand, Record, Tap, TappedCall, backward_pass
from adadp.gradients.capture.tree import UNSEEN, Tree
from adadp.gradients.forms.dense import merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer
from adadp.gradients.rounding import exact_arithmetic


@dataclass
class Observed:
    """What modules returned and what layers were given inside `Capture.observing`."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    inputs: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # a layer's, with the output it gave
    free: list[tuple[str, Tensor]] = field(default_factory=list)  # what is taken to be the same whatever the examples


@dataclass
class Work:
    """What modules run for at the moment: one microbatch, or something beside it (`Capture.aside`)."""

    tag: object = None  # which microbatch
    count: int | None = None  # its examples
    planned: int | None = None  # how many examples such a microbatch is planned for, a public number
    aside: bool = False
    trial: bool = False  # a run of a trial, which may be begun again
    derived: list[Shared] = field(default_factory=list)  # values made of parameters in its passes
    uses: Counter[str] = field(default_factory=Counter)  # calls that used a parameter, by its name
    anchors: list[Tensor] = field(default_factory=list)  # of its passes
    records: list[Record] = field(default_factory=list)  # of calls that a backward pass came through
    refusals: list[str] = field(default_factory=list)  # why such a call's gradients must not be used


class UnruledError(UnsupportedModuleError):
    """An operation on parameters has no rule. `holder` names the smallest module that holds them."""

    def __init__(self, message: str, holder: str | None) -> None:
        super().__init__(message)
        self.holder = holder


class Frame:
    """A watched module that runs."""

    __slots__ = ("active", "call", "module", "places", "shared")

    def __init__(self, module: nn.Module, active: bool, shared: bool, call: int) -> None:
        self.module, self.active = module, active
        self.call = call  # which call of the module in this pass
        self.shared = shared  # whether it was given parameters as its input
        self.places: Counter[str] = Counter()  # operations and inputs so far, by name


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
        self._work = Work()
        self._batch: int | None = None  # how many examples an outermost module seems to be given outside of a microbatch
        self._running: list[Frame] = []
        self._calls: Counter[int] = Counter()  # of each module (by id) in this pass
        self._calls_again: Counter[int] = Counter()  # the same of what checkpointing runs again in the backward pass
        self._anchor = torch.zeros((), requires_grad=True)
        self._staged: list[Record] = []
        self._observed: Observed | None = None
        self._unread: str | None = None  # why an operation's gradients must not be used, if any come
        self._asleep = threading.local()  # a thread's own: others may run the model meanwhile
        self._sleepers = 0  # threads that differentiate modules: torch.func puts tensors of its own in their places
        self._handles: list[Any] = []
        self._through_func = frozenset(through_func)
        self._watch()

    def _watch(self) -> None:
        self._tree = Tree(self.module, self._through_func, self.chunk, self)
        self.notices = self._tree.notices
        for part in self._tree.watched:
            hooks = Hooks(self)
            # First of all: a hook that computes with the parameters must not find the parameters themselves.
            self._handles.append(part.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True))
            self._handles.append(part.register_forward_hook(hooks.after, with_kwargs=True, always_call=True))
            if layer := self._tree.layer(part):
                layer.install(part, self)

    def send_through_func(self, unruled: UnruledError) -> None:
        """Have torch.func differentiate the module that holds what has no rule, from the next pass on; with a warning.

        Raises `unruled` where it is torch.func's already, or nothing holds it.
        """
        if unruled.holder is None or unruled.holder in self._through_func:
            raise unruled
        before = set(self.notices)
        self.detach()
        self._through_func |= {unruled.holder}
        self._watch()
        for notice in self.notices:
            if notice not in before:
                warnings.warn(notice, stacklevel=2)

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
        return self._work.tag

    @property
    def count(self) -> int | None:
        """How many examples it has; None outside a microbatch."""
        return self._work.count

    @property
    def recorded(self) -> bool:
        """Whether a backward pass came through a watched layer since the last `take`."""
        return bool(self._work.records)

    @property
    def records(self) -> int:
        """How many calls of layers backward passes came through since the last `take`."""
        return len(self._work.records)

    @property
    def halved(self) -> bool:
        """Whether output gradients came in half precision since the last `take`."""
        return any(record.halved for record in self._work.records)

    def work_on(self, tag: object, count: int, planned: int | None = None) -> None:
        """What runs from now on works on the microbatch `tag` of `count` examples.

        `planned` is the public number of examples that forms choose their arithmetic for (see `PerExample`).
        """
        fresh = {"uses": Counter(), "anchors": [], "derived": []}
        self._work = replace(self._work, tag=tag, count=count, planned=planned, **fresh)
        self.bound_early = None

    # ---- while modules run -------------------------------------------------------------------------------------

    def watches(self, module: nn.Module) -> bool:
        """Whether a call of `module` is to be seen: it is part of the tree (not a copy) and no layer runs it again.

        A compiled module still calls hooks that it was compiled with after they were removed.
        """
        return not getattr(self._asleep, "here", False) and self.attached and module in self._tree

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A watched module is about to run: lend its layer the parameters; begin a pass if it is the outermost one."""
        active = torch.is_grad_enabled()
        if active and not self._inside():
            given = (part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor) and part.ndim)
            self._batch = next((len(part) for part in given), None) if self.count is None else None
            # What checkpointing runs again in the backward pass was part of a module that ran before.
            if self.count is not None and not self._work.aside and backward_pass() == -1:
                # What they run themselves is no part of a checkpoint that this call may be in.
                # Detached: a node that keeps its own output is never freed.
                with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
                    if self.on_first_call is not None:
                        self.on_first_call(module, args, kwargs, self.count)
                    if self.before_pass is not None:
                        self.before_pass()
            self._begin_pass()
        layer = self._tree.layer(module) if active else None
        shared = layer is not None and any(isinstance(part, Shared) for part in (*args, *kwargs.values()))
        calls = self._calls if backward_pass() == -1 else self._calls_again
        self._running.append(Frame(module, active, shared, calls[id(module)]))
        calls[id(module)] += 1
        if layer is None:
            return
        if not shared:
            for slot in self._tree.slots_of(module).values():
                slot.lend()
        elif layer.atomic:
            refuse_shared(self.module_name(module), (args, kwargs))

    def _inside(self) -> bool:
        """Whether a watched module runs, with gradients wanted."""
        return any(frame.active for frame in self._running)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A watched module has run, or raised: its layer taps the output, and the parameters are guarded again."""
        if not self._running or not self._running[-1].active:  # empty when the check of the first call refused it
            self._running = self._running[:-1]
            return None
        frame = self._running[-1]
        try:
            if self._observed is not None:
                # A PackedSequence is sorted by length, so its rows cannot be assigned to examples.
                parts = tree_leaves(output, is_leaf=lambda part: isinstance(part, PackedSequence))
                leaves = [leaf for leaf in parts if isinstance(leaf, Tensor)]
                self._observed.outputs.append((self.module_name(module), [leaf.detach().clone() for leaf in leaves]))
            layer = None if frame.shared else self._tree.layer(module)
            if layer is not None:
                for slot in self._tree.slots_of(module).values():
                    slot.guard()
                output = None if output is None else layer.after(self, module, args, kwargs, output)
            self._running.pop()
            outermost = not self._inside() and not self._work.aside
            if self.after_call is not None and self.count is not None and outermost:
                self.after_call(output)
            return None if layer is None else output
        finally:
            if frame in self._running:
                self._running.remove(frame)
            if not self._inside():
                self._tree.restore()

    def _begin_pass(self) -> None:
        self._unread = None
        self._calls.clear()
        self._calls_again.clear()
        if not self._sleepers:
            self._tree.refuse_replaced()
        self._tree.guard()
        # `backward()` accumulates into the anchor, `torch.autograd.grad` does not: only the former commits what
        # the taps have staged, so that gradients taken for another purpose leave nothing behind.
        staged: list[Record] = []
        self._staged = staged
        self._anchor = torch.zeros((), requires_grad=True)
        if self.count is not None or self._observed is not None or self._work.aside:
            self._work.anchors.append(self._anchor)
        records, refusals = self._work.records, self._work.refusals
        refusal, self.refusal = self.refusal, None

        def commit(_: Tensor) -> None:
            records.extend(record for record in staged if record.backward == backward_pass())
            staged.clear()
            if refusal is not None:
                refusals.append(refusal)

        self._anchor.register_post_accumulate_grad_hook(commit)  # type: ignore[no-untyped-call]

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
        each, rows = 1, self._rows
        usual = self.readings.plain and saved and saved[0].ndim and saved[0].shape[0] == rows
        if layer.tokenwise and self.batch_first and rows is not None and saved and not usual:
            reading = self._reading_of(saved[0], rows)
            if reading == FREE:
                self._suppose_free(module, saved)
                origin = LayerOrigin.of(outputs[0], layer, module, context, saved, names)
                return (self._noted(Shared.make(origin.output, [origin], self)),)
            each = reading[1]
        if not self.readings.plain and self.readings.learning:
            return tuple(outputs)
        call = self._called(layer, module, names, context, each)
        if self._observed is not None and saved:
            given, returned = call.unfolded(saved[0].detach()), call.unfolded(outputs[0].detach())
            self._observed.inputs.append((self.module_name(module), given, returned))
            if each > 1:
                self._observed.outputs.append((self.module_name(module), [given.clone()]))
        kept = [tensor.detach() for tensor in saved]
        # In place, autograd mixes up the gradients of a view and of its base, and the input itself is not ours to tap;
        # nor is a leaf, which a hook makes of an embedding's output where checkpoints need one (Hugging Face).
        own = [
            output.clone()
            if output._is_view()
            or (output.is_leaf and output.requires_grad)
            or any(output is other for other in (*saved, *outputs[:place]))
            else output
            for place, output in enumerate(outputs)
        ]
        return tuple(Tap.apply(self._anchor, call, len(own), *own, *kept))  # type: ignore[no-untyped-call]

    def _called(
        self, layer: Layer, module: nn.Module, names: Mapping[str, str], context: Any, each: int = 1
    ) -> TappedCall:
        recomputed = backward_pass() != -1
        if self._observed is None and not recomputed:
            self._work.uses.update(names.values())
        planned = self._work.planned
        return TappedCall(self, layer, module, names, context, self.tag, planned, self._staged, recomputed, each)

    # ---- values made of parameters (Meetings, Meeting) ----------------------------------------------------------

    def operation(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[Tensor]
    ) -> Any:
        """The result of an operation of torch in which shared values take part (`adadp.gradients.capture.shared`)."""
        count, name = self._rows, getattr(function, "__name__", "")
        if count is None:  # not for a microbatch: what this gives the parameters is refused when one is taken
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        shared = taking_part((args, kwargs))[0]
        try:
            return self._result(function, name, args, kwargs, shared, others, count)
        except UnreadError as error:  # refused where a gradient comes, and not before: this may be an evaluation
            self._unread = str(error)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)

    def _result(
        self,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: Sequence[Shared],
        others: Sequence[Tensor],
        count: int,
    ) -> Any:
        others = [other for other in others if not self._tree.constant(other)]
        if not others and name not in EXPANDING:
            with kept_whole():
                made = function(*with_values(args, _value), **with_values(kwargs, _value))
            return self._all_noted(made_shared(made, shared))
        operation = Operation(function, name, args, kwargs, shared, others, count)
        if count == 1:  # one example: its copy of a value is the value
            return operation.with_copies(lambda one: self.expand(one, fresh=True)[0])
        try:
            rule = RULES.get(name, UNKNOWN)
            reading = self._read(name, rule.readings(operation))
            if reading == FREE:
                self._suppose_free(self._place(), others)
                with kept_whole():
                    return self._all_noted(made_shared(operation.with_copies(_value), shared))
            if self.readings.learning:
                return operation.with_copies(lambda one: one.value.detach())
            return rule.meet(operation, reading, self)
        except NoRule:
            names = {name for one in shared for origin in one.origins for name in origin.names}
            raise UnruledError(
                f"{self.module_name(self._place())}: no rule says how {name} brings {', '.join(sorted(names))} and the "
                "examples together. Name the module in make_private(through_func=[...]).",
                self._tree.holder(names, [frame.module for frame in self._running]),
            ) from None

    def expand(self, shared: Shared, fresh: bool = False) -> Tensor:
        """A copy of a shared value for each example, [n, ...]; in memory of their own if `fresh`."""
        names = {name: name for origin in shared.origins for name in origin.names}
        call = self._called(EXPANSION, self._place(), names, shared)
        copies: Tensor = Expand.apply(self._anchor, call, shared.value.detach(), self._rows)  # type: ignore[no-untyped-call]
        return copies.clone() if fresh else copies

    def tap_shared(
        self, layer: Layer, values: Sequence[Shared], output: Tensor, saved: Sequence[Tensor], context: Any
    ) -> Tensor:
        """Have `layer` make the per-example gradients of shared values from the output's gradient."""
        names = {name: name for shared in values for origin in shared.origins for name in origin.names}
        call = self._called(layer, self._place(), names, context)
        own = output.clone() if output._is_view() else output
        kept = [tensor.detach() for tensor in saved]
        tapped: tuple[Tensor, ...] = Tap.apply(self._anchor, call, 1, own, *kept)  # type: ignore[no-untyped-call]
        return tapped[0]

    def _reading_of(self, inputs: Tensor, rows: int) -> Reading:
        """Where the examples are in what the layer that runs is given."""
        try:
            return self._read("input", of_rows(inputs.shape[0] if inputs.ndim else None, rows))
        except UnreadError:
            return ("rows", 1)  # `take` refuses its gradients, which are not those of so many examples

    @property
    def _rows(self) -> int | None:
        """How many examples the model runs on; outside of a microbatch, where no trial asks for more, as it seems."""
        return self._batch if self.count is None and not self.readings.strict else self.count

    def _read(self, name: str, possible: Sequence[Reading]) -> Reading:
        """Where the examples are in what the module that runs now does next under this name."""
        if self._rows == 1:
            return possible[0]  # all of it is the one example's
        frame = self._running[-1] if self._running else None
        place = (0, 0)
        if frame is not None:
            place = (frame.call, frame.places[name])
            frame.places[name] += 1
        key = (self.module_name(self._place()), name, *place)
        return self.readings.read(key, possible, trial=self._work.trial, lot=not self._work.aside)

    def _place(self) -> nn.Module:
        return self._running[-1].module if self._running else self.module

    def _suppose_free(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Note that these are taken to be the same whatever the examples, for the trial that observes."""
        if self._observed is not None:
            self._observed.free.extend((self.module_name(module), tensor.detach().clone()) for tensor in tensors)

    def _noted(self, shared: Shared) -> Shared:
        self._work.derived.append(shared)
        return shared

    def _all_noted(self, result: Any) -> Any:
        for shared in taking_part(result)[0]:
            self._noted(shared)
        return result

    def alias(self, module: nn.Module, name: str) -> Tensor | None:
        """The value of a module's parameter, cut off from the graph."""
        slot = self._tree.slots_of(module).get(name)
        return None if slot is None else slot.alias

    def module_name(self, module: nn.Module) -> str:
        """The module's name in the tree, for messages."""
        return self._tree.name(module)

    # ---- while the backward pass runs --------------------------------------------------------------------------

    def complete(self, call: TappedCall) -> bool:
        """Whether nothing else will come to the parameters of a call, so that they can be bounded at once.

        If something does come, with a second backward pass, it is refused (`Clamped.joined`).
        """
        known = self.bound_early is not None and call.tag is self.tag and not call.recomputed
        return known and all(self._work.uses[name] == 1 for name in call.names.values())

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
        self._observed = Observed()
        try:
            yield self._observed
        finally:
            self._observed = None

    @contextmanager
    def aside(self, count: int, *, trial: bool = False) -> Iterator[None]:
        """Collect into a place of its own: gradients taken inside do not mix with those already recorded.

        Args:
            count: how many examples the model runs on inside.
            trial: whether a pass may be broken off to learn where the examples are, and begun again.
        """
        outer = self._work, self.refusal, self.bound_early
        self._work, self.refusal, self.bound_early = Work(object(), count, aside=True, trial=trial), None, None
        try:
            yield
        finally:
            self._work, self.refusal, self.bound_early = outer

    def differentiate(self, total: Tensor, *also: Tensor, retain_graph: bool = False) -> None:
        """A backward pass from `total` that the layers see and that no parameter gets a gradient from.

        `also` are leaves that do get one.
        """
        if total.requires_grad and (self._work.anchors or also):
            torch.autograd.backward(total, inputs=[*self._work.anchors, *also], retain_graph=retain_graph)

    def look(self) -> dict[str, PerExample]:
        """The gradients recorded so far, of however many examples, forgotten here as by `take`.

        What has run may still be differentiated, and is recorded then.
        """
        records = list(self._work.records)
        self._work.records.clear()
        with self._sleeping(), exact_arithmetic():
            return self._forms(records, None)

    def discard(self) -> None:
        """Forget what was recorded. A pass that has run may still be differentiated, and is recorded then."""
        self._work.records.clear()
        self._work.refusals.clear()

    def take(self, count: int) -> dict[str, PerExample]:
        """The gradients recorded since the last call, by parameter name; they are forgotten here.

        Args:
            count: how many examples the microbatch has.

        Raises:
            UnsupportedModuleError: a parameter was used where no layer saw it, or a gradient has not `count` examples.
            TrainingLoopError: a gradient belongs to another microbatch, or to a call made inside a backward pass.
        """
        taken, self._work.records = self._work.records, []
        records = list(taken)
        taken.clear()  # the pass that filled it holds it still, and with it all that was recorded
        self._tree.refuse_unseen_uses(self._unread)
        derived, self._work.derived = self._work.derived, []
        unseen = next((shared for shared in derived if past(shared)), None)
        if unseen is not None:
            raise UnsupportedModuleError(self._unread or UNSEEN.format(", ".join(unseen.origins[0].names)))
        refusals = list(self._work.refusals)
        self._work.refusals.clear()
        if refusals:
            raise UnsupportedModuleError(refusals[0])
        with self._sleeping(), exact_arithmetic():
            return self._forms(records, count)

    def _forms(self, records: Sequence[Record], count: int | None) -> dict[str, PerExample]:
        parts: dict[str, list[PerExample]] = {}
        for record in records:
            call = record.call
            self._refuse_misplaced(call)
            for own, form in record.forms().items():
                if count is not None:
                    self._refuse_count(call, form, count)
                parts.setdefault(call.names[own], []).append(form)
        return {name: merged(forms) for name, forms in parts.items()}

    def _refuse_count(self, call: TappedCall, form: PerExample, count: int) -> None:
        if form.count != count:
            raise UnsupportedModuleError(
                f"{self.module_name(call.module)}: its input holds {form.count} examples where the microbatch has "
                f"{count}. A module that reshapes, repeats or drops examples has no per-example gradients. Keep "
                "examples in the first dimension (batch_first=False for [T, N, ...] sequences) from the loader to the "
                "loss."
            )

    def _refuse_misplaced(self, call: TappedCall) -> None:
        if call.recomputed:
            raise TrainingLoopError(
                f"{self.module_name(call.module)} ran again inside the backward pass: reentrant checkpointing "
                "is not supported. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        if call.tag is not self.tag:
            raise TrainingLoopError(
                "a backward pass of an earlier lot or microbatch was not followed by optimizer.step(). Call step() "
                "after every batch of the loader; lots larger than memory are cut by max_physical_batch_size=."
            )


def _value(shared: Shared) -> Tensor:
    return shared.value
