"""Small convolutional nets with tanh (Papernot and others, "Tempered sigmoid activations", 2020).

Tanh keeps activations, and with them gradients, bounded, which suits clipping. The two shapes are those used
for MNIST (28x28, grey) and CIFAR-10 (32x32, colour) throughout the literature on private training.
"""

from __future__ import annotations

import torch
from torch import nn


def grey(height: int, width: int, classes: int) -> nn.Sequential:
    """For one channel: two strided convolutions (16 of 8x8, 32 of 4x4) and a hidden layer of 32."""
    features = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
    )
    width_out = _flat_size(features, (1, height, width))
    return nn.Sequential(*features, nn.Linear(width_out, 32), nn.Tanh(), nn.Linear(32, classes))


def colour(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """For colour: three blocks of two 3x3 convolutions (32, 64, 128) and pooling, a hidden layer of 128."""
    layers: list[nn.Module] = []
    for wide in (32, 64, 128):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = wide
    layers.append(nn.Flatten())
    first = layers[0]
    assert isinstance(first, nn.Conv2d)
    width_out = _flat_size(nn.Sequential(*layers), (first.in_channels, height, width))
    return nn.Sequential(*layers, nn.Linear(width_out, 128), nn.Tanh(), nn.Linear(128, classes))


def _flat_size(features: nn.Module, shape: tuple[int, int, int]) -> int:
    with torch.no_grad():
        return int(features(torch.zeros(1, *shape)).shape[1])
