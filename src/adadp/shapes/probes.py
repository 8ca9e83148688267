"""Synthetic inputs for `Probe`: similar enough to data to show the shape of a model's gradients.

Each is a callable (count, generator) -> tensor on the CPU. They use public knowledge alone: the inputs' form and range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blobs:
    """Images of a few soft blobs at random places, values in [low, high]. `shape` is [channels, height, width]."""

    shape: Sequence[int]
    blobs: int = 4
    low: float = 0.0
    high: float = 1.0

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        channels, height, width = self.shape

        def uniform(*size: int) -> Tensor:
            return torch.rand(count, self.blobs, *size, generator=generator)

        rows = torch.linspace(0, 1, height).view(1, 1, height, 1)
        columns = torch.linspace(0, 1, width).view(1, 1, 1, width)
        spread = 0.03 + 0.12 * uniform(1, 1)
        distance = (rows - uniform(1, 1)).square() + (columns - uniform(1, 1)).square()
        bumps = torch.exp(-distance / (2 * spread.square()))
        heights = 2 * torch.rand(count, channels, self.blobs, generator=generator)
        images = torch.einsum("ncb,nbhw->nchw", heights, bumps).clamp(0, 1)
        return self.low + (self.high - self.low) * images


@dataclass(frozen=True)
class PinkNoise:
    """Images of 1/f noise, the spectrum of natural images, values in [low, high]; [channels, height, width]."""

    shape: Sequence[int]
    low: float = 0.0
    high: float = 1.0

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        channels, height, width = self.shape
        white = torch.randn(count, channels, height, width, generator=generator)
        rows = torch.fft.fftfreq(height).view(height, 1)
        columns = torch.fft.rfftfreq(width).view(1, -1)
        frequency = (rows.square() + columns.square()).sqrt().clamp_min(1 / max(height, width))
        images: Tensor = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(height, width))
        flat = images.flatten(1)
        flat = flat - flat.amin(1, keepdim=True)
        flat = flat / flat.amax(1, keepdim=True).clamp_min(1e-12)
        return self.low + (self.high - self.low) * flat.view(count, channels, height, width)


@dataclass(frozen=True)
class ZipfTokens:
    """Sequences of token numbers in 0..vocabulary-1 with the frequencies of words in a language: 1/rank."""

    vocabulary: int
    length: int

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        chances = 1.0 / torch.arange(1, self.vocabulary + 1, dtype=torch.float64)
        drawn = torch.multinomial(chances, count * self.length, replacement=True, generator=generator)
        return drawn.view(count, self.length)


@dataclass(frozen=True)
class Vectors:
    """Independent values per coordinate: uniform in [low, high], or standard normal where no range is given."""

    size: int
    low: float | None = None
    high: float | None = None

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        if self.low is None or self.high is None:
            return torch.randn(count, self.size, generator=generator)
        return self.low + (self.high - self.low) * torch.rand(count, self.size, generator=generator)
