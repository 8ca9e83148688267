"""Models by name. None mixes examples (no batch normalisation), so per-example gradients exist for all.

`WideResNet`, which has no name, does: it is trained on public data alone, and used with its statistics frozen.
"""

from adadp.models.paper import PaperCifarNet, PaperNet
from adadp.models.pretraining import Pretrained, Recipe, load_features, pretrain, untrained, weights_path
from adadp.models.registry import MODELS, build, choose
from adadp.models.resnet import ResNet
from adadp.models.wide import WideResNet

__all__ = [
    "MODELS",
    "PaperCifarNet",
    "PaperNet",
    "Pretrained",
    "Recipe",
    "ResNet",
    "WideResNet",
    "build",
    "choose",
    "load_features",
    "pretrain",
    "untrained",
    "weights_path",
]
