"""One step: from a lot's gradients to a private one.

Everything above the line in `release` touches people's data and is gone when the step ends. Everything below it is
post-processing of what was released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from adadp.accounting.events import Event
from adadp.clipping import Clipping, Release
from adadp.errors import TrainingLoopError
from adadp.gradients import Capture, Gradients
from adadp.gradients.capture.tap import backward_pass
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.rounding import exact_arithmetic, refuse_unbounded_precision
from adadp.randomness import Randomness
from adadp.sampling.lot import Lot, Microbatch, State


@dataclass(frozen=True)
class Unnoised:
    """A sum just before its noise, for observers: private data.

    `kind` is "gradient", or what else an algorithm releases on the lot ("objectives", "redraw").
    """

    kind: str
    lot: int
    sums: Release
    stddev: Mapping[str, float | Tensor]
    noise_multiplier: float
    event: Event
    expected_lot: float


class Observer(Protocol):
    """Sees what a step releases, before and after its noise (`PrivateOptimizer.observe`): the guarantee is none."""

    def noising(self, release: Unnoised) -> Release | None:
        """Called before the noise is drawn. What is returned is released instead, as it is."""

    def noised(self, release: Unnoised, noisy: Release) -> None:
        """Called with what is released, before the clipping turns it into a gradient."""

    def stepped(self, lot: int, gradient: Release) -> None:
        """Called with the private gradient that the optimizer gets."""


class PrivateStep:
    """Bounds, sums, noises and charges. Made by the engine; the private optimizer drives it.

    `charge` is called with the step's event before anything of it is released, and may refuse by raising.
    """

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
        count_nonfinite: bool = False,
    ) -> None:
        self.capture, self.clipping = capture, clipping
        capture.before_pass = self._bound_early
        self.noise_multiplier, self.expected_lot = noise_multiplier, expected_lot
        self.event, self._charge, self._randomness = event, charge, randomness
        self.mean_loss, self.loss_scale = mean_loss, loss_scale
        self._count_nonfinite = count_nonfinite
        self.nonfinite: Tensor | None = None
        self.observer: Observer | None = None
        # How many calls of layers were seen in backward passes from each example's own loss, for this microbatch: all
        # of them, or none. None where no such pass was made.
        self.rows: int | None = None
        self._parameters = dict(capture.module.named_parameters())
        self._begun: Lot | None = None  # the lot that the clipping is ready for
        self.begun = 0  # how many lots were worked on, replayed ones left out

    # ---- a lot, microbatch by microbatch ------------------------------------------------------------------------

    def open(self, microbatch: Microbatch) -> None:
        """The loop holds this microbatch from now on."""
        self.rows = None
        if microbatch.index == 0:
            self.capture.discard()  # what the loop differentiated for a lot that it then left
        self.capture.work_on(microbatch, microbatch.count, microbatch.planned)

    def forget(self) -> None:
        """Drop what backward passes brought for this microbatch."""
        self.rows = None
        self.capture.discard()

    def _bound_early(self) -> None:
        """Before the model runs on a microbatch: have its gradients bounded as they come, if they can be."""
        microbatch = self.capture.tag
        if not isinstance(microbatch, Microbatch) or self._count_nonfinite or not self.clipping.early():
            return
        lot = microbatch.of
        if lot.added == 0 and lot.state in (State.OPENED, State.FAILED) and not self._is_begun(lot):
            with torch.no_grad(), exact_arithmetic():  # as in a step, however the model is run
                self.begin(microbatch)
        if lot is self._begun:
            keep = microbatch.keep(self._device())
            self.capture.bound_early = _Early(self, microbatch, keep)

    def _active(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _is_begun(self, lot: Lot) -> bool:
        """Whether the clipping is ready for this lot, with the parameters that are trained now."""
        return lot is self._begun and self._active().keys() == self.clipping.parameters.keys()

    def add(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        """Add the bounded contributions of the microbatch whose backward pass has just ended.

        `keep`, [count] of bool, leaves examples out. Whether example i is kept must follow from it and the weights.
        """
        self.refuse_misuse(microbatch)
        lot = microbatch.of
        try:
            bounded = self._bounded(microbatch, keep)
        except BaseException:
            # A lot that lost a part because of what was in it must not be released, nor may the part reach another lot.
            self._drop(lot, State.FAILED)
            self.forget()
            raise
        self.rows = None
        lot.state = State.FILLED if microbatch.last else State.OPENED
        lot.added += 1
        for name, value in bounded.items():
            lot.sums[name] = lot.sums[name] + value if name in lot.sums else value

    def refuse_misuse(self, microbatch: Microbatch) -> None:
        """Raise where a microbatch cannot be worked on now."""
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

    def _bounded(self, microbatch: Microbatch, keep: Tensor | None) -> Release:
        lot = microbatch.of
        if lot is not self._begun or lot.state is State.FAILED:
            self._begin(lot)
        if microbatch.index != lot.added:
            raise TrainingLoopError(
                f"microbatch {microbatch.index} of lot {lot.number} came where {lot.added} was due: "
                "optimizer.step() must be called exactly once for each batch of the loader (it does nothing but add up "
                "until the lot is complete)"
            )
        if microbatch.index == 0:
            lot.settings = [] if microbatch.last else self.clipping.settings()
        elif self.clipping.settings() != lot.settings:
            raise TrainingLoopError(
                "the clipping was changed within a lot: what was bounded before would get the noise of what it is now. "
                "Change it between lots, where loader.current.last is True."
            )
        return self.clipping.bound(self._gradients(microbatch, keep))

    def begin(self, microbatch: Microbatch) -> None:
        """Get ready for a lot whose work will be replayed: shapes that are due are refreshed."""
        try:
            self._begin(microbatch.of)
        except BaseException:
            self._drop(microbatch.of, State.OPENED)
            raise

    def _drop(self, lot: Lot, state: State) -> None:
        """Let go of all that was added up for the lot."""
        lot.drop(state)
        self._begun = None

    def _begin(self, lot: Lot) -> None:
        self._drop(lot, State.OPENED)
        self._begun = lot
        self.begun += 1
        self.clipping.begin(self._active(), self)

    def _gradients(self, microbatch: Microbatch, keep: Tensor | None) -> Gradients:
        count = microbatch.count
        forms = self.capture.take(count)
        refuse_unbounded_precision(self._device())
        counts = microbatch.keep(self._device())
        if keep is not None:
            counts = counts & keep.to(counts.device)
        gradients = Gradients(forms, count, scale=self.scale(microbatch), keep=counts)
        if self._count_nonfinite:
            lost = (~gradients.norms().isfinite() & counts).sum()
            lot = microbatch.of
            lot.nonfinite = lost if lot.nonfinite is None else lot.nonfinite + lost
        return gradients

    def scale(self, microbatch: Microbatch) -> float:
        """Factor from what the backward pass brought to one example's gradient: the number of rows for a mean loss."""
        return (microbatch.count if self.mean_loss and self.rows is None else 1.0) / self.loss_scale

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    # ---- its release --------------------------------------------------------------------------------------------

    def release(self, lot: Lot) -> Release:
        """The lot's private gradient, a mean over the expected lot, by parameter name. Charged before it is made."""
        if lot.state is not State.FILLED and lot.state is not State.CHARGED:
            raise TrainingLoopError(f"lot {lot.number} cannot be released: {lot.state.value}")
        self.charge(lot)
        if lot.nonfinite is not None:
            self.nonfinite = lot.nonfinite if self.nonfinite is None else self.nonfinite + lot.nonfinite
        stddev = self.clipping.stddev(self.noise_multiplier)
        sums = self.clipping.complete(lot.sums)
        noisy = self.noised("gradient", lot.number, sums, stddev)
        self._drop(lot, State.RELEASED)
        # ------------------------------------------------------------------------------ the line: noised from here on
        released = self.clipping.release(noisy, stddev)
        means = torch._foreach_div(list(released.values()), self.expected_lot) if released else ()
        return dict(zip(released, means, strict=True))

    def noised(
        self, kind: str, lot: int, sums: Release, stddev: Mapping[str, float | Tensor], multiplier: float | None = None
    ) -> Release:
        """The sums with their noise: the only place where noise is added to what a lot releases."""
        if self.observer is None:
            return self._with_noise(sums, stddev)
        multiplier = self.noise_multiplier if multiplier is None else multiplier
        seen = Unnoised(kind, lot, sums, stddev, multiplier, self.event, self.expected_lot)
        given = self.observer.noising(seen)
        noisy = self._with_noise(sums, stddev) if given is None else given
        self.observer.noised(seen, noisy)
        return noisy

    def _with_noise(self, sums: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        """In the better of their precisions, one draw for all of one kind of number."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in sums.items():
            kinds.setdefault((value.dtype, value.device), []).append(name)
        noisy: Release = {}
        for names in kinds.values():
            values = [sums[name] for name in names]
            drawn = self._randomness.normal(values[0].new_empty(sum(value.numel() for value in values)))
            parts = torch.split(drawn, [value.numel() for value in values])
            noise = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
            scales = [stddev[name] for name in names]
            if all(isinstance(scale, Tensor) for scale in scales):
                torch._foreach_mul_(noise, cast(list[Tensor], scales))
            elif any(isinstance(scale, Tensor) for scale in scales):
                for part, scale in zip(noise, scales, strict=True):
                    part *= scale
            elif len(set(scales)) == 1:
                drawn *= scales[0]
            else:
                torch._foreach_mul_(noise, cast(list[float], scales))
            torch._foreach_add_(noise, values)
            noisy |= zip(names, noise, strict=True)
        return {name: noisy[name] for name in sums}

    def charge(self, lot: Lot) -> None:
        """Write down what the lot's release costs, once. Raises where the budget does not allow it."""
        if lot.charged:
            return
        try:
            self._charge(self.event)
        except BaseException:
            self._drop(lot, State.FAILED)
            raise
        lot.charged = True
        if lot.state is State.FILLED:
            lot.state = State.CHARGED

    def replayed(self, microbatch: Microbatch) -> None:
        """Note that a lot's release was made by replaying the work of an earlier one (`adadp.mechanism.replay`)."""
        lot = microbatch.of
        if not lot.charged:
            raise TrainingLoopError(f"lot {lot.number} was replayed before it was charged")
        if self._begun is not lot:  # else it was counted when it began
            self.clipping.count_lot()
        self._drop(lot, State.RELEASED)

    def take_back(self, microbatch: Microbatch) -> None:
        """Forget the release of a lot in a recording that failed: nothing of it was computed. It stays charged."""
        self._drop(microbatch.of, State.OPENED)

    # ---- what sources of shapes may ask for (ModelGradients): no private data is involved -------------------------

    def gradients_of(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Gradients:
        """Per-example gradients of `loss(model(inputs))`, a sum over examples, at the current weights."""
        device = self._device()
        moved = torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
        own = [device] if device.type == "cuda" else []  # dropout inside must not move the user's generators
        with self.capture.aside(), torch.enable_grad(), torch.random.fork_rng(devices=own):
            loss(_call(self.capture.module, moved)).backward()  # type: ignore[no-untyped-call]
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(moved) if isinstance(leaf, Tensor)]
            count = len(leaves[0])
            forms = self.capture.take(count)
        return Gradients(forms, count, keep=torch.ones(count, dtype=torch.bool, device=device))


class _Early:
    """Bounds the gradients of one microbatch, a parameter at a time, in the order in which a backward pass brings them.

    From the first layer on where an example is not finite, it adds nothing. Passes are kept apart: one whose gradients
    were taken for another purpose leaves nothing behind.
    """

    def __init__(self, step: PrivateStep, microbatch: Microbatch, keep: Tensor) -> None:
        self._step, self._microbatch, self._keep = step, microbatch, keep
        self._finite: dict[int, Tensor] = {}

    def __call__(self, name: str, form: PerExample) -> PerExample:
        number = backward_pass()
        keep = self._finite.get(number, self._keep)
        scale = self._step.scale(self._microbatch)
        bounded = self._step.clipping.bound_early(name, form, scale, keep)
        if bounded is not form:
            self._finite[number] = bounded.finite()
        return bounded


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
