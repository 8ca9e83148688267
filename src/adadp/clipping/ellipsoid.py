"""An L2 ball after a change of basis: the noise follows the shape of the gradients."""

from __future__ import annotations

from adadp.clipping.base import Clipping, register
from adadp.clipping.shaped import Shaped
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.kronecker import Kronecker
from adadp.shapes.released import Released
from adadp.shapes.shape import Shape
from adadp.shapes.source import Source


class Ellipsoid(Shaped):
    """Clips and noises g' = S^-before g in an L2 ball; the release is multiplied by S^-after.

    The idea of AdaDP, with a proof: noise follows the shape S, and so does the step.

    Args:
        max_grad_norm: C, the radius of the ball in the coordinates of g'.
        shape: S with its two exponents; by default `Kronecker()`.
        source: where the shape's second moments come from.

    Guarantee:
        As for `Flat`, in the coordinates of g', which are also those of the noise. The change of basis is fixed before
        the lot is looked at, and the multiplication by S^-after is post-processing.

    """

    def __init__(self, max_grad_norm: float = 1.0, *, shape: Shape | None = None, source: Source) -> None:
        super().__init__(max_grad_norm, shape if shape is not None else Kronecker(), source)

    def _bounded(self, gradients: Gradients) -> BoundedSums:
        forms = {name: self.shape.apply_before(name, form) for name, form in gradients.forms.items()}
        inside = gradients.replaced(forms)
        return self._sums(inside, self.weights(inside))

    def _carried(self, noisy: NoisedSums) -> ReleasedGradient:
        return ReleasedGradient({k: self.shape.apply(k, value, -self.shape.after) for k, value in noisy.items()})

    def noise_of_release(self, noise_multiplier: float) -> Stddev:
        return self._noise(noise_multiplier, -self.shape.after)

    def noise_of_gradient(self, noise_multiplier: float) -> Stddev:
        return self._noise(noise_multiplier, self.shape.before)

    def _noise(self, noise_multiplier: float, exponent: float) -> Stddev:
        """Deviations of the noise of the ball, multiplied by S^exponent."""
        ball = super().noise_of_release(noise_multiplier)
        return {k: ball[k] * self.shape.deviations(k, value, exponent) for k, value in self.parameters.items()}


@register("ellipsoid")
def _from_releases(max_grad_norm: float) -> Clipping:
    return Ellipsoid(max_grad_norm, source=Released())
