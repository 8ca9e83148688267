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
_TEXT: Sizes = {"lot": 3, "width": 16, "depth": 1, "length": 6, "vocabulary": 20}
REAL: dict[str, Sizes] = {
    "gpt2": _TEXT, "bert": _TEXT, "llama": _TEXT, "llama-lora": {**_TEXT, "rank": 2},
    "vit": {"lot": 2, "size": 32}, "convnext": {"lot": 2, "size": 32}, "resnet50": {"lot": 2, "size": 32},
}  # fmt: skip
SWEEPS = (
    Sweep("mlp", "lot", (64, 128, 256), {"width": 16}),
    Sweep("transformer", "length", (2, 4, 8), {"lot": 2, "width": 8, "depth": 1}),
)
