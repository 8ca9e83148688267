"""A training step that a GPU replays: recorded once as a CUDA graph, then started by one call instead of hundreds.

A step of a small model is over on the GPU before Python has asked for half of it. A recording has no Python in it, so
whatever Python decides must be the same for every lot that is replayed: batches have one size (`pad_lots=True`). What
must happen on the host for a lot happens before the replay: it is charged and counted, and a shape that is due is
refreshed, whose numbers the recording takes over.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from adadp.clipping.base import settings_of
from adadp.errors import BudgetExhaustedError
from adadp.gradients.forms.factors import Factor
from adadp.gradients.rounding import convolutions_are_cut, matmul_precision
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.step import PrivateStep
from adadp.mechanism.sums import ReleasedGradient
from adadp.out_of_memory import advising, out_of_memory
from adadp.sampling.batches import some_rows
from adadp.sampling.lot import Microbatch
from adadp.shapes.source import Source
from adadp.shapes.spectrum import Spectrum

#: Ordinary steps before the first recording: libraries choose their ways and kernels are compiled in them.
WARM_UP = 2
#: Lots within which a first recording is waited for, once a step was tried: what is recorded is tried then.
_SOON = 8
#: The first lot of the schedule of trials (`adadp.checks.schedule`) that is tried though steps are replayed.
FIRST_BESIDE_REPLAYS = 1000


class TrainingStep:
    """Everything between two batches: `step(inputs, targets)` is zero_grad, losses, backward and optimizer.step().

    `loss(*batch)` returns one loss for each row of the batch, [n], and runs the private module. (A scalar, the mean or
    sum that `make_private` was told of, is taken as well.) Lots larger than `max_physical_batch_size` are cut in here:
    the loop sees one batch for each lot.

    The loss is called once for each recording, so it must do the same for every batch, and find all of the batch in
    its arguments: whatever else it reads stays as it was recorded, and that lot would be seen again with every other.
    On a CPU, and wherever a step cannot be recorded, the same work is done step by step; `replays` counts what was
    replayed, `why_not` says what stands in the way. Nothing is returned: a loss over private examples is not covered by
    any guarantee.
    """

    def __init__(self, optimizer: PrivateOptimizer, loss: Callable[..., Tensor]) -> None:
        self.optimizer, self.loss = optimizer, loss
        self.replays = 0
        self.why_not: str | None = _obstacle(optimizer)
        self._recording: _Recording | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._ordinary = 0
        self._tries = False  # whether module and loss are tried on this lot
        optimizer._loader.whole_lots = True

    def __call__(self, *batch: Any) -> None:
        optimizer = self.optimizer
        lots, loader, whole = optimizer._loader.lots, optimizer._loader, optimizer._current()
        lots.refuse_other_batches(tree_leaves(batch))
        # What a recording does is fixed: Python, which could change it, does not run. So it is tried less often.
        due = optimizer._trial.due(whole.lot) and (self._recording is None or whole.lot >= FIRST_BESIDE_REPLAYS)
        optimizer._trial.postponed = due and self._records_soon(whole)
        self._tries = due and not optimizer._trial.postponed
        if self._tries:
            with advising(whole.count, lambda size: self._fits(batch, whole.count, size)):
                optimizer._trial.of_loss(self.loss, batch, whole)
        size = loader.max_physical_batch_size
        if size is None or whole.count <= size or not (whole.index == 0 and whole.last):
            self._one(whole, batch)
            return
        for part in whole.cut(size):
            rows = some_rows(batch, whole.count, part.index * size, part.count, loader.batch_first)
            lots.work_on(part)
            self._one(part, rows)
            if lots.stopped:
                return

    def _one(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        """The work on one microbatch, recorded or replayed where it can be."""
        if self._outdated():  # by a step that was made elsewhere: what that left is completed by an ordinary one
            self._ordinary = min(self._ordinary, WARM_UP - 1)
        if self._tries:  # the module is tried where it is called, and the host waits for what comes out
            self._ordinarily(batch)
            return
        if self.why_not is None and self._replayable(microbatch):
            try:
                self._replay(microbatch, batch)
            except BudgetExhaustedError as spent:
                self.optimizer.stop(spent)
            return
        steady = self.optimizer._step.clipping.steady()
        if self.why_not is None and steady and self._ordinary == WARM_UP - 1:
            self._rehearse(batch)
        else:
            self._ordinarily(batch)
        outdated = self._outdated()
        if steady:
            self._ordinary += 1
        elif outdated or self._recording is None:  # what a refresh leaves is completed by the first lot that uses it
            self._ordinary = min(self._ordinary, WARM_UP - 1)

    def _records_soon(self, whole: Microbatch) -> bool:
        """Whether this step was tried and is recorded now or in a few lots: what is recorded is tried then."""
        if self.why_not is not None or not self.optimizer._trial.passed_once() or whole.lot >= FIRST_BESIDE_REPLAYS:
            return False
        return 0 < whole.lot < _SOON or (self._recording is None and self._replayable(whole))

    def _outdated(self) -> bool:
        """Whether the recording works on what the clipping no longer keeps, nor can take over; it is then dropped."""
        if self._recording is None or self._recording.current(self.optimizer):
            return False
        self._recording = None
        return True

    def _ordinarily(self, batch: tuple[Any, ...]) -> None:
        count = self.optimizer._current().count
        self.optimizer.zero_grad()
        with advising(count, lambda size: self._fits(batch, count, size)):
            losses = self.loss(*batch)
            if self._tries:
                self.optimizer.refuse_foreign_leaves(losses)
            _backward(self.optimizer, losses)
        self.optimizer.step()

    def _fits(self, batch: tuple[Any, ...], count: int, size: int) -> bool:
        """Whether the gradients of `size` of the batch's examples can be made and measured; they are then forgotten."""
        step = self.optimizer._step
        step.capture.discard()
        try:
            rows = some_rows(batch, count, 0, size, self.optimizer._loader.batch_first)
            with step.capture.aside():
                self.loss(*rows).sum().backward()  # type: ignore[no-untyped-call]
                for form in step.capture.take(size).values():
                    form.squared_norms()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            self.optimizer.zero_grad()
        return True

    def _rehearse(self, batch: tuple[Any, ...]) -> None:
        """An ordinary step that notes where the host waits for the GPU: a recording would break off there."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._ordinarily(batch)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                self.why_not = f"the host waits for the GPU ({warning.filename}, line {warning.lineno})"
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _replayable(self, microbatch: Microbatch) -> bool:
        step = self.optimizer._step
        checked = not self.optimizer._trial.undecided  # the model is tried out by the host
        whole = microbatch.index == 0 and microbatch.last
        steady = step.clipping.steady() or (self._recording is not None and step.clipping.steady(begun=True))
        return whole and checked and self._ordinary >= WARM_UP and steady

    def _replay(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        optimizer, step = self.optimizer, self.optimizer._step
        step.refuse_misuse(microbatch)
        optimizer.refuse_changes(microbatch)
        optimizer.say_untried()
        step.charge(microbatch.of)
        begun = not step.clipping.steady()
        if begun:
            step.begin(microbatch)
            self._outdated()
        signature = _signature(optimizer, microbatch, batch)
        if begun and (self._recording is None or self._recording.signature != signature):
            self._recording, self._ordinary = None, WARM_UP - 1
            self._ordinarily(batch)
            return
        if self._recording is None or self._recording.signature != signature:
            self._recording = None  # its memory is free for the next
            self._recording = self._record(signature, microbatch, batch)
        if self._recording is None:
            self._ordinarily(batch)
            return
        self._recording.play(microbatch, batch)
        step.replayed(microbatch)
        self.replays += 1
        optimizer.step_with(self._recording.gradients)

    def _record(self, signature: Any, microbatch: Microbatch, batch: tuple[Any, ...]) -> _Recording | None:
        with advising(microbatch.count, lambda size: self._fits(batch, microbatch.count, size)):
            self.optimizer._trial.before_recording(self.loss, batch, microbatch)
        try:
            if self._keeper is None:
                self._keeper = _keeper()
            return _Recording(self.optimizer, self.loss, signature, microbatch, batch, self._keeper.pool())
        except Exception as error:  # whatever it is, an ordinary step is tried next, and says what is wrong
            self.why_not = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"steps are not replayed on the GPU, but made one by one: {self.why_not}", stacklevel=4)
        return None


class _CannotBeReplayedError(Exception):
    """A step does more on the host than a replay would do."""


class _Recording:
    """One recorded step: where its batch is put, what it leaves, and the state of the clipping that it works on."""

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        loss: Callable[..., Tensor],
        signature: Any,
        microbatch: Microbatch,
        batch: tuple[Any, ...],
        pool: Any,
    ) -> None:
        self.signature = signature
        step = optimizer._step
        _refuse_what_is_not_copied(microbatch, tree_leaves(batch))
        device = next(iter(optimizer._parameters.values())).device
        self._batch = tree_map(lambda part: part.to(device, copy=True) if isinstance(part, Tensor) else part, batch)
        self._real = torch.zeros((), dtype=torch.long, device=device)
        objects = step.clipping.objects()
        before = _State(objects)
        self._state = before  # with all that the recorded work reads, and whoever made it may have let go of
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(step._randomness.generator(device))
        optimizer.zero_grad()
        recorded = replace(microbatch, real=self._real)
        lots = optimizer._loader.lots
        lots.work_on(recorded)
        try:
            with _recorded(self._graph, device, pool):
                _backward(optimizer, loss(*self._batch))
                with torch.no_grad():
                    optimizer.release(recorded)
                    before.follow(_State(objects))
        except BaseException:
            optimizer.zero_grad()  # nobody has computed what was set there
            step.capture.discard()
            step.take_back(microbatch)
            step._randomness.renew(device)
            raise
        finally:
            before.restore()  # nothing was computed yet: the first replay does
            lots.work_on(microbatch)
        self._begun = step.begun
        parameters = optimizer._parameters.items()
        self.gradients = ReleasedGradient({name: p.grad for name, p in parameters if p.grad is not None})

    def play(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        """Put a lot's batch in place and start the recorded work on it."""
        for own, given in zip(tree_leaves(self._batch), tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        self._real.fill_(microbatch.real)
        self._graph.replay()

    def current(self, optimizer: PrivateOptimizer) -> bool:
        """Whether the clipping's state is the one that was recorded: what an ordinary step made of it is taken over."""
        step = optimizer._step
        if self._begun != step.begun:  # not all lots since were replayed
            now = _State(step.clipping.objects())
            if not (self._state.kept_in(now) or self._state.take_over(now)):
                return False
            self._begun = step.begun
        return True


def _backward(optimizer: PrivateOptimizer, losses: Tensor) -> None:
    """From one loss for each row, or from the scalar that they were put together to."""
    if losses.ndim:
        optimizer.backward_by_rows(losses)
    else:
        losses.backward()  # type: ignore[no-untyped-call]


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside. An older recording that Python's collector came across could not be freed now."""
    collecting = gc.isenabled()
    gc.disable()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
        if collecting:
            gc.enable()


def _keeper() -> torch.cuda.CUDAGraph:
    """A recording of next to nothing. While it lives, the memory of every recording serves the next one too."""
    graph, device = torch.cuda.CUDAGraph(), torch.device("cuda", torch.cuda.current_device())
    with _recorded(graph, device):
        torch.zeros(1, device=device)
    return graph


def _obstacle(optimizer: PrivateOptimizer) -> str | None:
    """What stands in the way of recording any step of this run."""
    step, loader = optimizer._step, optimizer._loader
    parameter = next(iter(optimizer._parameters.values()))
    foreign = [type(part).__name__ for part in step.clipping.objects() if not _ours(part)]
    if parameter.device.type != "cuda":
        return f"the model is on {parameter.device.type}: only CUDA replays"
    if not loader.pad_lots:
        return "lots have different sizes: make_private(..., pad_lots=True) gives them one"
    if type(step) is not PrivateStep or foreign:
        return f"{', '.join(foreign) or type(step).__name__} may do on the host what a replay would leave out"
    if step._randomness.secure:
        return "secure_mode takes its noise from the operating system, on the host"
    if step._count_nonfinite:
        return "expose_raw counts on the host"
    if step.observer is not None:
        return "an observer looks at releases on the host"
    return None


def _signature(optimizer: PrivateOptimizer, microbatch: Microbatch, batch: tuple[Any, ...]) -> Any:
    """What Python and the libraries decide by. Two lots with the same signature are the same work."""
    step = optimizer._step
    leaves, form = tree_flatten(batch)
    parts = [(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in leaves if _is_copied(part)]
    weights = [(p.data_ptr(), p.requires_grad) for p in optimizer._parameters.values()]
    precision = matmul_precision(), convolutions_are_cut()
    modes = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), precision)
    training = [part.training for part in step.capture.module.modules()]
    numbers = microbatch.count, microbatch.planned, step.noise_multiplier, step.loss_scale
    return numbers, form, parts, weights, modes, training, settings_of(step.clipping)


