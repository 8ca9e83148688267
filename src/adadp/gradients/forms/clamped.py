"""Gradients that were clamped and added up as the backward pass brought them: their sum is left, and nobody's own.

A clamp takes a coordinate at a time, so it need not wait for the other layers, and what the gradients were made of is
let go at once. All that can be asked of them afterwards is what was made then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from adadp.errors import TrainingLoopError
from adadp.gradients.forms.factors import Factor
from adadp.gradients.forms.per_example import PerExample


class Clamped(PerExample):
    """The clamped sum of `form` over the kept examples that are finite in it, and their squares' with `moments`.

    An example that turns out later not to be finite, in a layer that the backward pass reaches after this one, has
    added to this sum what the bound allows, and adds nothing from that layer on.
    """

    def __init__(self, form: PerExample, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> None:
        self.shape, self.count = form.shape, form.count
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

    def _gone(self) -> NoReturn:
        raise TrainingLoopError("gradients that were clamped and added up in the backward pass are a sum, and no more")

    def squared_norms(self) -> Tensor:
        self._gone()

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        self._gone()

    def dense(self, examples: slice) -> Tensor:
        self._gone()

    def scaled(self, scale: Tensor) -> PerExample:
        self._gone()

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        self._gone()

    def joined(self, others: Sequence[PerExample]) -> PerExample:
        raise TrainingLoopError(
            "a second gradient came to a parameter whose first one had been clamped and added up in the backward pass: "
            "an example could then add twice its bound. Add up a batch's losses and call backward() once."
        )
