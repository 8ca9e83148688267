"""Features learned from public data, for models that are then trained privately on top of them: `adadp pretrain`."""

from adadp_lab.pretraining.features import Pretrained, Recipe, load_features, pretrain, untrained, weights_path
from adadp_lab.pretraining.wide import WideResNet

__all__ = ["Pretrained", "Recipe", "WideResNet", "load_features", "pretrain", "untrained", "weights_path"]
