"""What private steps cost over plain ones: `adadp bench`."""

from adadp_lab.bench.compare import Comparison, compare
from adadp_lab.bench.scaling import scale

__all__ = ["Comparison", "compare", "scale"]
