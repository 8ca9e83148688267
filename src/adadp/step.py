"""One step: from a lot's gradients to a private one.

Everything above the line in `release` touches people's data and is gone when the step ends. Everything below it is
post-processing of what was released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adadp.accounting.events import Event
from adadp.clipping import Clipping, Release
from adadp.errors import TrainingLoopError
from adadp.gradients import Capture, Gradients
from adadp.gradients.arithmetic import exact_arithmetic, refuse_unbounded_precision
from adadp.gradients.per_example import PerExample, planned_for
from adadp.gradients.tap import backward_pass
from adadp.noise import Randomness
from adadp.sampling import Microbatch


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
        self._mean_loss, self.loss_scale = mean_loss, loss_scale
        self._count_nonfinite = count_nonfinite
        self.nonfinite: Tensor | None = None
        self._parameters = dict(capture.module.named_parameters())
        self._sums: Release = {}
        self._lot: int | None = None
        self._charged: int | None = None
        self._released: int | None = None
        self._failed: int | None = None
        self._next = 0
        self._settings: list[object] = []  # the clipping's, for a lot that comes in several parts
        self.begun = 0  # how many lots were worked on, replayed ones left out
        self._lost: Tensor | None = None  # of this lot, not shown before it is charged

    # ---- a lot, microbatch by microbatch ------------------------------------------------------------------------

    def _bound_early(self) -> None:
        """Before the model runs on a microbatch: have its gradients bounded as they come, if they can be."""
        microbatch = self.capture.tag
        if not isinstance(microbatch, Microbatch) or self._count_nonfinite or not self.clipping.early():
            return
        if self._next == 0 and microbatch.lot != self._released and not self._begun(microbatch.lot):
            with torch.no_grad(), exact_arithmetic():  # as in a step, however the model is run
                self.begin(microbatch)
        if microbatch.lot == self._lot:
            scale, keep = self._scale(microbatch), microbatch.keep(self._device())
            self.capture.bound_early = _Early(self.clipping, scale, keep, microbatch.planned)

    def _active(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _begun(self, lot: int) -> bool:
        """Whether the lot was begun, with the parameters that are trained now."""
        return lot == self._lot and self._active().keys() == self.clipping.parameters.keys()

    def add(self, microbatch: Microbatch) -> None:
        """Add the bounded contributions of the microbatch whose backward pass has just ended."""
        self.refuse_misuse(microbatch)
        try:
            bounded = self._bounded(microbatch)
        except BaseException:
            # A lot that lost a part because of what was in it must not be released, nor may the part reach another lot.
            self._drop()
            self._failed = microbatch.lot
            self.capture.discard()
            raise
        self._next += 1
        for name, value in bounded.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def refuse_misuse(self, microbatch: Microbatch) -> None:
        """Raise where a microbatch cannot be worked on now."""
        if not self.capture.attached:
            raise TrainingLoopError(
                "the engine's hooks were taken off this module (engine.detach), so its gradients are those of all "
                "examples together, and not private. Use the ordinary optimizer, or make_private again."
            )
        if microbatch.lot == self._released:
            self.capture.discard()
            raise TrainingLoopError(
                f"lot {microbatch.lot} was released already: a second release of the same lot is not covered. Call "
                "optimizer.step() once for each batch of the loader."
            )
        if microbatch.lot == self._failed and not self.capture.recorded:
            raise TrainingLoopError(
                f"lot {microbatch.lot} could not be worked on, and its gradients are gone: it would be released "
                "without them. Run the model on the batch again, or take the next one."
            )

    def _bounded(self, microbatch: Microbatch) -> Release:
        if microbatch.lot != self._lot:
            self._begin(microbatch.lot)
        if microbatch.index != self._next:
            raise TrainingLoopError(
                f"microbatch {microbatch.index} of lot {microbatch.lot} came where {self._next} was due: "
                "optimizer.step() must be called exactly once for each batch of the loader (it does nothing but add up "
                "until the lot is complete)"
            )
        if microbatch.index == 0:
            self._settings = [] if microbatch.last else self.clipping.settings()
        elif self.clipping.settings() != self._settings:
            raise TrainingLoopError(
                "the clipping was changed within a lot: what was bounded before would get the noise of what it is now. "
                "Change it between lots, where loader.current.last is True."
            )
        with planned_for(microbatch.planned):
            return self.clipping.bound(self._gradients(microbatch))

    def begin(self, microbatch: Microbatch) -> None:
        """Get ready for a lot whose work will be replayed: shapes that are due are refreshed."""
        try:
            self._begin(microbatch.lot)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self._lot, self._next, self._sums, self._lost = None, 0, {}, None

    def _begin(self, lot: int) -> None:
        self._drop()
        self._lot = lot
        self.begun += 1
        self.clipping.begin(self._active(), self)

    def _gradients(self, microbatch: Microbatch) -> Gradients:
        count = microbatch.count
        forms = self.capture.take(count)
        refuse_unbounded_precision(self._device())
        keep = microbatch.keep(self._device())
        gradients = Gradients(forms, count, scale=self._scale(microbatch), keep=keep)
        if self._count_nonfinite:
            lost = (~gradients.norms().isfinite() & keep).sum()
            self._lost = lost if self._lost is None else self._lost + lost
        return gradients

    def _scale(self, microbatch: Microbatch) -> float:
        """An example's own gradient over what the loss's holds of it."""
        return (microbatch.count if self._mean_loss else 1.0) / self.loss_scale

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    # ---- its release --------------------------------------------------------------------------------------------

    def release(self) -> Release:
        """The lot's private gradient, a mean over the expected lot, by parameter name. Charged before it is made."""
        assert self._lot is not None
        self.charge(self._lot)
        if self._lost is not None:
            self.nonfinite = self._lost if self.nonfinite is None else self.nonfinite + self._lost
        stddev = self.clipping.stddev(self.noise_multiplier)
        sums = self.clipping.complete(self._sums)
        noisy = self._noised(sums, stddev)
        self._released = self._lot
        self._drop()
        # ------------------------------------------------------------------------------ the line: noised from here on
        released = self.clipping.release(noisy, stddev)
        means = torch._foreach_div(list(released.values()), self.expected_lot) if released else ()
        return dict(zip(released, means, strict=True))

    def _noised(self, sums: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        """The sums with their noise, in the better of their precisions: one draw for all of one kind of number."""
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

    def charge(self, lot: int) -> None:
        """Write down what the lot's release costs, once. Raises where the budget does not allow it."""
        if lot == self._charged:
            return
        try:
            self._charge(self.event)
        except BaseException:
            self._drop()
            raise
        self._charged = lot

    def replayed(self, microbatch: Microbatch) -> None:
        """Note that a lot's release was made by replaying the work of an earlier one (`adadp.graphs`)."""
        assert self._charged == microbatch.lot
        if self._lot != microbatch.lot:  # else it was counted when it began
            self.clipping.count_lot()
        self._released = microbatch.lot
        self._drop()

    def take_back(self, microbatch: Microbatch) -> None:
        """Forget the release of a lot in a recording that failed: nothing of it was computed. It stays charged."""
        self._released = None if self._released == microbatch.lot else self._released
        self._drop()

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

    def __init__(self, clipping: Clipping, scale: float, keep: Tensor, planned: int) -> None:
        self._clipping, self._scale, self._keep, self._planned = clipping, scale, keep, planned
        self._finite: dict[int, Tensor] = {}

    def __call__(self, name: str, form: PerExample) -> PerExample:
        number = backward_pass()
        keep = self._finite.get(number, self._keep)
        with planned_for(self._planned):  # here: a GPU's backward pass runs in a thread of its own
            bounded = self._clipping.bound_early(name, form, self._scale, keep)
        if bounded is not form:
            self._finite[number] = bounded.finite()
        return bounded


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
