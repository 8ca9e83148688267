"""Models by name, for an input's shape and a number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from adadp.errors import ConfigurationError
from adadp.models import tanh_cnn
from adadp.models.paper import PaperCifarNet, PaperNet
from adadp.models.resnet import ResNet

Shape = tuple[int, ...]
MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {}


def model(name: str) -> Callable[[Callable[[Shape, int], nn.Module]], Callable[[Shape, int], nn.Module]]:
    """Register a function of (input_shape, classes) under a name."""

    def register(make: Callable[[Shape, int], nn.Module]) -> Callable[[Shape, int], nn.Module]:
        MODELS[name] = make
        return make

    return register


def build(name: str, input_shape: Shape, classes: int) -> nn.Module:
    """Return a new model that maps float inputs (n, *input_shape) to logits (n, classes); with 0 classes, to a number.

    `input_shape` is (features,) or (channels, height, width). "auto" picks one by the shape alone (`choose`).
    Weights are drawn by torch's generator; they do not depend on data.
    """
    shape = tuple(int(size) for size in input_shape)
    if len(shape) not in (1, 3) or min(shape, default=0) < 1:
        raise ConfigurationError(f"input_shape must be (features,) or (channels, height, width), not {input_shape!r}")
    if classes < 0 or classes == 1:
        raise ConfigurationError(f"classes must be 2 or more, or 0 to predict a number, not {classes!r}")
    chosen = choose(shape) if name == "auto" else name
    if chosen not in MODELS:
        raise ConfigurationError(f"no model is called {name!r}; there are auto, {', '.join(sorted(MODELS))}")
    return MODELS[chosen](shape, classes or 1)


def choose(input_shape: Shape) -> str:
    """Name of the model that "auto" means: a tanh CNN for images it fits, else an MLP."""
    return "tanh-cnn" if len(input_shape) == 3 and min(input_shape[1:]) >= 16 else "mlp"


@model("linear")
def _linear(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@model("mlp")
def _mlp(shape: Shape, classes: int) -> nn.Module:
    # One hidden layer of tanh: bounded activations suit clipping, and few weights suit the noise.
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.Tanh(), nn.Linear(128, classes))


@model("tanh-cnn")
def _tanh_cnn(shape: Shape, classes: int) -> nn.Module:
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise ConfigurationError(f"tanh-cnn takes images of 16x16 or more, not inputs of {shape}; use mlp or linear")
    if shape[0] == 1:
        return tanh_cnn.grey(shape[1], shape[2], classes)
    return tanh_cnn.colour(shape[0], shape[1], shape[2], classes)


@model("resnet")
def _resnet(shape: Shape, classes: int) -> nn.Module:
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise ConfigurationError(f"resnet takes images of 8x8 or more, not inputs of {shape}; use mlp or linear")
    return ResNet(shape[0], classes)


@model("paper")
def _paper(shape: Shape, classes: int) -> nn.Module:
    if shape == (3, 32, 32):
        return PaperCifarNet(classes)
    if len(shape) == 1:
        return PaperNet(shape[0], classes)
    raise ConfigurationError(
        f"the paper's nets take features of DP-PCA, (60,), or images of CIFAR, (3, 32, 32), not {shape}: pass the "
        "images through adadp.preprocessing.DPPCA first (--pca-noise-multiplier)"
    )
