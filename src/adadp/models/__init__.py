"""Models by name. None mixes examples (no batch normalisation), so per-example gradients exist for all."""

from adadp.models.paper import PaperCifarNet, PaperNet
from adadp.models.pretraining import Pretrained, Recipe, load_features, pretrain, weights_path
from adadp.models.registry import MODELS, build, choose
from adadp.models.resnet import ResNet

__all__ = [
    "MODELS",
    "PaperCifarNet",
    "PaperNet",
    "Pretrained",
    "Recipe",
    "ResNet",
    "build",
    "choose",
    "load_features",
    "pretrain",
    "weights_path",
]
