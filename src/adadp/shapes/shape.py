"""How large the gradient is in each direction of a parameter: its second moments, and their powers.

A shape is used twice in a step: each example's gradient is multiplied by S^-before, bounded and noised there, and the
release is multiplied by S^-after. Where its moments come from, and at what price, is the business of a *source*
(`adadp.shapes.source`). Until a shape has learnt a parameter, it leaves that parameter alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.forms.per_example import PerExample

Statistics = dict[str, Tensor]
THIN = " vectors"


class Shape(ABC):
    """Second moments per parameter with two exponents. One object serves one training run."""

    def __init__(self, before: float, after: float, damping: float) -> None:
        if not (math.isfinite(before) and math.isfinite(after)):
            raise ConfigurationError(f"a shape's exponents must be finite, not ({before}, {after})")
        if not (math.isfinite(damping) and damping > 0):
            raise ConfigurationError(f"damping must be above 0, not {damping}: noise would be divided by zero")
        self.before, self.after, self.damping = before, after, damping

    @abstractmethod
    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """Sums over the kept examples of the second moments that this shape is made of."""

    def thin_statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """The same, or what they are cheaply had from: vectors [k, d] in place of the sum of their outer products.

        Those have a name that ends in THIN, and are added by putting them side by side.
        """
        return self.statistics(form, keep)

    @abstractmethod
    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        """Statistics small enough to be noised, of gradients multiplied by `weights` [n].

        For one example of norm 1 over all parameters their L2 norm is at most `low_sensitivity`.
        """

    low_sensitivity: float

    @abstractmethod
    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        """Zeros of the shapes of `low_statistics`."""

    @abstractmethod
    def moments_of(self, gradient: Tensor) -> Statistics:
        """The statistics of one gradient, such as a released one."""

    @abstractmethod
    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        """The statistics that the noise alone has, on average, in a release carried back by `undo`."""

    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        """Take these second moments as the parameter's shape from now on."""
        self.learn_all({name: statistics})

    @abstractmethod
    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The same for many parameters at once: most are small, and a GPU would wait for Python at each of them.

        Those of their powers that were needed before are made anew: the next lot needs them.
        """

    @abstractmethod
    def apply_before(self, name: str, form: PerExample) -> PerExample:
        """Gradients multiplied by S^-before."""

    @abstractmethod
    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        """One gradient multiplied by S^exponent."""
