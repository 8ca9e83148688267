"""One step: from a lot's per-example gradients to one private gradient.

    gradients -> Clipping.bound -> BoundedSums -> charge -> add_noise -> NoisedSums -> Clipping.release -> optimizer

Everything up to `add_noise` is private data and is dropped when the step ends. Everything after it is post-processing.
The types of `adadp.mechanism.sums` keep the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adadp.accounting.events import Event, with_noise
from adadp.checks.notes import say_through_func
from adadp.clipping.base import Clipping, count_lot, settings_of
from adadp.clipping.early import before_pass
from adadp.distributed.agreement import ALONE, Agreement
from adadp.distributed.sharded import sharded_of
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.gradients import Capture, Gradients
from adadp.gradients.capture.meetings import UnruledError
from adadp.gradients.rounding import exact_arithmetic, refuse_unbounded_precision
from adadp.mechanism.attempts import Attempt
from adadp.mechanism.noise import add_noise
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.randomness import Randomness
from adadp.sampling.lot import Lot, Microbatch, State
from adadp.shapes.source import Source


class PrivateStep:
    """The work on one lot after another. Made by the engine; the private optimizer drives it.

    Attributes:
        resumable: whether all that it keeps between lots is in a checkpoint (`adadp.mechanism.run_state`).

    Args:
        capture: gives the per-example gradients of the module's backward passes.
        clipping: bounds them, and states the sensitivity of their sums.
        noise_multiplier: standard deviation of the noise in units of the clipping's sensitivity.
        expected_lot: the number that sums are divided by, which does not depend on the data.
        event: what one release costs.
        charge: called with the event before anything is released; may refuse by raising.
        randomness: where the noise comes from.
        mean_loss: whether scalar losses are means over the batch's rows, or sums.
        loss_scale: factor that losses are multiplied by before the backward pass.
        normalize_clipping: divide what is released by the clipping's bound, a public number.
        count_nonfinite: count the examples whose gradients are not finite. The count is not private.
        agreement: with other processes, which have the other parts of each lot.

    """

    resumable = True

    def __init__(
        self,
        capture: Capture,
        clipping: Clipping,
        *,
        noise_multiplier: float,
        expected_lot: float,
        event: Event,
        charge: Callable[[Event], None],
        randomness: Randomness,
        mean_loss: bool = True,
        loss_scale: float = 1.0,
        normalize_clipping: bool = False,
        count_nonfinite: bool = False,
        agreement: Agreement = ALONE,
    ) -> None:
        self.capture, self.clipping, self.agreement = capture, clipping, agreement
        capture.before_pass = partial(before_pass, self)  # all of clamping during the backward pass (`clipping.early`)
        self.noise_multiplier, self.expected_lot = noise_multiplier, expected_lot
        self.event, self._charge, self._randomness = event, charge, randomness
        self.mean_loss, self.loss_scale = mean_loss, loss_scale
        self.normalize_clipping, self._count_nonfinite = normalize_clipping, count_nonfinite
        self.nonfinite: Tensor | None = None
        self.observer: Observer | None = None
        self.attempt: Attempt | None = None  # of a run with a seed that may be resumed
        # Number of layer calls that were recorded in backward passes from each example's own loss, for this microbatch.
        # None if there was no such pass.
        self.calls_from_losses: int | None = None
        self.figures: Mapping[str, Tensor] = {}  # those losses, and others, whose means may be released (`PaidFigures`)
        self._parameters = dict(capture.module.named_parameters())
        self.trained: list[bool] = []  # by parameter: whether it was trained when the microbatch was handed out
        self.sharded = sharded_of(capture.module)
        self._ready_for: Lot | None = None  # the lot that the clipping is ready for
        self.lots_begun = 0  # how many lots were worked on, replayed ones left out

    def use_noise(self, noise_multiplier: float) -> None:
        """Noise every lot from the next one on with this multiplier, and charge it for that.

        Guarantee:
            Each lot is charged for the noise that it gets. That the multipliers follow a plan made beforehand, and not
            what was released or the data, is the caller's to see to.

        Raises:
            ConfigurationError: this kind of step, or what it is charged for, has no one noise multiplier.

        """
        if type(self) is not PrivateStep:
            raise ConfigurationError(f"{type(self).__name__} plans its noise itself: it cannot be changed from outside")
        self.event = with_noise(self.event, noise_multiplier)
        self.noise_multiplier = noise_multiplier

    # ---- a lot is handed out, and the clipping prepares for it -------------------------------------------------------

    def open(self, microbatch: Microbatch) -> None:
        """Note that the loop was handed this microbatch."""
        self.calls_from_losses, self.figures = None, {}
        if self.sharded is not None and self.capture.attached:
            self.sharded.gather(microbatch.of)
        if microbatch.index == 0:
            self.capture.discard()  # what the loop differentiated for a lot that it then left
            self._randomness.begin_lot(microbatch.lot)
        self.trained = [parameter.requires_grad for parameter in self._parameters.values()]
        self.capture.work_on(microbatch, microbatch.count, microbatch.planned)

    def forget(self) -> None:
        """Drop the gradients that backward passes recorded for this microbatch."""
        self.calls_from_losses, self.figures = None, {}
        self.capture.discard()

    def ready(self, microbatch: Microbatch) -> Tensor | None:
        """Begin the microbatch's lot before its gradients are made, if that can be done now.

        Returns:
            Which of its rows count, [count] of bool; None where the lot cannot be begun, or non-finite
            gradients are being counted.

        """
        lot = microbatch.of
        if self._count_nonfinite:
            return None
        if lot.added == 0 and lot.state in (State.OPENED, State.FAILED) and not self._is_begun(lot):
            with torch.no_grad(), exact_arithmetic():  # as in a step, however the model is run
                self.begin(microbatch)
        return microbatch.keep(self._device()) if lot is self._ready_for else None

    def _is_begun(self, lot: Lot) -> bool:
        """Whether the clipping is ready for this lot, with the parameters that are trained now."""
        return lot is self._ready_for and self._active().keys() == self.clipping.parameters.keys()

    def _active(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def begin(self, microbatch: Microbatch) -> None:
        """Prepare the clipping for the microbatch's lot before its gradients are made: shapes are refreshed if due."""
        try:
            self._begin(microbatch.of)
        except BaseException:
            self._drop(microbatch.of, State.OPENED)
            raise

    def _begin(self, lot: Lot) -> None:
        self._drop(lot, State.OPENED)
        self._ready_for = lot
        self.lots_begun += 1
        self.clipping.begin(self._active(), self)

    def _drop(self, lot: Lot, state: State) -> None:
        """Drop all sums of the lot."""
        lot.drop(state)
        self._ready_for = None

    # ---- its microbatches are bounded and added up: private data -----------------------------------------------------

    def add(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        """Add the bounded contributions of the microbatch whose backward pass has just ended.

        Args:
            microbatch: the part of a lot that the gradients belong to.
            keep: examples to leave out are False, [count] of bool. Whether an example is kept may depend on that
                example and the weights alone.

        Raises:
            TrainingLoopError: the microbatch cannot be worked on now. Its lot is not released then.

        """
        self.refuse_misuse(microbatch)
        lot = microbatch.of
        try:
            bounded = self._bounded(microbatch, keep)
        except BaseException as error:
            # Whether this raises may depend on the examples: the lot must not be released without this part, and the
            # part's gradients must not be added to another lot.
            self._drop(lot, State.FAILED)
            self.forget()
            if isinstance(error, Exception):  # other processes would wait for this part
                self.agreement.failed(lot.number)
            raise
        self.calls_from_losses, self.figures = None, {}
        lot.state = State.FILLED if microbatch.last else State.OPENED
        lot.added += 1
        for name, value in bounded.items():
            lot.sums[name] = lot.sums[name] + value if name in lot.sums else value

    def refused(self, note: Callable[[], None]) -> None:
        """A trial refuses the model, the loss or the collate function: have it noted, and no process go on."""
        note()
        if isinstance(self.capture.tag, Microbatch):
            self.agreement.failed(self.capture.tag.lot)

    def refuse_misuse(self, microbatch: Microbatch) -> None:
        """Raise TrainingLoopError if a microbatch cannot be worked on now."""
        lot = microbatch.of
        if not self.capture.attached:
            raise TrainingLoopError(
                "the engine's hooks were taken off this module (engine.detach), so its gradients are those of all "
                "examples together, and not private. Use the ordinary optimizer, or make_private again."
            )
        if lot.state is State.RELEASED:
            self.capture.discard()
            raise TrainingLoopError(
                f"lot {lot.number} was released already: a second release of the same lot is not covered. Call "
                "optimizer.step() once for each batch of the loader."
            )
        if lot.state is State.LEFT:
            self.capture.discard()
            raise TrainingLoopError(
                f"lot {lot.number} was left: a new iteration of the loader was begun after it was handed out. Train on "
                "the batch that was handed out last."
            )
        if lot.state is State.FAILED and not self.capture.recorded:
            raise TrainingLoopError(
                f"lot {lot.number} could not be worked on, and its gradients are gone: it would be released without "
                "them. Run the model on the batch again."
            )

    def _bounded(self, microbatch: Microbatch, keep: Tensor | None) -> BoundedSums:
        lot = microbatch.of
        if lot is not self._ready_for or lot.state is State.FAILED:
            self._begin(lot)
        if microbatch.index != lot.added:
            raise TrainingLoopError(
                f"microbatch {microbatch.index} of lot {lot.number} came where {lot.added} was due: "
                "optimizer.step() must be called exactly once for each batch of the loader (it does nothing but add up "
                "until the lot is complete)"
            )
        if microbatch.index == 0:
            lot.settings = settings_of(self.clipping)
        self._refuse_changed_clipping(lot)
        return self.clipping.bound(self._gradients(microbatch, keep))

    def _refuse_changed_clipping(self, lot: Lot) -> None:
        if settings_of(self.clipping) != lot.settings:
            raise TrainingLoopError(
                "the clipping was changed within a lot: what was bounded before would get the noise of what it is now. "
                "Change it between lots, where loader.current.last is True."
            )

    def _gradients(self, microbatch: Microbatch, keep: Tensor | None) -> Gradients:
        count = microbatch.count
        forms = self.capture.take(count)
        refuse_unbounded_precision(self._device())
        counts = microbatch.keep(self._device())
        if keep is not None:
            counts = counts & keep.to(counts.device)
        scale, segments = self.scale(microbatch), microbatch.segments
        if segments is None:
            gradients = Gradients(forms, count, scale=scale, keep=counts)
            gradients.figures = self.figures
        else:
            gradients = Gradients.of_segments(forms, segments, scale=scale, keep=counts, some=keep is not None)
        if self._count_nonfinite:
            lost = (~gradients.norms().isfinite() & counts).sum()
            lot = microbatch.of
            lot.nonfinite = lost if lot.nonfinite is None else lot.nonfinite + lost
        return gradients

    def scale(self, microbatch: Microbatch) -> float:
        """Factor from a backward pass's gradient to one example's: the number of rows for a mean loss, 1 for a sum."""
        return (microbatch.count if self.mean_loss and self.calls_from_losses is None else 1.0) / self.loss_scale

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    # ---- it is charged, noised and released --------------------------------------------------------------------------

    def release(self, lot: Lot) -> ReleasedGradient:
        """Release the lot's gradient, divided by the expected lot size (and by the bound: `normalize_clipping`).

        Guarantee:
            The result is one release of `event`, which is charged before the noise is drawn. Where charging raises,
            nothing is released.

        Raises:
            TrainingLoopError: not all microbatches of the lot were added.

        """
        if lot.state is not State.FILLED and lot.state is not State.CHARGED:
            raise TrainingLoopError(f"lot {lot.number} cannot be released: {lot.state.value}")
        self._refuse_changed_clipping(lot)
        stddev = self.clipping.stddev(self.noise_multiplier)
        if self.attempt is None:
            self.charge(lot)
        # Of this lot: `Clipping.release` may set another bound for the next one.
        unit = self.expected_lot * (self.clipping.norm_bound() if self.normalize_clipping else 1.0)
        sums = self.agreement.totals(lot.sums)
        self._pool()
        sums = self.clipping.complete(sums)
        if self.attempt is not None:
            self._admit(self.attempt, lot, sums, stddev)
        if lot.nonfinite is not None:
            lost = self.agreement.group.totals({"lost": lot.nonfinite})["lost"]
            self.nonfinite = lost if self.nonfinite is None else self.nonfinite + lost
        noisy = self.noised("gradient", lot.number, sums, stddev)
        self._drop(lot, State.RELEASED)
        # -------------------------------------------------------------------- the line: post-processing from here on
        released = self.clipping.release(noisy, stddev)
        means = torch._foreach_div(list(released.values()), unit) if released else ()
        return ReleasedGradient(zip(released, means, strict=True))

    def _pool(self) -> None:
        """Add up over processes what sources keep of the lot's gradients (`Raw`; the guarantee is none)."""
        if not self.agreement.group.alone:
            for part in self.clipping.objects():
                if isinstance(part, Source):
                    part.pool(self.agreement.group.totals_of_same)

    def _admit(self, attempt: Attempt, lot: Lot, sums: BoundedSums, stddev: Stddev) -> None:
        """Charge for the release. Where it repeats one that an interrupted run made, bit for bit, that was charged."""
        if lot.charged:
            return
        try:
            attempt.admit(lot.number, sums, stddev, self.event, self._charge)
        except BaseException:
            self._drop(lot, State.FAILED)
            raise
        lot.charged, lot.state = True, State.CHARGED

    def charge(self, lot: Lot) -> None:
        """Charge for the lot's release, once. Raises if the budget does not allow it; the lot is then dropped."""
        if lot.charged:
            return
        try:
            noise = partial(self.clipping.stddev, self.noise_multiplier)
            self.agreement.charge(lot.number, partial(self._charge, self.event), lot.sums, noise)
        except BaseException:
            self._drop(lot, State.FAILED)
            raise
        lot.charged = True
        if lot.state is State.FILLED:
            lot.state = State.CHARGED

    def noised(
        self, kind: str, lot: int, sums: BoundedSums, stddev: Stddev, multiplier: float | None = None
    ) -> NoisedSums:
        """`add_noise`, shown to the observer if there is one (the guarantee of such a run is none)."""
        if self.observer is None:
            return add_noise(sums, stddev, self._randomness)
        multiplier = self.noise_multiplier if multiplier is None else multiplier
        seen = Unnoised(kind, lot, sums, stddev, multiplier, self.event, self.expected_lot)
        given = self.observer.noising(seen)
        noisy = add_noise(sums, stddev, self._randomness) if given is None else given
        self.observer.noised(seen, noisy)
        return noisy

    # ---- the same for a lot whose work is replayed (`adadp.mechanism.replay`) ----------------------------------------

    def replayed(self, microbatch: Microbatch) -> None:
        """Note that a lot's release was made by replaying the recorded work of an earlier one."""
        lot = microbatch.of
        if not lot.charged:
            raise TrainingLoopError(f"lot {lot.number} was replayed before it was charged")
        if self._ready_for is not lot:  # else it was counted when it began
            count_lot(self.clipping)
        self._drop(lot, State.RELEASED)

    def take_back(self, microbatch: Microbatch) -> None:
        """Forget the release of a lot in a recording that failed: nothing of it was computed. It stays charged."""
        self._drop(microbatch.of, State.OPENED)

    # ---- what sources of shapes may ask for (`ModelGradients`): no private data is involved --------------------------

    def gradients_of(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Gradients:
        """Per-example gradients of `loss(model(inputs))`, a sum over examples, at the current weights."""
        device = self._device()
        moved = torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
        own = [device] if device.type == "cuda" else []  # dropout inside must not move the user's generators
        count = next(len(leaf) for leaf in torch.utils._pytree.tree_leaves(moved) if isinstance(leaf, Tensor))
        while True:
            try:
                with self.capture.aside(count), torch.enable_grad(), torch.random.fork_rng(devices=own):
                    loss(_call(self.capture.module, moved)).backward()  # type: ignore[no-untyped-call]
                    forms = self.capture.take(count)
                break
            except UnruledError as error:  # no lot had two examples yet, so nothing was tried
                self.capture.send_through_func(error)
                say_through_func(self.capture.module, self.capture.notices[-1:], self.capture.chunk, stacklevel=2)
        return Gradients(forms, count, keep=torch.ones(count, dtype=torch.bool, device=device))


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
