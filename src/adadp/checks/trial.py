"""What can be tried is tried: the modules, the collate function and the loss of a run, on unlike examples.

A run has one `Trial`. It is called wherever examples enter the model, does nothing unless a trial is due by a public
schedule (or the modules are in a mode that was not tried yet), and refuses what lets one example reach another. Private
examples serve, so all that a trial says is that it passed, or a fixed text that names a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from adadp.checks.cascade import Cascade
from adadp.checks.collate import CollateTrial, Recollated
from adadp.checks.containers import Parts, dimension, take_apart
from adadp.checks.criterion import WatchedCriterion, watch_criterion
from adadp.checks.dataset_items import fetched
from adadp.checks.known_losses import recognised
from adadp.checks.lengths import refuse_padding
from adadp.checks.loss_trial import refuse_crossing_rows
from adadp.checks.messages import ATTRIBUTES, INPUTS, LOSSES, NO_BATCH, NO_ROWS, STALE_OUTPUT, UNKNOWN, UNRUN
from adadp.checks.module_state import ModuleState
from adadp.checks.padding import UNTRIED, Padded, Unmatched, is_among, padded
from adadp.checks.public_examples import public_examples_of
from adadp.checks.records import unseen_parts
from adadp.checks.schedule import stage
from adadp.checks.seeds import generators_kept, seeded
from adadp.checks.stale_outputs import StaleOutputs
from adadp.checks.trial_runs import TrialRuns
from adadp.errors import ConfigurationError, PrivacyError, TrainingLoopError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.capture.tap import backward_pass
from adadp.gradients.rounding import full_precision
from adadp.out_of_memory import out_of_memory

#: What models raise where they do not take what they are given. (Errors of privacy are none of these.)
_NOT_RUN = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)


class Part(Protocol):
    """The microbatch that is out."""

    @property
    def lot(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def indices(self) -> Sequence[int]: ...
    @property
    def batch(self) -> Any: ...


class Trial:
    """Tries out what a run does with its examples; `untried` says what could not be tried, by a short name."""

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
    ) -> None:
        self._capture = capture
        self._dimensions = (0,) if batch_first else (1, 0)
        self._dataset, self._collate = dataset, collate
        self._mean = loss_reduction == "mean"
        self._planned, self._largest = steps, largest
        self._public = public_examples_of(public_examples, default_collate if collate is None else collate)
        self.postponed = False  # whether a trial that is due waits until the step is recorded (`before_recording`)
        self._covered: int | None = None  # the lot on which modules were tried together with the loss
        self.untried: dict[str, str] = {}
        self.on_refusal: Callable[[str], None] = lambda text: None  # a refusal takes the run's number away
        self.undecided: set[int] = set()  # modules whose examples were too much alike so far
        # Whether a module trains, and whatever else can be switched on and off in it.
        self._switches = [
            (part.__dict__, name)
            for part in capture.module.modules()
            for name, value in part.__dict__.items()
            if isinstance(value, bool)
        ]
        self._stages: dict[tuple[int, tuple[bool, ...], int], int] = {}  # of a module in a mode: trials it passed
        self._refused: dict[int, PrivacyError] = {}
        self._losses: dict[int, Callable[..., Tensor]] = {}
        self._handed_on = StaleOutputs()
        #: What calls for the microbatch that is out returned, until the losses that are made of them were tried.
        self._outputs: list[Tensor] = []
        self._tried_for: object = None  # the microbatch on which a module was tried last
        self._same_inputs = False  # whether the model was given the batch's own tensors when it was tried
        self._attributes: ModuleState | None = None  # of the module, when the first lot had gone through it
        self._constants: dict[str, Any] = {}  # arguments that hold no rows, as they were when the module was tried
        self._own_loss: object = None  # the part for which a scalar that a module computed was differentiated
        self._criterion: WatchedCriterion | None = None
        self._collated: tuple[int, Recollated | None] | None = None  # at which stage, and what came out
        self._collate_refused: str | None = None
        text = unseen_parts(dataset)
        if text is not None:
            self.untried["dataset"] = text

    # ---- when ----------------------------------------------------------------------------------------------------

    def due(self, lot: int) -> bool:
        """Whether something is tried on this lot: by the schedule, or in a mode that was not tried yet."""
        modes = self._modes()
        passed = [reached for (_, mode, _), reached in self._stages.items() if mode == modes]
        return max(passed, default=0) < self._stage(lot) or bool(self.undecided)

    def passed_once(self) -> bool:
        """Whether something passed in the mode that the modules are in, and nothing is undecided."""
        modes = self._modes()
        passed = any(mode == modes and reached > 0 for (_, mode, _), reached in self._stages.items())
        return passed and not self.undecided

    def _stage(self, lot: int) -> int:
        return stage(lot, self._planned)

    def _modes(self) -> tuple[bool, ...]:
        return tuple([bool(entries.get(name)) for entries, name in self._switches])

    # ---- a call of a module ----------------------------------------------------------------------------------------

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        """Try `module`, if that is due, on a few rows of what it is about to be called with."""
        self._raise_again(id(module))
        if self._handed_on.from_another(args, kwargs, _place(part)):
            raise self._remembered(
                id(module), TrainingLoopError(STALE_OUTPUT.format(self._capture.module_name(module)))
            )
        key = self._key(module, part)
        self._note_attributes(part)
        if self._covered == part.lot and part.count > 1 and id(module) not in self.undecided:
            self._stages[key], self._tried_for = self._stage(part.lot), part
        if self.postponed or self._stages.get(key, 0) >= self._stage(part.lot):
            if self._tried_for is part:  # a further call for a batch on which the module was tried
                parts = take_apart((args, kwargs), part.count)
                dims = [dimension(leaf, part.count, self._dimensions) for leaf in parts.leaves]
                self._note_inputs(parts, dims, part)
            else:
                self._glance(args, kwargs, part)
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise TrainingLoopError(f"{self._capture.module_name(module)} was not tried out before it was recorded")
        parts = take_apart((args, kwargs), part.count)
        dims = [dimension(leaf, part.count, self._dimensions) for leaf in parts.leaves]
        if parts.unknown or all(dim is None for dim in dims):
            self._capture.refusal = self._unseen(module, parts)
            return
        if part.count < 2:  # one example has nothing to mix with
            return
        self._same_inputs, self._tried_for = False, part
        try:
            # With fewer bits, another number of examples may well be another result.
            with full_precision(), generators_kept():
                conclusive = self._read_and_try(module, parts, dims, part)
                self._refuse_padding(module, parts, dims, part)
            self._note_inputs(parts, dims, part)
        except PrivacyError as error:
            raise self._remembered(id(module), error) from error.__cause__
        if conclusive:
            self._stages[key] = self._stage(part.lot)
            self.undecided.discard(id(module))
        else:
            self.undecided.add(id(module))

    def _refuse_padding(self, module: nn.Module, parts: Parts, dims: Sequence[int | None], part: Part) -> None:
        """Refuse the module where an example's result changes with how long the others are."""
        given = self._padded(parts, dims, part)
        if given is not None:
            runs = TrialRuns(self._capture, module, parts, dims)
            if not refuse_padding(runs, given, self._dimensions):
                self.untried["padding"] = UNTRIED

    def _note_inputs(self, parts: Parts, dims: Sequence[int | None], part: Part) -> None:
        """Say so where the loop makes something of a batch that cannot be tried before it gives it to the model."""
        real = take_apart(part.batch, part.count)
        own = [dimension(leaf, part.count, self._dimensions) for leaf in real.leaves]
        if not any(dim is not None for dim in own):
            return
        memory = _memory(real.leaves)
        for leaf, dim, name in zip(parts.leaves, dims, parts.names, strict=True):
            if dim is None:
                self._note_constant(leaf, name, part)
            elif isinstance(leaf, Tensor) and not self._handed_on.knows(leaf) and not is_among(leaf, dim, real, own):
                self.untried["inputs"] = INPUTS
        rows = [leaf for leaf, dim in zip(parts.leaves, dims, strict=True) if dim is not None]
        self._same_inputs = all(isinstance(leaf, Tensor) and _address(leaf) in memory for leaf in rows)

    def _note_attributes(self, part: Part) -> None:
        """Say so where the loop has put other tensors into the module's attributes since the first lot."""
        before, self._attributes = self._attributes, None if part.lot else self._attributes
        if before is not None and part.lot == 1:
            now = ModuleState(self._capture.module)
            for path in before.values.keys() | now.values.keys():
                one, other = before.values.get(path), now.values.get(path)
                tensors = [value for value in (one, other) if isinstance(value, Tensor)]  # numbers may count epochs
                if tensors and not (len(tensors) == 2 and _same_values(*tensors)):
                    self.untried["attributes"] = ATTRIBUTES

    def _note_constant(self, leaf: Any, name: str, part: Part) -> None:
        """What holds no rows may hold something of all of them: it must be the same for every lot."""
        rows_elsewhere = isinstance(leaf, Tensor) and leaf.is_floating_point() and part.count in leaf.shape
        if rows_elsewhere and not self._handed_on.knows(leaf):
            self.untried["inputs"] = INPUTS
        if isinstance(leaf, Tensor):
            value: Any = leaf.detach().cpu() if leaf.is_floating_point() and leaf.numel() < 10**6 else None
        else:
            value = leaf if isinstance(leaf, float) else None
        if value is None:
            return
        if part.lot > 0 and name not in self._constants:  # there was none for the first lot: it came of something
            self.untried["inputs"] = INPUTS
        known = self._constants.setdefault(name, value)
        same = torch.equal(known, value) if isinstance(known, Tensor) and isinstance(value, Tensor) else known == value
        if not same:
            self.untried["inputs"] = INPUTS

    def _glance(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        """Between trials: where the model was given the batch's own tensors, it still is."""
        if not self._same_inputs or "inputs" in self.untried:
            return
        memory = _memory(take_apart(part.batch, part.count).leaves)
        for given in (*args, *kwargs.values()):
            rows = isinstance(given, Tensor) and dimension(given, part.count, self._dimensions) is not None
            if memory and rows and _address(given) not in memory and not self._handed_on.knows(given):
                self.untried["inputs"] = INPUTS

    def after_call(self, output: Any, part: Part) -> None:
        """Remember what an outermost call returned: it must not come back with a later lot."""
        if backward_pass() != -1:
            return  # checkpointing runs it again
        self._handed_on.note(output, _place(part))
        if part.lot == 0:
            self._attributes = ModuleState(self._capture.module)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self.loss_due(self, part):
            self._outputs = [*self._outputs, *(leaf for leaf in leaves if leaf.requires_grad)][-8:]
        for leaf in leaves:
            if leaf.ndim == 0 and leaf.requires_grad:
                leaf.register_hook(lambda _: setattr(self, "_own_loss", part))  # type: ignore[no-untyped-call]

    def loss_tried(self, part: Part) -> bool:
        """Whether a part of the scalar that was differentiated for `part` was tried: a module's own loss, or criterion.

        What the loop added to it cannot be seen.
        """
        return self._own_loss is part or (self._criterion is not None and self._criterion.used is part)

    def handed_out(self) -> None:
        """Another microbatch is out, or this one was stepped on: what was returned for it is no longer of interest."""
        self._outputs = []

    def _attempts(self, part: Part) -> Cascade:
        return Cascade(self._capture, self._dimensions, self._mean, self._stage(part.lot), self._largest)

    def _read_and_try(self, module: nn.Module, parts: Parts, dims: Sequence[int | None], part: Part) -> bool:
        """Try the module as its arguments may be read: a length may be the number of examples by chance."""
        attempts = self._attempts(part)
        public = self._public_arguments(parts, dims, part)
        if public is not None and self._public is not None:
            with suppress(*_NOT_RUN):  # private rows serve where public ones cannot be run
                return attempts.of_module(module, public, dims, self._public.count, schema_first=False)

        def attempt(read: Sequence[int | None]) -> bool:
            return attempts.of_module(module, parts, read, part.count, schema_first=self._public is None)

        try:
            return attempt(dims)
        except UnsupportedModuleError:
            # Sequences of as many steps as there are examples, [n, T, ...] or [T, n, ...]?
            turned = [
                0 if dim == 1 and leaf.shape[0] == part.count else dim
                for leaf, dim in zip(parts.leaves, dims, strict=True)
            ]
            if turned == list(dims):
                raise
            return attempt(turned)
        except PrivacyError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            for read in self._other_readings(parts, dims, part.count):
                with suppress(RuntimeError, ValueError, IndexError, TypeError):
                    return attempt(read)
            raise UnsupportedModuleError(UNRUN.format(self._capture.module_name(module))) from None

    def _public_arguments(self, parts: Parts, dims: Sequence[int | None], part: Part) -> Parts | None:
        """What public examples make of these arguments, where the user gave some."""
        if self._public is None:
            return None
        return self._public.arguments(parts, dims, take_apart(part.batch, part.count))

    def _other_readings(self, parts: Parts, dims: Sequence[int | None], count: int) -> list[list[int | None]]:
        """Hidden states are [layers, n, ...] whatever comes first elsewhere; a mask of [T, T] is the same for all."""
        inner = [
            1 if dim is None and isinstance(leaf, Tensor) and leaf.ndim > 2 and leaf.shape[1] == count else dim
            for leaf, dim in zip(parts.leaves, dims, strict=True)
        ]
        readings = [] if inner == list(dims) else [inner]
        if sum(dim is not None for dim in dims) > 1:
            readings += [
                [None if i == place else d for i, d in enumerate(dims)]
                for place, dim in enumerate(dims)
                if dim is not None
            ]
        return readings

    def _unseen(self, module: nn.Module, parts: Parts) -> str:
        name = self._capture.module_name(module)
        if parts.unknown:
            return UNKNOWN.format(name, ", ".join(parts.unknown))
        return NO_ROWS.format(name)

    # ---- collate -------------------------------------------------------------------------------------------------

    def _padded(self, parts: Parts, dims: Sequence[int | None], part: Part) -> Padded | None:
        """What to put in the place of a batch to see whether its padding matters, if it has any."""
        made = self._recollated(part)
        if made is None:
            return None
        try:
            return padded(parts, dims, take_apart(part.batch, part.count), made)
        except Unmatched:
            self.untried["padding"] = UNTRIED
            return None

    def _recollated(self, part: Part) -> Recollated | None:
        """Try the collate function, once for each stage of the schedule."""
        if self._collate_refused is not None:
            raise ConfigurationError(self._collate_refused)
        if self._collate is None or self._collate is default_collate or self._dataset is None or len(part.indices) < 2:
            return None
        if self._collated is None or self._collated[0] < self._stage(part.lot):
            try:
                with seeded(0):
                    known = None if self._public is None else self._public.items[:5]
                    items = fetched(self._dataset, list(part.indices)[:5]) if known is None else known
                trial = CollateTrial(self._collate, items, self._dimensions)
                self._collated = self._stage(part.lot), trial.recollated()
            except ConfigurationError as error:
                self._collate_refused = str(error)
                raise
            self.untried |= trial.untried
        return self._collated[1]

    # ---- losses --------------------------------------------------------------------------------------------------

    def loss_due(self, loss: object, part: Part) -> bool:
        """Whether a loss (for losses [n] of the loop: the trial itself) is to be tried on this part."""
        return part.count > 1 and self._stages.get(self._key(loss, part), 0) < self._stage(part.lot)

    def _key(self, tried: object, part: Part) -> tuple[int, tuple[bool, ...], int]:
        """What is tried, in which mode, and whether it comes after another part of its lot."""
        return id(tried), self._modes(), min(_place(part)[1], 1)

    def of_loss(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> None:
        """Try `loss(*batch)`, a loss for each example or their plain mean (or sum), with all that it calls."""
        key = self._key(loss, part)
        self._losses[key[0]] = loss  # alive, so that no other is taken for it
        self._raise_again(key[0])
        if not self.loss_due(loss, part):
            return
        try:
            with full_precision(), generators_kept():
                covered = self._try_loss(loss, batch, part)
        except PrivacyError as error:
            raise self._remembered(key[0], error) from error.__cause__
        self._stages[key] = self._stage(part.lot)
        self._covered = part.lot if covered else None

    def _try_loss(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> bool:
        """Refuse a loss that mixes examples. Whether the modules that it calls were tried with it."""
        parts = take_apart(batch, part.count)
        dims = [dimension(leaf, part.count, self._dimensions) for leaf in parts.leaves]
        if parts.unknown or all(dim is None for dim in dims):
            raise TrainingLoopError(NO_BATCH)
        lengths, attempts = self._padded(parts, dims, part), self._attempts(part)
        self._note_inputs(parts, dims, part)
        public = self._public_arguments(parts, dims, part)
        if public is not None and self._public is not None:
            with suppress(*_NOT_RUN):
                return attempts.of_loss(loss, public, dims, self._public.count, lengths, schema_first=False)
        return attempts.of_loss(loss, parts, dims, part.count, lengths, schema_first=self._public is None)

    def before_recording(self, loss: Callable[..., Tensor], batch: tuple[Any, ...], part: Part) -> None:
        """Try once more what is about to be recorded, on all rows of the batch: Python does not run after that."""
        self.postponed = False
        parts = take_apart(batch, part.count)
        dims = [dimension(leaf, part.count, self._dimensions) for leaf in parts.leaves]
        if part.count < 2 or all(dim is None for dim in dims):
            return  # nothing to mix, or nothing that could be recorded
        public = self._public_arguments(parts, dims, part)
        count = part.count if public is None or self._public is None else self._public.count
        try:
            with full_precision(), generators_kept():
                self._attempts(part).recorded(loss, parts if public is None else public, dims, count)
        except PrivacyError as error:
            raise self._remembered(id(loss), error) from error.__cause__
        modes = self._modes()
        for key in self._stages:
            if key[1] == modes:
                self._stages[key] = max(self._stages[key], self._stage(part.lot))

    def of_rows(self, losses: Tensor, part: Part) -> None:
        """Try losses [n] of a pass that has run: the gradient of each may reach its own example alone."""
        key = self._key(self, part)
        self._raise_again(key[0])
        if self._capture.recorded:  # a second backward pass of this batch, which is not tried
            self.untried["loss"] = LOSSES
            return
        if not self.loss_due(self, part):
            return
        if losses.shape != (part.count,):
            raise TrainingLoopError("backward needs a loss for each example of the batch: a tensor of shape [n]")
        try:
            with full_precision(), generators_kept():
                refuse_crossing_rows(self._capture, losses)
        except PrivacyError as error:
            raise self._remembered(key[0], error) from error.__cause__
        self._stages[key] = self._stage(part.lot)
        outputs, self._outputs = self._outputs, []
        leaves = [leaf for leaf in take_apart(part.batch, part.count).leaves if isinstance(leaf, Tensor)]
        if not recognised(losses, outputs, leaves):
            self.untried["loss"] = LOSSES

    def of_criterion(self, criterion: Callable[..., Tensor]) -> WatchedCriterion:
        """Try a criterion on made-up outputs, and on the shapes of its calls if it is a module."""
        self._criterion = watch_criterion(
            self._capture, criterion, "mean" if self._mean else "sum", self._criterion_due
        )
        self._criterion.on_refusal = lambda text: self.on_refusal(text)
        return self._criterion

    def _criterion_due(self) -> bool:
        return self.due(getattr(self._capture.tag, "lot", 0))

    # ---- refused once, refused always -----------------------------------------------------------------------------

    def _raise_again(self, key: int) -> None:
        """Another batch may hide what one showed."""
        error = self._refused.get(key)
        if error is not None:
            raise type(error)(str(error))

    def _remembered(self, key: int, error: PrivacyError) -> PrivacyError:
        self._refused[key] = error
        self.on_refusal(str(error))
        return error


def _place(part: Part) -> tuple[int, int]:
    return part.lot, getattr(part, "index", 0)


def _same_values(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _address(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _memory(leaves: Sequence[Any]) -> set[tuple[int, int]]:
    return {_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
