"""How large gradients are in each direction of a parameter (shapes), and where that knowledge comes from (sources).

A shape is a subclass of `Shape`, a source one of `Source`, in a file of its own here, exported below. The
soundness tests find them, and make new ones without arguments.
"""

from adadp.shapes.diagonal import Diagonal
from adadp.shapes.known import Known
from adadp.shapes.kronecker import Kronecker
from adadp.shapes.paid import Paid
from adadp.shapes.raw import Raw
from adadp.shapes.released import Released
from adadp.shapes.shape import Shape
from adadp.shapes.source import Source
from adadp.shapes.synthetic import InputMaker, Probe, Public

__all__ = [
    "Diagonal",
    "InputMaker",
    "Known",
    "Kronecker",
    "Paid",
    "Probe",
    "Public",
    "Raw",
    "Released",
    "Shape",
    "Source",
]
