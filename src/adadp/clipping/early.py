"""Clamping each layer's gradients while the backward pass runs: an optimisation of `Local`, all of it in this file.

A clamp takes one coordinate at a time, so a layer's clamped sum need not wait for the other layers. What its gradients
were made of is freed at once, and only sums are kept. For examples whose gradients are finite the
sums are those that clamping after the backward pass gives. An example that is not finite in a layer adds nothing there
and in the layers that come later; in the layers before it has already added at most its bound, which the sensitivity
covers.

Two hooks lead here. The step sets `capture.before_pass` to `before_pass`, which runs before the model does. Where the
clipping allows it, that sets `capture.bound_early`, which the capture calls with each layer's gradients as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, TypeGuard

from torch import Tensor

from adadp.clipping.base import Clipping
from adadp.clipping.local import Local
from adadp.errors import TrainingLoopError
from adadp.gradients import Capture
from adadp.gradients.capture.tap import backward_pass
from adadp.gradients.collection import is_small
from adadp.gradients.forms.per_example import PerExample
from adadp.sampling.lot import Microbatch
from adadp.shapes.raw import Raw
from adadp.shapes.source import Source


class ClampingStep(Protocol):
    """What is needed of `adadp.mechanism.step.PrivateStep`."""

    capture: Capture
    clipping: Clipping

    def ready(self, microbatch: Microbatch) -> Tensor | None:
        """Begin the microbatch's lot if that can be done now, and return which of its rows count, [count] of bool.

        None where the lot cannot be begun, or the step needs the gradients themselves.
        """

    def scale(self, microbatch: Microbatch) -> float:
        """Factor from what the backward pass brings to one example's gradient."""


def before_pass(step: ClampingStep) -> None:
    """Before the model runs on a microbatch: have its gradients clamped as they come, where that is possible."""
    microbatch, clipping = step.capture.tag, step.clipping
    # Rows of one contribution are added up before any is clamped, so their gradients have to wait.
    if isinstance(microbatch, Microbatch) and microbatch.segments is None and clamps_early(clipping):
        keep = step.ready(microbatch)
        if keep is not None:
            step.capture.bound_early = EarlyClamp(step, microbatch, keep)


def clamps_early(clipping: Clipping) -> TypeGuard[Local]:
    """Whether nothing but clamped sums, and sums of squares for `Raw`, is asked of a lot's gradients.

    A subclass of `Local`, or a source with a `see` or `share` of its own, may ask for more: it gets the gradients
    themselves, after the backward pass.
    """
    if type(clipping) is not Local or not clipping.local:
        return False
    source = type(clipping.source)
    return source.share is Source.share and source.see in (Source.see, Raw.see)


class EarlyClamp:
    """Clamps the gradients of one microbatch, a parameter at a time, in the order in which a backward pass brings them.

    Once an example is not finite in a layer, it adds nothing in the layers that come later in the same pass. Passes are
    kept apart by their number: one whose gradients were taken for another purpose has no effect on the others.
    """

    def __init__(self, step: ClampingStep, microbatch: Microbatch, keep: Tensor) -> None:
        self._step, self._microbatch, self._keep = step, microbatch, keep
        self._finite: dict[int, Tensor] = {}

    def __call__(self, name: str, form: PerExample) -> PerExample:
        """Return the clamped sum of `form`, or `form` itself where it is cheaper to wait."""
        clipping = self._step.clipping
        if not clamps_early(clipping) or name not in clipping.bounds or is_small(form):
            return form
        number, scale = backward_pass(), self._step.scale(self._microbatch)
        keep = self._finite.get(number, self._keep)
        moments = clipping.source.looks or type(clipping.source).see is Raw.see
        clamped = Clamped(form, clipping.bounds[name], scale, keep, moments)
        self._finite[number] = clamped.finite()
        return clamped


class Clamped(PerExample):
    """The clamped sum of `form` over the kept examples that are finite in it; no example's own gradient is left.

    With `moments`, also the sum of squares. Everything else that a form can be asked for raises TrainingLoopError.

    An example that turns out not to be finite in a layer that the backward pass reaches later has added to this sum
    what the bound allows, and adds nothing from that layer on.
    """

    def __init__(self, form: PerExample, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> None:
        super().__init__(form.count, form.shape, form.planned)
        self._bound, self._version, self._scale = bound, bound._version, scale
        self._kept = keep & form.finite()
        self._sum = form.clamped_sum(bound, scale, self._kept, moments)
        self._squares = form.square_sum(self._kept) if moments else None

    def finite(self) -> Tensor:
        return self._kept

    def clamped_sum(self, bound: Tensor, scale: float, keep: Tensor, moments: bool = False) -> Tensor:
        if bound is not self._bound or bound._version != self._version or scale != self._scale:
            raise TrainingLoopError(
                "the bounds were changed after the backward pass had clamped gradients with them: the noise would be "
                "made for other bounds. Change a clipping between lots."
            )
        return self._sum

    def square_sum(self, keep: Tensor) -> Tensor:
        return self._gone() if self._squares is None else self._squares

    def _gone(self, *arguments: Any, **named: Any) -> NoReturn:
        raise TrainingLoopError("gradients that were clamped and added up in the backward pass are a sum, and no more")

    squared_norms = weighted_sum = dense = scaled = sandwiched = _gone

    def joined(self, others: Sequence[PerExample]) -> PerExample:
        raise TrainingLoopError(
            "a second gradient came to a parameter whose first one had been clamped and added up in the backward pass: "
            "an example could then add twice its bound. Add up a batch's losses and call backward() once."
        )