def _is_copied(part: Any) -> bool:
    """Whether a part of a batch is put in the recorded one's place, or is the same in both."""
    return part is None or isinstance(part, Tensor | int | float | str)


def _refuse_what_is_not_copied(microbatch: Microbatch, parts: list[Any]) -> None:
    """A recording sees what is copied into its batch. Anything else would be the first lot's at every replay."""
    foreign = [type(part).__name__ for part in parts if not _is_copied(part)]
    if foreign:
        raise _CannotBeReplayedError(f"the batch has a {foreign[0]} in it: only tensors can be given to a replay")
    if not any(isinstance(part, Tensor) and part.ndim and microbatch.count in part.shape[:2] for part in parts):
        raise _CannotBeReplayedError("no example is in what the step is given: the loss must take all of its batch")


def _ours(part: object) -> bool:
    return type(part).__module__.partition(".")[0] == "adadp"


class _State:
    """Everything that a clipping, its shape and its source keep between lots, by where it is kept."""

    def __init__(self, objects: list[object]) -> None:
        self._objects = objects
        self._kept = [_copy(vars(part)) for part in objects]
        leaves = dict(_walk(self._kept, ()))
        self.tensors: dict[Any, Tensor] = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self._others = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}

    def kept_in(self, now: _State) -> bool:
        """Whether the same things are kept still, each in its place."""
        mine, others = self.tensors | self._others, now.tensors | now._others
        return mine.keys() == others.keys() and all(
            self._counted(path) or _same(value, others[path]) for path, value in mine.items()
        )

    def _counted(self, path: tuple[Any, ...]) -> bool:
        """Whether that is a source's number of lots."""
        return path[1:] == ("step",) and isinstance(self._objects[path[0]], Source)

    def restore(self) -> None:
        """Put everything back as it was."""
        for part, kept in zip(self._objects, self._kept, strict=True):
            vars(part).clear()
            vars(part).update(_copy(kept))

    def take_over(self, now: _State) -> bool:
        """Copy the numbers that are kept now into the tensors that were kept then, and keep those again.

        False, and nothing is done, where more than numbers differ: the host may then decide otherwise.
        """
        mine, others = dict(_walk(self._kept, (), deep=True)), dict(_walk(now._kept, (), deep=True))
        if mine.keys() != others.keys():
            return False
        moved: list[tuple[Tensor, Tensor]] = []
        stayed: set[int] = set()
        for path, old in mine.items():
            new = others[path]
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                    return False
                if new is not old:
                    moved.append((old, new))
                else:
                    stayed.add(_place(old))
            elif not (self._counted(path) or _same(old, new) or _no_wider(path, old, new)):
                return False
        # Each place gets one value. None of these is itself a place, and no place is one of what stayed as it was.
        pairs = {(_place(old), _place(new)) for old, new in moved}
        places, values = {place for place, _ in pairs}, {value for _, value in pairs}
        if len(places) < len(pairs) or places & (values | stayed):
            return False
        for old, new in moved:
            old.copy_(new)
        counts = {path: value for path, value in now._others.items() if self._counted(path)}
        self.restore()
        for path, count in counts.items():
            setattr(self._objects[path[0]], path[1], count)
        return True

    def follow(self, after: _State) -> None:
        """Copy what became of each tensor into the tensor itself, so that the next replay goes on from there."""
        if self.tensors.keys() != after.tensors.keys() or self._others.keys() != after._others.keys():
            raise _CannotBeReplayedError("the clipping keeps more, or less, after a lot than before it")
        for path, value in self._others.items():
            # Sources count their lots, and count those that are replayed (`count_lot`). Nothing else may change.
            if not _same(value + 1 if self._counted(path) else value, after._others[path]):
                raise _CannotBeReplayedError(f"{type(self._objects[path[0]]).__name__}.{path[1]} changes with each lot")
        moved = [(old, after.tensors[path]) for path, old in self.tensors.items() if after.tensors[path] is not old]
        if len({old.data_ptr() for old, _ in moved}) < len(moved) or any(old.shape != new.shape for old, new in moved):
            raise _CannotBeReplayedError("the clipping's tensors are not each in a place of its own")
        for old, new in moved:
            old.copy_(new)


def _copy(value: Any) -> Any:
    """Containers anew, with the same things in them."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _walk(value: Any, path: tuple[Any, ...], deep: bool = False) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is kept, by where it is kept; `deep` looks into a shape's factors too, which are else taken as they are."""
    if deep and isinstance(value, Spectrum | Factor):
        yield (*path, type), type(value)
        value = vars(value)
    if isinstance(value, dict | list) or (deep and isinstance(value, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(part, (*path, key), deep)
    else:
        yield path, value


def _no_wider(path: tuple[Any, ...], old: Any, new: Any) -> bool:
    """Whether that is the spread of a factor, and bounds for the old one hold for the new."""
    return bool(path[-1] == "spread" and isinstance(old, float) and isinstance(new, float) and new <= old)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return old is new or (isinstance(old, int | float | str) and type(old) is type(new) and old == new)
