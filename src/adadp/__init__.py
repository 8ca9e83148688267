"""Differentially private training for PyTorch, with guarantees that are true.

    from adadp import PrivacyEngine

makes a model, an optimizer and a data loader private in one call; `engine.guarantee(delta)` says what may be said.
"""

from adadp.clipping import Automatic, Clipping, Ellipsoid, Flat, Grouped, Local, PerLayer
from adadp.engine import PrivacyEngine
from adadp.shape import Diagonal, Kronecker
from adadp.sources import Paid, Probe, Public, Raw, Released
from adadp.validation import fix

__all__ = [
    "Automatic",
    "Clipping",
    "Diagonal",
    "Ellipsoid",
    "Flat",
    "Grouped",
    "Kronecker",
    "Local",
    "Paid",
    "PerLayer",
    "PrivacyEngine",
    "Probe",
    "Public",
    "Raw",
    "Released",
    "fix",
]
