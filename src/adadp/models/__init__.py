"""Models by name. None mixes examples (no batch normalisation), so per-example gradients exist for all."""

import warnings
from typing import Any

from adadp.extras import require
from adadp.models.paper import PaperCifarNet, PaperNet
from adadp.models.registry import MODELS, build, choose
from adadp.models.resnet import ResNet

__all__ = ["MODELS", "PaperCifarNet", "PaperNet", "ResNet", "build", "choose"]

#: Features from public data are trained beside the library, in `adadp_lab.pretraining`. These names end with 0.3.
_MOVED = ("Pretrained", "Recipe", "WideResNet", "load_features", "pretrain", "untrained", "weights_path")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = "adadp_lab.pretraining"
    message = f"{__name__}.{name} is now {new}.{name}; the old name ends with version 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(require(new, None, "pre-training"), name)
