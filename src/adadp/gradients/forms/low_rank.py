"""Gradients h R, or L h, for a low-rank factor R = rest I + U D U^T with D = diag(top - rest).

h R = rest h + (h U) D U^T. The first part is measured and summed as h is, which may be sparse or of lower precision. Of
the second, only h U is computed: it is small, in full precision, and summed as it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.forms.dense import Dense, Unstored, between
from adadp.gradients.forms.factors import IDENTITY, LowRank, last_bit
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.rounding import exact_arithmetic


class TimesLowRank(Unstored):
    """`form`'s gradients h times a low-rank factor, on their right or on their left.

    Args:
        form: h.
        factor: R, with k directions U.
        make: returns h U for each example, [n, rows, k] (U^T h on the left, [n, k, columns]), and bounds [n] on its
            distance from the same product of the gradients that `form` adds to a sum.
        on_left: multiply on the left.
    """

    def __init__(
        self, form: PerExample, factor: LowRank, make: Callable[[], tuple[Tensor, Tensor]], *, on_left: bool = False
    ) -> None:
        super().__init__(form.count, form.shape, form.planned)
        self.form, self.factor, self._make, self._on_left = form, factor, make, on_left

    @cached_property
    def _along(self) -> tuple[Dense, Tensor]:
        with exact_arithmetic():
            along, wrong = self._make()
        return Dense(along), wrong

    @cached_property
    def _squared_norms(self) -> Tensor:
        along, wrong = self._along
        rest, top = self.factor.rest.double(), self.factor.top.double()
        lengths = along.gradients.double().square().sum(2 if self._on_left else 1)  # of h U, by direction; [n, k]
        # |h R|^2 = rest^2 |h|^2 + 2 rest <h U, h U D> + |h U D U^T|^2 for D = top - rest. Where h U stands for what was
        # made, which is off by `wrong`, and U^T U is not quite the identity:
        turned = lengths @ (top - rest).square()
        squared = rest.square() * self.form.squared_norms() + lengths @ (top.square() - rest.square())
        squared += 2 * rest * wrong * turned.sqrt() + self.factor.skew * turned
        squared = squared.clamp_min(0) * (1 + 16 * last_bit(along.gradients))  # what is summed is rounded at the end
        floor = self.form.floor_times(self.factor.growth)
        squared = squared if floor is None else torch.maximum(squared, floor.square())
        return torch.where(turned.isfinite() & squared.isfinite(), squared, math.inf)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total = self.form.weighted_sum(weights, keep)
        along = self._along[0].weighted_sum(weights, keep).double()
        rest, basis = self.factor.rest.double(), self.factor.basis.double()
        more, same = self.factor.top.double() - rest, total.double().view(self.matrix) * rest
        if self._on_left:
            turned = torch.addmm(same, basis, more.unsqueeze(1) * along)
        else:
            turned = torch.addmm(same, along * more, basis.T)
        return turned.to(total.dtype).view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        left, right = (self.factor, IDENTITY) if self._on_left else (None, self.factor)
        return between(left, self.form.dense(examples), right, self.shape)
