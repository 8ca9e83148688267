"""What every shape does: it keeps second moments of gradients, and multiplies gradients by their powers.

A shape S is used twice in a step: each example's gradient is multiplied by S^-before, bounded and noised there, and the
release is multiplied by S^-after. Its moments come from a *source* (`adadp.shapes.source`), which knows what they cost.
Until a shape has learnt the moments of a parameter, it does not change that parameter's gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.forms.per_example import PerExample

#: Second moments of one parameter, by names that the shape chooses.
Statistics = dict[str, Tensor]
#: Suffix of statistics that are vectors [k, d], in place of the sum of their outer products.
THIN = " vectors"


class Shape(ABC):
    """Second moments of each parameter's gradients, and two exponents. One object serves one training run.

    Args:
        before: exponent for gradients before they are bounded, S^-before.
        after: exponent for the release, S^-after.
        damping: added to the moments, which are scaled to mean 1; above 0.

    Guarantee:
        A shape has no privacy cost of its own: it is fixed before a lot is looked at. For statistics that are released
        with the lot (`low_statistics`), it states their sensitivity in `low_sensitivity`.

    """

    low_sensitivity: float  # largest L2 norm of `low_statistics` of one example whose gradient has norm 1

    def __init__(self, before: float, after: float, damping: float) -> None:
        if not (math.isfinite(before) and math.isfinite(after)):
            raise ConfigurationError(f"a shape's exponents must be finite, not ({before}, {after})")
        if not (math.isfinite(damping) and damping > 0):
            raise ConfigurationError(f"damping must be above 0, not {damping}: noise would be divided by zero")
        self.before, self.after, self.damping = before, after, damping

    @abstractmethod
    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """Sum the second moments that this shape is made of over the kept examples."""

    def thin_statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """Return `statistics`, or vectors [k, d] in place of sums of outer products where those are cheaper.

        Names of vectors end in THIN. Two such statistics are added by concatenation.
        """
        return self.statistics(form, keep)

    @abstractmethod
    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        """Sum statistics with few entries, which can be released with noise, of gradients multiplied by `weights` [n].

        Guarantee:
            Those of one example whose weighted gradient has norm at most 1 over all parameters have L2 norm at most
            `low_sensitivity` over all parameters.

        """

    @abstractmethod
    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        """Return zeros in the form of `low_statistics`."""

    @abstractmethod
    def moments_of(self, gradient: Tensor) -> Statistics:
        """Return the statistics of one gradient, such as a released one."""

    @abstractmethod
    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        """Return the expected statistics of noise of this deviation, multiplied by S^before."""

    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        """Use these second moments for the parameter from now on."""
        self.learn_all({name: statistics})

    @abstractmethod
    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Use these second moments from now on, for many parameters at once.

        Parameters are mostly small, and one call for each would leave a GPU waiting for Python. Powers that were used
        before are computed again, since the next lot needs them.
        """

    @abstractmethod
    def apply_before(self, name: str, form: PerExample) -> PerExample:
        """Multiply per-example gradients by S^-before."""

    @abstractmethod
    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        """Multiply one gradient by S^exponent."""

    def deviations(self, name: str, like: Tensor, exponent: float) -> float | Tensor:
        """Return the standard deviation of each coordinate of S^exponent Z, for Z of unit variance and `like`'s shape.

        It keeps nothing, so that asking changes no recorded step. Only descriptions of the noise need it.

        Raises:
            ConfigurationError: this shape does not say.

        """
        raise ConfigurationError(f"{type(self).__name__} does not say how its noise is spread: override deviations")
