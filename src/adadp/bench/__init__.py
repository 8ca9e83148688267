"""What private steps cost over plain ones: `adadp bench`."""

from adadp.bench.compare import Comparison, compare
from adadp.bench.scaling import scale

__all__ = ["Comparison", "compare", "scale"]
