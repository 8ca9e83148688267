"""Per-example gradients: how they are captured, and the forms in which they are handled."""

from adadp.gradients.capture.capture import Capture
from adadp.gradients.collection import Gradients

__all__ = ["Capture", "Gradients"]
