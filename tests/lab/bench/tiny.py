"""Sizes at which everything is measured in a moment."""

from __future__ import annotations

from adadp_lab.bench.cases import Sizes
from adadp_lab.bench.scaling import Sweep

SIZES: dict[str, Sizes] = {
    "mlp": {"lot": 8, "width": 16, "depth": 1},
    "alexnet": {"lot": 2, "channels": 4, "size": 8},
    "wrn": {"lot": 2, "widen": 1, "size": 8},
    "transformer": {"lot": 2, "width": 8, "depth": 1, "length": 4},
}
SWEEPS = (
    Sweep("mlp", "lot", (64, 128, 256), {"width": 16}),
    Sweep("transformer", "length", (2, 4, 8), {"lot": 2, "width": 8, "depth": 1}),
)
