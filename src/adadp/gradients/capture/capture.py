"""Seeing what each layer received and what came back to it, in one ordinary backward pass.

Hooks replace a layer's parameters by detached aliases while it runs, so autograd computes the layer's input gradient
and *not* its weight gradient, and thread its output through a `Tap`. When the backward pass reaches the tap, the
layer's input and its output gradient are both known: per-example gradients are made of nothing else.

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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.hooks import Hooks
from adadp.gradients.capture.tap import Record, Tap, TappedCall, backward_pass
from adadp.gradients.capture.tree import Tree
from adadp.gradients.forms.dense import merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer
from adadp.gradients.rounding import exact_arithmetic


@dataclass
class Observed:
    """What modules returned and what layers were given inside `Capture.observing`."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    inputs: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # a layer's, with the output it gave


@dataclass
class Work:
    """What modules run for at the moment: one microbatch, or something beside it (`Capture.aside`)."""

    tag: object = None  # which microbatch
    count: int | None = None  # its examples
    planned: int | None = None  # how many examples such a microbatch is planned for, a public number
    aside: bool = False
    uses: Counter[str] = field(default_factory=Counter)  # calls that used a parameter, by its name
    anchors: list[Tensor] = field(default_factory=list)  # of its passes
    records: list[Record] = field(default_factory=list)  # of calls that a backward pass came through
    refusals: list[str] = field(default_factory=list)  # why such a call's gradients must not be used


class FirstCall(Protocol):
    """Called with a module's arguments before it runs, outermost modules only."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None: ...


class Capture:
    """Watches one module tree and collects its per-example gradients. Nothing is written on the parameters.

    Args:
        module: the root of the tree.
        batch_first: whether sequences come as [n, T, ...]; if not, as [T, n, ...].
        through_func: names of modules that `torch.func` differentiates as a whole. So is every module with parameters
            of its own that no layer knows; `notices` says which.
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
        self._tree = Tree(module, frozenset(through_func), chunk)
        self.notices = self._tree.notices
        self._work = Work()
        self._running: list[bool] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._staged: list[Record] = []
        self._observed: Observed | None = None
        self._asleep = threading.local()  # a thread's own: others may run the model meanwhile
        self._sleepers = 0  # threads that differentiate modules: torch.func puts tensors of its own in their places
        self._handles: list[Any] = []
        for part in self._tree.watched:
            hooks = Hooks(self)
            # First of all: a hook that computes with the parameters must not find the parameters themselves.
            self._handles.append(part.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True))
            self._handles.append(part.register_forward_hook(hooks.after, with_kwargs=True, always_call=True))
            if layer := self._tree.layer(part):
                layer.install(part, self)

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
        self._work = replace(self._work, tag=tag, count=count, planned=planned, uses=Counter(), anchors=[])
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
        if active and self._tree.layer(module) is not None:
            for slot in self._tree.slots_of(module).values():
                slot.lend()

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A watched module has run, or raised: its layer taps the output, and the parameters are guarded again."""
        if not self._running or not self._running.pop():  # empty when the check of the first call refused it
            return None
        try:
            if self._observed is not None:
                # A PackedSequence is sorted by length, so its rows cannot be assigned to examples.
                parts = tree_leaves(output, is_leaf=lambda part: isinstance(part, PackedSequence))
                leaves = [leaf for leaf in parts if isinstance(leaf, Tensor)]
                self._observed.outputs.append((self.module_name(module), [leaf.detach().clone() for leaf in leaves]))
            layer = self._tree.layer(module)
            if layer is not None:
                for slot in self._tree.slots_of(module).values():
                    slot.guard()
                output = None if output is None else layer.after(self, module, args, kwargs, output)
            outermost = not any(self._running) and not self._work.aside
            if self.after_call is not None and self.count is not None and outermost:
                self.after_call(output)
            return None if layer is None else output
        finally:
            if not any(self._running):
                self._tree.restore()

    def _begin_pass(self) -> None:
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
        if self._observed is not None and saved:
            self._observed.inputs.append((self.module_name(module), saved[0].detach(), outputs[0].detach()))
        recomputed = backward_pass() != -1
        call = TappedCall(self, layer, module, names, context, self.tag, self._work.planned, self._staged, recomputed)
        if self._observed is None and not recomputed:
            self._work.uses.update(names.values())
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
    def aside(self) -> Iterator[None]:
        """Collect into a place of its own: gradients taken inside do not mix with those already recorded."""
        outer = self._work, self.refusal, self.bound_early
        self._work, self.refusal, self.bound_early = Work(tag=object(), aside=True), None, None
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
        self._tree.refuse_unseen_uses()
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
