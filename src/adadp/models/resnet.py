"""A small residual net with group normalisation."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

_GROUP = 16


def _norm(channels: int) -> nn.GroupNorm:
    # Groups of channels within one example; batch normalisation would mix examples and has no per-example
    # gradient.
    return nn.GroupNorm(channels // _GROUP, channels)


class Block(nn.Module):
    """Two 3x3 convolutions, group normalisation, a shortcut: (n, a, h, w) -> (n, b, h/stride, w/stride)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.first_norm = _norm(outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.second_norm = _norm(outer)
        nn.init.zeros_(self.second_norm.weight)  # a block starts as its shortcut, which is easier to train from
        same = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images of features to images of features."""
        # Nothing in place: the engine reads activations after the forward pass.
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, three stages of `depth` blocks (`width` channels, then twice, then four times), their mean, a linear layer.

    Input (n, channels, height, width) of any size from 8x8, output logits (n, classes). `features` maps
    images to (n, 4 * width); `head` is the linear layer.
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, *, depth: int = 2, width: int = 64, frozen: bool = False
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), _norm(width), nn.ReLU()]
        inner = width
        for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for position in range(depth):
                stages.append(Block(inner, outer, stride if position == 0 else 1))
                inner = outer
        self.features = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inner, classes)
        self.features.requires_grad_(not frozen)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (n, classes)."""
        return cast(Tensor, self.head(self.features(images)))
