"""The two nets of the AdaDP paper (INFOCOM 2020)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

# The paper does not say how wide CIFAR-10's two fully connected layers are. 384 and 192 are those of the
# TensorFlow tutorial whose convolutions, pooling and normalisation it describes.
HIDDEN = (384, 192)


class PaperNet(nn.Sequential):
    """MNIST: (n, features) of DP-PCA, 60 in the paper -> 1000 ReLU -> logits (n, classes)."""

    def __init__(self, features: int = 60, classes: int = 10) -> None:
        super().__init__(nn.Linear(features, 1000), nn.ReLU(), nn.Linear(1000, classes))


class PaperCifarNet(nn.Module):
    """CIFAR-10: two convolutions of 64 5x5 filters, two fully connected layers, softmax (in the loss).

    Each convolution is followed by ReLU, 3x3 max-pooling with stride 2 and local response normalisation, in
    this order in the first layer; in the second the normalisation comes before the pooling. Input (n, 3, 32,
    32) in [0, 1], output logits (n, classes).

    The convolutions are frozen: they get their weights from public data (`adadp pretrain`), and
    nothing private is released for them. `features` maps images to (n, 4096), which may be computed once and
    kept; `head` is trained.
    """

    def __init__(self, classes: int = 10, *, frozen: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResponseNorm(64),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.ReLU(),
            ResponseNorm(64),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(64 * 8 * 8, HIDDEN[0]),
            nn.ReLU(),
            nn.Linear(*HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN[1], classes),
        )
        self.features.requires_grad_(not frozen)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (n, classes)."""
        return cast(Tensor, self.head(self.features(images)))


class ResponseNorm(nn.LocalResponseNorm):
    """Local response normalisation over 9 neighbouring channels: x / (1 + 0.001/9 * sum of x^2)^0.75.

    The tutorial's constants. It works within one example, so it is no obstacle to privacy. Same values as its
    base class, which pools in three dimensions; a product with a matrix of bands takes a small part of the
    time on a CPU.
    """

    band: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(9, alpha=0.001, beta=0.75, k=1.0)
        place = torch.arange(channels)
        near = (place[:, None] - place[None, :]).abs() <= self.size // 2
        self.register_buffer("band", near.float()[:, :, None, None], persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, channels, height, width)."""
        squares = functional.conv2d(input.square(), self.band)
        return input * (self.k + self.alpha / self.size * squares).pow(-self.beta)
