"""AdaN: adaptive noise alone, the step is SGD's."""

from __future__ import annotations

from adadp.algorithms.algorithm import algorithm
from adadp.algorithms.shaped import ShapedNoise


@algorithm("adan")
class AdaN(ShapedNoise):
    """Sound: exponents (a, -a), so the release is carried back and only the noise has a shape.

    "example" and "lot" are the paper's clipping and noise with E' from raw gradients, and plain SGD.
    """
