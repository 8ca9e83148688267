"""Per-example gradients: how they are captured, and the forms in which they are handled."""

from adadp.gradients import attention, convolution, embedding, linear, normalization, recurrent  # noqa: F401 - importing them registers them
from adadp.gradients.capture import Capture
from adadp.gradients.collection import Gradients

__all__ = ["Capture", "Gradients"]
