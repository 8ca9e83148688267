"""Seeing what each layer received and what came back to it, in one ordinary backward pass.

Hooks replace a layer's parameters by detached aliases while it runs, so autograd computes the layer's input gradient
and *not* its weight gradient, and thread its output through a `Tap`. When the backward pass reaches the tap, the
layer's input and its output gradient are both at hand: they are all that per-example gradients are made of.

What must not happen is that a parameter receives an ordinary gradient, summed over examples that nobody clipped. So
while any module of the tree runs, every trainable parameter that no layer is using is replaced by a *sentinel*, a
leaf of its own. A gradient that reaches a sentinel is a use of that parameter that was not seen, and is refused.
A gradient that reaches the parameter itself comes from outside the forward pass: a term of the loss on the weights.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.slot import Slot
from adadp.gradients.capture.tap import Record, Tap, TappedCall, backward_pass
from adadp.gradients.forms.dense import merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.fallback import ThroughFunc
from adadp.gradients.layers.layer import Layer, known_layer
from adadp.gradients.rounding import exact_arithmetic


@dataclass
class Observed:
    """What modules gave and what layers were given, while `Capture.observing` was on."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    inputs: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # a layer's, with the output it gave


class FirstCall(Protocol):
    """Called with a module's arguments before it runs, outermost modules only."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None: ...


class Capture:
    """Watches one module tree and collects its per-example gradients. Nothing is written on the parameters.

    Modules named in `through_func` are differentiated by `torch.func` as a whole, `chunk` examples at a time, and so is
    every module with parameters that no layer knows; `notices` says which.
    """

    def __init__(
        self, module: nn.Module, *, batch_first: bool = True, through_func: Iterable[str] = (), chunk: int = 32
    ) -> None:
        self.module = module
        self.batch_first = batch_first
        self.chunk = chunk
        self.tag: object = None  # which microbatch is being worked on, and how many examples it has
        self.count: int | None = None
        self._planned: int | None = None
        self.on_first_call: FirstCall | None = None
        self.before_pass: Callable[[], None] | None = None  # called before the model runs on a microbatch
        self.after_call: Callable[[Any], None] | None = None  # called with what an outermost module returned
        #: Why gradients of the next outermost call must not be used, though it may run: it could not be tried.
        self.refusal: str | None = None
        #: Makes of a parameter's gradients all that is needed of them, as soon as they are complete.
        self.bound_early: Callable[[str, PerExample], PerExample] | None = None
        self.notices: list[str] = []
        self._module_names = {id(part): name for name, part in module.named_modules()}
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._slots = [
            Slot(owner, attribute, parameter, first_names[id(parameter)])
            for owner in module.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._layers: dict[int, Layer] = {}
        self._slots_of: dict[int, dict[str, Slot]] = {}  # of a watched module: its own names -> slots
        self._running: list[bool] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._uses: Counter[str] = Counter()  # calls that used a parameter, by its name, for this microbatch
        self._staged: list[Record] = []
        self._records: list[Record] = []
        self._refusals: list[str] = []  # of calls that a backward pass came through
        self._anchors: list[Tensor] = []  # of the passes of this microbatch
        self._observed: Observed | None = None
        self._aside = False  # inside `aside`
        self._asleep = threading.local()  # a thread's own: others may run the model meanwhile
        self._sleepers = 0  # threads that differentiate modules: torch.func puts tensors of its own in their places
        self._handles: list[Any] = []
        self._watch(frozenset(through_func))

    # ---- before training ---------------------------------------------------------------------------------------

    def _watch(self, through_func: frozenset[str]) -> None:
        unknown = through_func - set(self._module_names.values())
        if unknown:
            raise UnsupportedModuleError(f"through_func names no module of this model: {sorted(unknown)}")
        slots: dict[int, dict[str, Slot]] = {}
        for slot in self._slots:
            slots.setdefault(id(slot.module), {})[slot.attribute] = slot
        answered: set[int] = set()  # below an atomic layer: never called through their hooks
        watched = []
        for name, part in self.module.named_modules():
            if id(part) in answered:
                continue
            watched.append(part)
            forced = name in through_func
            if not forced and id(part) not in slots:
                continue
            layer = None if forced else known_layer(part)
            if layer is None:
                layer = ThroughFunc()
                self.notices.append(
                    f"{name or 'the model'} ({type(part).__name__}): no rule for this kind of module, so its "
                    f"per-example gradients go through torch.func, {self.chunk} examples at a time"
                )
            layer.check(part, name or type(part).__name__)
            self._layers[id(part)] = layer
            own = dict(slots.get(id(part), {}))
            if layer.atomic:
                for below, child in part.named_modules():
                    answered.add(id(child))
                    own |= {f"{below}.{k}" if below else k: slot for k, slot in slots.get(id(child), {}).items()}
            self._slots_of[id(part)] = own
        for part in watched:
            hooks = _Hooks(self)
            # First of all: a hook that computes with the parameters must not find the parameters themselves.
            self._handles.append(part.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True))
            self._handles.append(part.register_forward_hook(hooks.after, with_kwargs=True, always_call=True))
            if id(part) in self._layers:
                self._layers[id(part)].install(part, self)

    def detach(self) -> None:
        """Remove every hook; the module is an ordinary one again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part in self.module.modules():
            if id(part) in self._layers:
                self._layers[id(part)].uninstall(part)

    @property
    def attached(self) -> bool:
        """Whether the module is watched still. If not, its gradients are those of all examples together."""
        return bool(self._handles)

    @property
    def recorded(self) -> bool:
        """Whether a backward pass came through a watched layer since the last `take`."""
        return bool(self._records)

    @property
    def records(self) -> int:
        """How many calls of layers backward passes came through since the last `take`."""
        return len(self._records)

    @property
    def halved(self) -> bool:
        """Whether output gradients came in half precision since the last `take`."""
        return any(record.halved for record in self._records)

    def work_on(self, tag: object, count: int, planned: int | None = None) -> None:
        """What runs from now on works on the microbatch `tag` of `count` examples.

        `planned` is the public number of examples that forms choose their arithmetic for (see `PerExample`).
        """
        self.tag, self.count, self._planned = tag, count, planned
        self._uses, self.bound_early = Counter(), None
        self._anchors = []

    # ---- while modules run -------------------------------------------------------------------------------------

    def watches(self, module: nn.Module) -> bool:
        """Whether a call of `module` is to be seen: it is part of the tree (not a copy) and we are not asleep.

        What was compiled with the hooks on calls them still when they were taken off.
        """
        return not getattr(self._asleep, "here", False) and self.attached and id(module) in self._module_names

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        active = torch.is_grad_enabled()
        if active and not any(self._running):
            # What checkpointing runs again in the backward pass was part of a module that ran before.
            if self.count is not None and self._observed is None and backward_pass() == -1:
                # What they run themselves is no part of a checkpoint that this call may be in.
                # Detached: a node that keeps its own output is never freed.
                with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
                    if self.on_first_call is not None:
                        self.on_first_call(module, args, kwargs, self.count)
                    if self.before_pass is not None:
                        self.before_pass()
            self._begin_pass()
        self._running.append(active)
        if active and id(module) in self._layers:
            for slot in self._slots_of[id(module)].values():
                slot.lend()

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._running or not self._running.pop():  # empty when the check of the first call refused it
            return None
        try:
            if self._observed is not None:
                # A packed sequence is ordered by its examples' lengths: its rows are nobody's in particular.
                parts = tree_leaves(output, is_leaf=lambda part: isinstance(part, PackedSequence))
                leaves = [leaf for leaf in parts if isinstance(leaf, Tensor)]
                self._observed.outputs.append((self.module_name(module), [leaf.detach().clone() for leaf in leaves]))
            layer = self._layers.get(id(module))
            if layer is not None:
                for slot in self._slots_of[id(module)].values():
                    slot.guard()
                output = None if output is None else layer.after(self, module, args, kwargs, output)
            if self.after_call is not None and self.count is not None and not any(self._running) and not self._aside:
                self.after_call(output)
            return None if layer is None else output
        finally:
            if not any(self._running):
                for slot in self._slots:
                    slot.restore()

    def _begin_pass(self) -> None:
        replaced = next((slot.name for slot in self._slots if slot.replaced), None)
        # Putting the watched one back at the end of the pass would undo what the user did.
        if replaced is not None and not self._sleepers:
            raise TrainingLoopError(
                f"{replaced} is not the parameter that was made private: it was replaced or tied since "
                "(load_state_dict(assign=True), decoder.weight = embedding.weight). Change the model first, then call "
                "make_private; load weights without assign=True."
            )
        for slot in self._slots:
            slot.guard()
        # `backward()` accumulates into the anchor, `torch.autograd.grad` does not: only the former commits what
        # the taps have staged, so that gradients taken for another purpose leave nothing behind.
        staged: list[Record] = []
        self._staged = staged
        self._anchor = torch.zeros((), requires_grad=True)
        if self.count is not None or self._observed is not None or self._aside:
            self._anchors.append(self._anchor)
        records, refusals = self._records, self._refusals
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
        slots = self._slots_of[id(module)]
        names = {
            own: slot.name
            for own, slot in slots.items()
            if slot.parameter.requires_grad and (used is None or own in used)
        }
        if not names:
            return tuple(outputs)
        if self._observed is not None and saved:
            self._observed.inputs.append((self.module_name(module), saved[0].detach(), outputs[0].detach()))
        recomputed = backward_pass() != -1
        call = TappedCall(self, layer, module, names, context, self.tag, self._planned, self._staged, recomputed)
        if self._observed is None and not recomputed:
            self._uses.update(names.values())
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

    def alias(self, module: nn.Module, name: str) -> Tensor | None:
        """The value of a module's parameter, cut off from the graph."""
        slot = self._slots_of[id(module)].get(name)
        return None if slot is None else slot.alias

    def module_name(self, module: nn.Module) -> str:
        """The module's name in the tree, for messages."""
        return self._module_names.get(id(module), "") or type(module).__name__

    # ---- while the backward pass runs --------------------------------------------------------------------------

    def complete(self, call: TappedCall) -> bool:
        """Whether nothing else will come to the parameters of a call, so that they can be bounded at once.

        If something does come, with a second backward pass, it is refused (`Clamped.joined`).
        """
        known = self.bound_early is not None and call.tag is self.tag and not call.recomputed
        return known and all(self._uses[name] == 1 for name in call.names.values())

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
    def aside(self) -> Iterator[None]:
        """Collect into a place of its own: gradients taken inside do not mix with those already recorded."""
        outer = self._records, self.tag, self.count, self._uses, self.bound_early
        kept = self._anchors, self._refusals, self.refusal, self._aside, self._planned
        self._records, self.tag, self.count, self._uses, self.bound_early = [], object(), None, Counter(), None
        self._anchors, self._refusals, self.refusal, self._aside, self._planned = [], [], None, True, None
        try:
            yield
        finally:
            self._records, self.tag, self.count, self._uses, self.bound_early = outer
            self._anchors, self._refusals, self.refusal, self._aside, self._planned = kept

    def differentiate(self, total: Tensor, *also: Tensor, retain_graph: bool = False) -> None:
        """A backward pass from `total` that the layers see and that no parameter gets a gradient from.

        `also` are leaves that do get one.
        """
        if total.requires_grad and (self._anchors or also):
            torch.autograd.backward(total, inputs=[*self._anchors, *also], retain_graph=retain_graph)

    def look(self) -> dict[str, PerExample]:
        """The gradients recorded so far, of however many examples, forgotten here as by `take`.

        What has run may still be differentiated, and is recorded then.
        """
        records = list(self._records)
        self._records.clear()
        with self._sleeping(), exact_arithmetic():
            return self._forms(records, None)

    def discard(self) -> None:
        """Forget what was recorded. A pass that has run may still be differentiated, and is recorded then."""
        self._records.clear()
        self._refusals.clear()

    def take(self, count: int) -> dict[str, PerExample]:
        """The gradients recorded since the last call, by parameter name; they are forgotten here.

        Raises where a gradient was seen that no layer answers for, or that is not of this microbatch's `count`
        examples.
        """
        taken, self._records = self._records, []
        records = list(taken)
        taken.clear()  # the pass that filled it holds it still, and with it all that was recorded
        self._refuse_unseen_uses()
        refusals = list(self._refusals)
        self._refusals.clear()
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

    def _refuse_unseen_uses(self) -> None:
        for slot in self._slots:
            if slot.sentinel.grad is not None:
                slot.sentinel.grad = None
                raise UnsupportedModuleError(
                    f"{slot.name} is used in the forward pass outside {self.module_name(slot.module)}, the module that "
                    "owns it (F.linear(x, other.weight), for instance), so its per-example gradients were not seen. "
                    "Share the parameter instead (decoder.weight = embedding.weight), or name the module that uses it "
                    "in through_func=[...] ('' for the whole model)."
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


class _Hooks:
    """The two hooks. A module that was copied keeps them, but is not the one that is watched: they do nothing there."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        # torch.compile takes the model apart here and leaves these alone: what they note is not of its graph. Where it
        # is not at work, they are called as they are, which is cheaper.
        self._before = torch.compiler.disable(capture._before)  # type: ignore[no-untyped-call]
        self._after = torch.compiler.disable(capture._after)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return self

    def __reduce__(self) -> Any:
        return _NoHooks, ()  # a pickled module is an ordinary one

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._capture.watches(module):
            before = self._before if torch.compiler.is_dynamo_compiling() else self._capture._before
            before(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._capture.watches(module):
            after = self._after if torch.compiler.is_dynamo_compiling() else self._capture._after
            return after(module, args, kwargs, output)
        return None


def copied_from(module: nn.Module) -> nn.Module | None:
    """The watched module that this one is a copy of, as its hooks tell; None where it is none."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Hooks) and owner._capture.module is not module:
            return owner._capture.module
    return None


class _NoHooks:
    """What the hooks of an unpickled module are: nothing."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Do nothing."""
