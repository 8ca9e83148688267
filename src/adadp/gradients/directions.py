"""Gradients h R where R treats all directions alike but for a few: only what lies along those is made of each example.

h R = rest h + (h U) diag(top - rest) U^T. The first part is measured and summed as h is, which may be in fewer bits.
The second is small, made for each example in all bits, and summed as it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.arithmetic import exact_arithmetic
from adadp.gradients.factors import Factor, LowRank
from adadp.gradients.per_example import Dense, PerExample, between, stored_or_recomputed


class AlongDirections(PerExample):
    """`form`'s gradients times `right`.

    `make` gives h U for each example, [n, rows, k], and bounds [n] on how far that is from what it is of the gradients
    that `form` adds to a sum.
    """

    def __init__(self, form: PerExample, right: LowRank, make: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.form, self.right, self._make = form, right, make
        self.count, self.shape = form.count, form.shape

    @cached_property
    def _along(self) -> tuple[Dense, Tensor]:
        with exact_arithmetic():
            along, wrong = self._make()
        return Dense(along), wrong

    @cached_property
    def _squared_norms(self) -> Tensor:
        along, wrong = self._along
        rest, top = self.right.rest.double(), self.right.top.double()
        lengths = along.gradients.double().square().sum(1)  # of h U, in each direction; [n, k]
        # |h R|^2 = rest^2 |h|^2 + 2 rest <h U, h U D> + |h U D U^T|^2 for D = top - rest. Where h U stands for what was
        # made, which is off by `wrong`, and U^T U is not quite the identity:
        turned = lengths @ (top - rest).square()
        squared = rest.square() * self.form.squared_norms() + lengths @ (top.square() - rest.square())
        squared += 2 * rest * wrong * turned.sqrt() + self.right.skew * turned
        squared = squared.clamp_min(0) * (1 + 2.0**-20)  # what is summed in float64 is rounded at the end
        return torch.where(turned.isfinite() & squared.isfinite(), squared, math.inf)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total = self.form.weighted_sum(weights, keep)
        along = self._along[0].weighted_sum(weights, keep).double()
        rest, basis = self.right.rest.double(), self.right.basis.double()
        turned = torch.addmm(total.double().view(self.matrix) * rest, along * (self.right.top.double() - rest), basis.T)
        return turned.to(total.dtype).view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return between(None, self.form.dense(examples), self.right, self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        factor = scale.to(self._along[0].gradients.dtype)
        return stored_or_recomputed(lambda examples: self.dense(examples) * factor, self.count, self.shape)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return stored_or_recomputed(
            lambda examples: between(left, self.dense(examples), right, self.shape), self.count, self.shape
        )
