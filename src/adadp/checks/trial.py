"""The trials of one private run: its modules, its collate function and its loss, on a public schedule.

The engine calls the one `Trial` of a run wherever examples enter the model or a loss is differentiated. It does nothing
unless a trial is due (`adadp.checks.schedule`). What lets one example reach another is refused. Since private examples
may be used, a refusal is a fixed text with the name of a module, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from adadp.checks.cascade import Cascade, learnt
from adadp.checks.collate import CollateWatch
from adadp.checks.containers import Arguments, take_apart
from adadp.checks.criterion import WatchedCriterion
from adadp.checks.dataset_records import unseen_parts
from adadp.checks.inputs import InputWatch, Part, place_of
from adadp.checks.known_losses import recognised
from adadp.checks.loss_trial import refuse_crossing_rows
from adadp.checks.padding import UNTRIED, Padded, Unmatched, padded, refuse_padding
from adadp.checks.public_examples import public_examples_of
from adadp.checks.schedule import Schedule
from adadp.checks.seeds import generators_kept
from adadp.checks.trial_runs import TrialRuns
from adadp.errors import PrivacyError, TrainingLoopError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.capture.tap import backward_pass
from adadp.gradients.rounding import full_precision
from adadp.out_of_memory import out_of_memory

# Texts are fixed but for names of modules and classes, so that none holds private values.
_LOSSES = (
    "each example's loss is computed by the loop in a way that is not known: that row i is not divided or weighted by "
    "something of the other examples (a count, a length, a maximum) cannot be seen. A TrainingStep, which is given the "
    "loss as a function, can try it; the functions of adadp.losses on the model's outputs are known"
)
_NO_BATCH = (
    "no tensor with a row for each example is in what the step is given, so the loss cannot be tried: call the step "
    "with all of the batch, as tensors, or lists, tuples, dicts or dataclasses of tensors"
)
_STALE_OUTPUT = (
    "{} is given what it returned for an earlier lot (a hidden state that is handed on, for instance): examples of "
    "that lot reach this one without noise. Begin each batch with a fresh state."
)
_UNRUN = (
    "{} cannot be tried out on a few examples of a batch, so it is not known whether it keeps them apart. Let it take "
    "batches of any size."
)
_UNKNOWN = (
    "{} was given a {}, which cannot be taken apart into examples, so it is not known whether the model keeps them "
    "apart. Give it tensors, or lists, tuples, dicts or dataclasses of tensors."
)
_NO_ROWS = (
    "{} was given no tensor with a row for each example of the batch, so it is not known whether it keeps them apart. "
    "Keep examples in the first dimension (batch_first=False for [T, N, ...]) from the loader to the loss."
)
#: Bound here: a rehearsal has libraries believe that they are recorded.
_recording = torch.cuda.is_current_stream_capturing
#: What models raise where they do not take their arguments.
_NOT_RUN = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)


class Trial:
    """Tries out what a run does with its examples.

    Args:
        capture: that of the private model.
        batch_first: whether examples are in the first dimension everywhere; else in the second, or the first.
        dataset: what the loader reads, for trials of the collate function.
        collate: the loader's collate function.
        loss_reduction: "mean" or "sum": what a scalar loss is over examples.
        steps: how many lots are planned; the last one is tried too.
        largest: the most rows that the model is run on at once.
        public_examples: items that are used in place of private ones.
        ordered: whether rows are told apart by their places (`sampling.units`), so that they must keep their order.

    Attributes:
        untried: by a short name, in words: what could not be tried. The guarantee prints it.
        on_refusal: called with the text of each refusal; the guarantee is none from then on.
        postponed: whether a trial that is due waits until the step is recorded (`before_recording`).
        by_function: the microbatch whose loss was computed by a function that is tried whole (`of_loss`).

    Guarantee:
        None: a trial that passes proves nothing. A refusal is raised before the lot's release, and again in every later
        call of what was refused.

    """

    def __init__(
        self,
        capture: Capture,
        *,
        batch_first: bool,
        dataset: Any = None,
        collate: Callable[..., Any] | None = None,
        loss_reduction: str = "mean",
        steps: int | None = None,
        largest: int | None = None,
        public_examples: Any = None,
        ordered: bool = False,
    ) -> None:
        self._capture, self._mean, self._largest = capture, loss_reduction == "mean", largest
        self._dimensions = (0,) if batch_first else (1, 0)
        self._public = public_examples_of(public_examples, default_collate if collate is None else collate)
        public_items = None if self._public is None else self._public.items
        self.untried: dict[str, str] = {}
        self._collate = CollateWatch(collate, dataset, public_items, self._dimensions, self.untried, ordered)
        self.on_refusal: Callable[[str], None] = lambda text: None
        self.postponed = False
        self.by_function: object = None
        self._schedule = Schedule(capture.module, steps)
        self._inputs = InputWatch(capture.module, self._dimensions, self.untried)
        self._refused: dict[int, PrivacyError] = {}  # by id of what was refused
        self._tried_for: object = None  # the microbatch on which a module was tried last
        self._covered: int | None = None  # the lot on which modules were tried together with the loss
        self._losses: dict[int, Callable[..., Tensor]] = {}  # kept alive, so that no other loss gets the same id
        self._outputs: list[Tensor] = []  # what the model returned for this microbatch, until its losses are tried
        self._own_loss: object = None  # the microbatch for which a scalar that a module returned was differentiated
        self._criterion: WatchedCriterion | None = None
        text = unseen_parts(dataset)
        if text is not None:
            self.untried["dataset"] = text

    # ---- when ----------------------------------------------------------------------------------------------------

    @property
    def undecided(self) -> set[int]:
        """Modules (by id) whose examples were too much alike so far."""
        return self._schedule.undecided

    def due(self, lot: int) -> bool:
        """Whether something is tried on this lot: by the schedule, or in a mode that was not tried yet."""
        return self._schedule.any_due(lot)

    def passed_once(self) -> bool:
        """Whether something passed in the mode that the modules are in, and nothing is undecided."""
        return self._schedule.passed_once()

    def loss_due(self, loss: object, part: Part) -> bool:
        """Whether a loss is to be tried on this part. (For losses [n] that the loop computes: the trial itself.)"""
        return part.count > 1 and self._schedule.due(self._schedule.key(loss, part), part.lot)

    # ---- calls of the model --------------------------------------------------------------------------------------

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        """Try `module`, if that is due, on rows of the arguments that it is about to be called with."""
        self._raise_again(module)
        if self._inputs.stale.from_another(args, kwargs, place_of(part)):
            raise self._remembered(module, TrainingLoopError(_STALE_OUTPUT.format(self._capture.module_name(module))))
        key = self._schedule.key(module, part)
        self._inputs.compare_attributes(part)
        if self._covered == part.lot and part.count > 1 and id(module) not in self.undecided:
            self._schedule.passed(key, part.lot)
            self._tried_for = part
        if self.postponed or not self._schedule.due(key, part.lot):
            if self._tried_for is part:  # a further call for a batch on which the module was tried
                with self._trying(module):
                    self._inputs.compare(self._read((args, kwargs), part), part)
            else:
                self._inputs.glance(args, kwargs, part)
            self._learn(module, args, kwargs, part)
            return
        if torch.cuda.is_available() and _recording():
            raise TrainingLoopError(f"{self._capture.module_name(module)} was not tried out before it was recorded")
        arguments = self._read((args, kwargs), part)
        if arguments.parts.unknown or not arguments.has_rows:
            name, unknown = self._capture.module_name(module), ", ".join(arguments.parts.unknown)
            self._capture.refusal = _UNKNOWN.format(name, unknown) if unknown else _NO_ROWS.format(name)
            return
        if part.count < 2:  # one example has nothing to mix with
            return
        self._inputs.forget()
        self._tried_for = part
        with self._trying(module):
            conclusive = self._try_module(module, arguments, part)
            self._refuse_padding(module, arguments, part)
            self._inputs.compare(arguments, part)
        self._learn(module, args, kwargs, part)
        if conclusive:
            self._schedule.passed(key, part.lot)
            self.undecided.discard(id(module))
        else:
            self.undecided.add(id(module))

    def _learn(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        """Learn where the examples are in this batch, if none of these lengths, or with these weights, was tried."""
        if part.count < 2 or self._capture.readings.covers():
            return
        if torch.cuda.is_available() and _recording():
            raise TrainingLoopError(f"{self._capture.module_name(module)} was not tried out before it was recorded")
        arguments = self._read((args, kwargs), part)
        if arguments.parts.unknown or not arguments.has_rows:
            return
        readings, stage = self._capture.readings, self._schedule.stage(part.lot)
        situation, public = readings.situation, self._public_arguments(arguments, part)
        with self._trying(module):
            if public is not None:
                with suppress(*_NOT_RUN):
                    learnt(TrialRuns(self._capture, module, public, stage), lambda: None, learn=True)
                readings.situation = situation
            if not readings.covers():
                learnt(TrialRuns(self._capture, module, arguments, stage), lambda: None, learn=True)

    def after_call(self, output: Any, part: Part) -> None:
        """Remember what an outermost call returned: it must not come back with a later lot."""
        if backward_pass() != -1:
            return  # checkpointing runs the module again
        self._inputs.note_returned(output, part)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self.loss_due(self, part):
            self._outputs = [*self._outputs, *(leaf for leaf in leaves if leaf.requires_grad)][-8:]
        for leaf in leaves:
            if leaf.ndim == 0 and leaf.requires_grad:
                leaf.register_hook(lambda _: setattr(self, "_own_loss", part))  # type: ignore[no-untyped-call]

    def handed_out(self) -> None:
        """Another microbatch was handed out, or this one was stepped on: forget what was returned for it."""
        self._outputs = []

    def _read(self, value: Any, part: Part) -> Arguments:
        return Arguments.read(value, part.count, self._dimensions)

    def _cascade(self, part: Part) -> Cascade:
        return Cascade(self._capture, self._dimensions, self._mean, self._schedule.stage(part.lot), self._largest)

    def _public_arguments(self, arguments: Arguments, part: Part) -> Arguments | None:
        """The same arguments made of public examples, where the user gave some and that is possible."""
        if self._public is None:
            return None
        return self._public.arguments(arguments, take_apart(part.batch, part.count))

    def _try_module(self, module: nn.Module, arguments: Arguments, part: Part) -> bool:
        """Try the module in each way that its arguments may be read: a length may be the number of rows by chance."""
        cascade = self._cascade(part)
        public = self._public_arguments(arguments, part)
        if public is not None:
            with suppress(*_NOT_RUN):  # private rows serve where public ones cannot be run
                return cascade.of_module(module, public, synthetic_first=False)

        def attempt(dims: Sequence[int | None]) -> bool:
            read = replace(arguments, dims=list(dims))
            return cascade.of_module(module, read, synthetic_first=True)

        try:
            return attempt(arguments.dims)
        except UnsupportedModuleError:
            # Sequences of as many steps as there are examples, [n, T, ...] or [T, n, ...]?
            turned = [0 if dim == 1 and leaf.shape[0] == part.count else dim for leaf, dim in arguments.pairs()]
            if turned == arguments.dims:
                raise
            return attempt(turned)
        except PrivacyError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            for dims in _other_readings(arguments):
                with suppress(RuntimeError, ValueError, IndexError, TypeError):
                    return attempt(dims)
            raise UnsupportedModuleError(_UNRUN.format(self._capture.module_name(module))) from None

    def _refuse_padding(self, module: nn.Module, arguments: Arguments, part: Part) -> None:
        """Refuse the module where an example's result changes with the length of others."""
        given = self._padded(arguments, part)
        runs = TrialRuns(self._capture, module, arguments)
        if given is not None and not learnt(runs, lambda: refuse_padding(runs, given, self._dimensions)):
            self.untried["padding"] = UNTRIED

    def _padded(self, arguments: Arguments, part: Part) -> Padded | None:
        """Arguments in which one item is longer; None where the collate function pads nothing, or cannot be tried."""
        made = self._collate.recollated(part.indices, self._schedule.stage(part.lot))
        if made is None:
            return None
        try:
            return padded(arguments, take_apart(part.batch, part.count), made)
        except Unmatched:
            self.untried["padding"] = UNTRIED
            return None

    # ---- losses --------------------------------------------------------------------------------------------------

    def of_loss(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> None:
        """Try `loss(*batch)`, a loss for each example or their plain mean (or sum), with all modules that it calls."""
        self._losses[id(loss)] = loss
        self._raise_again(loss)
        if not self.loss_due(loss, part):
            return
        key = self._schedule.key(loss, part)
        with self._trying(loss):
            covered = self._try_loss(loss, batch, part)
        self._schedule.passed(key, part.lot)
        self._covered = part.lot if covered else None

    def _try_loss(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> bool:
        """Refuse a loss that mixes examples. Whether the modules that it calls were tried with it."""
        arguments = self._read(batch, part)
        if arguments.parts.unknown or not arguments.has_rows:
            raise TrainingLoopError(_NO_BATCH)
        lengths, cascade = self._padded(arguments, part), self._cascade(part)
        self._inputs.compare(arguments, part)
        public = self._public_arguments(arguments, part)
        if public is not None:
            with suppress(*_NOT_RUN):
                return cascade.of_loss(loss, public, lengths, synthetic_first=False)
        return cascade.of_loss(loss, arguments, lengths, synthetic_first=True)

    def before_recording(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> None:
        """Try the loss on the whole batch, just before a CUDA graph is recorded: replays run no Python code."""
        self.postponed = False
        arguments = self._read(batch, part)
        if part.count < 2 or not arguments.has_rows:
            return  # nothing to mix, or nothing that could be recorded
        with self._trying(loss):
            self._cascade(part).recorded(loss, self._public_arguments(arguments, part) or arguments)
        self._schedule.all_passed(part.lot)

    def of_rows(self, losses: Tensor, part: Part) -> None:
        """Try losses [n] of a forward pass that has run: the gradient of each may reach its own example only."""
        self._raise_again(self)
        if self._capture.recorded:  # a second backward pass of this batch, which is not tried
            self.untried["loss"] = _LOSSES
            return
        if not self.loss_due(self, part):
            return
        if losses.shape != (part.count,):
            raise TrainingLoopError("backward needs a loss for each example of the batch: a tensor of shape [n]")
        key = self._schedule.key(self, part)
        with self._trying(self):
            refuse_crossing_rows(self._capture, losses)
        self._schedule.passed(key, part.lot)
        outputs, self._outputs = self._outputs, []
        leaves = [leaf for leaf in take_apart(part.batch, part.count).leaves if isinstance(leaf, Tensor)]
        if not recognised(losses, outputs, leaves):
            self.untried["loss"] = _LOSSES

    def of_criterion(self, criterion: Callable[..., Tensor]) -> WatchedCriterion:
        """Try a criterion on made-up outputs, and on the shapes of its calls if it is a module."""
        self._criterion = WatchedCriterion(
            self._capture,
            criterion,
            "mean" if self._mean else "sum",
            due=lambda: self.due(getattr(self._capture.tag, "lot", 0)),
            on_refusal=lambda text: self.on_refusal(text),
        )
        return self._criterion

    def loss_tried(self, part: Part) -> bool:
        """Whether a part of the scalar that was differentiated for `part` was tried: a module's own loss, or criterion.

        What the loop added to it cannot be seen.
        """
        return self._own_loss is part or (self._criterion is not None and self._criterion.used is part)

    # ---- refused once, refused always ----------------------------------------------------------------------------

    @contextmanager
    def _trying(self, tried: object) -> Iterator[None]:
        """Run a trial in full precision, with the user's generators restored; remember a refusal.

        With fewer bits another number of rows may well be another result.
        """
        try:
            with full_precision(), generators_kept():
                yield
        except PrivacyError as error:
            raise self._remembered(tried, error) from error.__cause__

    def _raise_again(self, tried: object) -> None:
        """Raise an earlier refusal: another batch may not show what one showed."""
        error = self._refused.get(id(tried))
        if error is not None:
            raise type(error)(str(error))

    def _remembered(self, tried: object, error: PrivacyError) -> PrivacyError:
        self._refused[id(tried)] = error
        self.on_refusal(str(error))
        return error


def _other_readings(arguments: Arguments) -> list[list[int | None]]:
    """Other dimensions that may hold the examples: hidden states are [layers, n, ...], a mask [T, T] has no rows."""
    dims = arguments.dims
    inner = [
        1 if dim is None and isinstance(leaf, Tensor) and leaf.ndim > 2 and leaf.shape[1] == arguments.count else dim
        for leaf, dim in arguments.pairs()
    ]
    readings = [] if inner == dims else [inner]
    if sum(dim is not None for dim in dims) > 1:
        readings += [
            [None if i == place else d for i, d in enumerate(dims)] for place, dim in enumerate(dims) if dim is not None
        ]
    return readings
