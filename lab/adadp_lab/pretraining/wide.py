"""A wide residual net with batch normalisation: for public data only, whose features are then frozen."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class WideBlock(nn.Module):
    """Two 3x3 convolutions after their normalisations, a shortcut: (n, a, h, w) -> (n, b, h/stride, w/stride)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inner)
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        same = stride == 1 and inner == outer
        self.shortcut = None if same else nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the first convolution sees, and what the block makes of it."""
        seen = functional.relu(self.norm(x))
        y = self.second(functional.relu(self.second_norm(self.first(seen))))
        return seen, y + (x if self.shortcut is None else self.shortcut(seen))


class WideFeatures(nn.Module):
    """Images (n, channels, height, width) in [0, 1] to (n, 8 * width), means over places; `depth` is at least 2.

    The first half is of what the last block sees, the second of what it makes of that.
    """

    def __init__(self, channels: int, depth: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        blocks, inner = [], 16
        for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for position in range(depth):
                blocks.append(WideBlock(inner, outer, stride if position == 0 else 1))
                inner = outer
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm2d(inner)

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (n, 8 * width)."""
        # Constants, not statistics: pixels about 0, of about unit size.
        x, seen = self.stem(4 * images - 2), images
        for block in self.blocks:
            seen, x = block(x)
        return torch.cat([part.float().mean((2, 3)) for part in (seen, functional.relu(self.norm(x)))], 1)


class WideResNet(nn.Module):
    """`features`, and a linear layer on the later half of them: WRN-16-6 with two blocks a stage and a width of 96.

    Batch normalisation mixes examples while it trains, so no such net can be trained privately, and
    `adadp.models.build` does not know it. In evaluation mode its statistics are constants, of the public data: then an
    example's features depend on that example alone.
    """

    def __init__(self, channels: int = 3, classes: int = 10, *, depth: int = 2, width: int = 96) -> None:
        super().__init__()
        self.features = WideFeatures(channels, depth, width)
        self.last = 4 * width
        self.head = nn.Linear(self.last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (n, classes)."""
        return cast(Tensor, self.head(self.features(images)[:, -self.last :]))
