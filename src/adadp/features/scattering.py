"""Scattering: features of an image from fixed wavelets. Nothing is trained, and each image is mapped by itself.

    Scattering.for_images((1, 28, 28))(images)        # (n, 3969): 81 maps of 7 x 7

An image is filtered by Morlet wavelets of J scales and L orientations, moduli are taken, filtered and taken again, and
all is averaged over 2^J x 2^J pixels (Bruna and Mallat, "Invariant scattering convolution networks", 2013). With J = 2
and L = 8 an image of one channel becomes 1 + 16 + 64 maps of a quarter of its height and width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from adadp.errors import ConfigurationError

ORIENTATIONS = 8
LARGEST = 64
"""Pixels of the longer side, beyond which an image is made smaller first."""
_SMALLEST = 8
_BATCH, _BATCH_ON_A_GPU = 2**21, 2**27  # numbers of the widest intermediate result; a core's cache takes no more


@dataclass(frozen=True)
class Scattering:
    """Maps images (n, channels, height, width) to features (n, size), float32.

    Formal guarantee: no release. An image's features follow from that image and public constants alone.

    Attributes:
        channels, height, width: of the images; each channel is mapped by itself.
        scales: J. Features are averages over 2^J x 2^J pixels.

    Images are resized first to `resized`, which differs from their own size only below 8 and above 64 pixels, and are
    continued by reflection beyond their edges.
    """

    channels: int
    height: int
    width: int
    scales: int

    def __post_init__(self) -> None:
        if min(self.channels, self.height, self.width) < 1:
            raise ConfigurationError(f"images have at least one channel, row and column, not {self}")
        if not 1 <= self.scales <= 4 or min(self.resized) < 2 ** (self.scales + 1):
            raise ConfigurationError(
                f"scales must be in 1..4, with 2^(scales + 1) at most the shorter side of {self.resized}, not "
                f"{self.scales}"
            )

    @classmethod
    def for_images(cls, shape: tuple[int, ...]) -> Scattering:
        """As suits images of a shape (channels, height, width): J = 1 below 16 pixels, 2 up to 32, 3 above."""
        channels, height, width = shape
        shorter, longer = sorted(_resized(height, width))
        scales = 1 if shorter < 16 else 2 if longer <= 32 else 3
        return cls(channels, height, width, scales)

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the images that are filtered."""
        return _resized(self.height, self.width)

    @property
    def maps(self) -> int:
        """How many maps one channel becomes: of order 0, 1 and 2."""
        first, second = self.scales, self.scales * (self.scales - 1) // 2
        return 1 + first * ORIENTATIONS + second * ORIENTATIONS**2

    @property
    def map_size(self) -> tuple[int, int]:
        """Height and width of a map."""
        height, width = (-(-side // 2**self.scales) for side in self.resized)
        return height, width

    @property
    def size(self) -> int:
        """Features of an image."""
        return self.channels * self.maps * math.prod(self.map_size)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, size), float32, on the images' device, in the order channel, map, row, column."""
        wanted = self.channels, self.height, self.width
        if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
            raise ConfigurationError(f"images must have shape (n, {', '.join(map(str, wanted))}), not {images.shape}")
        if not len(images):
            return torch.zeros(0, self.size, device=images.device)
        filters = _Filters(self, images.device)
        numbers = self.channels * filters.padded_height * filters.padded_width * ORIENTATIONS * 2
        at_a_time = max(1, (_BATCH_ON_A_GPU if images.is_cuda else _BATCH) // numbers)
        return torch.cat([filters.features(part) for part in torch.split(images, at_a_time)])


def _resized(height: int, width: int) -> tuple[int, int]:
    shorter, longer = min(height, width), max(height, width)
    factor = min(1.0, LARGEST / longer)
    if shorter * factor < _SMALLEST:
        factor = _SMALLEST / shorter
    height, width = (max(_SMALLEST, min(round(side * factor), 8 * LARGEST)) for side in (height, width))
    return height, width


class _Filters:
    """The wavelets of a `Scattering` in the Fourier domain, on one device, and what they make of images."""

    def __init__(self, like: Scattering, device: torch.device) -> None:
        self.plan, self.device = like, device
        self.edge = 2**like.scales  # pixels before the image: a whole number of map pixels
        height, width = like.resized
        self.padded_height, self.padded_width = (
            _multiple(side + 2 * self.edge, 2**like.scales) for side in (height, width)
        )
        sizes = [(self.padded_height // 2**j, self.padded_width // 2**j) for j in range(like.scales)]
        scale = _wavelet_scale(like.scales, sizes[0])
        self.wavelets = {  # at each resolution r those of scales j >= r
            (j, r): (scale * wavelets(j, r, sizes[r])).to(device, torch.float32)
            for r in range(like.scales)
            for j in range(r, like.scales)
        }
        self.averages = [
            tuple(
                _averaging(like.scales, r, size, count).to(device, torch.float32)
                for size, count in zip(sizes[r], like.map_size, strict=True)
            )
            for r in range(like.scales)
        ]

    def features(self, images: Tensor) -> Tensor:
        """Of a few images at once."""
        images = images.to(torch.float32)
        if tuple(images.shape[2:]) != self.plan.resized:
            images = functional.interpolate(
                images, self.plan.resized, mode="bilinear", antialias=True, align_corners=False
            )
        signal = self._padded(images).flatten(0, 1)[:, None]  # (n * channels, 1, height, width)
        scales = self.plan.scales
        orders: tuple[list[Tensor], list[Tensor], list[Tensor]] = [self._averaged(signal, 0)], [], []
        spectrum = torch.fft.fft2(signal)
        for j in range(scales):
            first = self._moduli(spectrum, j, 0)
            orders[1].append(self._averaged(first, j))
            if j + 1 < scales:
                following = torch.fft.fft2(first)
                orders[2].extend(self._averaged(self._moduli(following, k, j), k) for k in range(j + 1, scales))
        maps = torch.cat([part for order in orders for part in order], 1)
        return maps.reshape(len(images), -1)

    def _padded(self, images: Tensor) -> Tensor:
        """Continued by reflection, the edge pixels not repeated, to a size that all resolutions divide."""
        height, width = images.shape[2:]
        rows, columns = (
            _mirrored(side, self.edge, padded).to(self.device)
            for side, padded in ((height, self.padded_height), (width, self.padded_width))
        )
        return images[:, :, rows][:, :, :, columns]

    def _moduli(self, spectra: Tensor, j: int, r: int) -> Tensor:
        """|signal * psi_j|, every 2^(j-r)-th pixel kept, for spectra (n, m, ...) at resolution r: (n, m * L, ...)."""
        filters, step = self.wavelets[j, r], 2 ** (j - r)
        height, width = spectra.shape[-2] // step, spectra.shape[-1] // step
        total: Tensor | None = None
        for a in range(step):  # fewer pixels are a sum over aliases in the Fourier domain
            for b in range(step):
                rows, columns = slice(a * height, (a + 1) * height), slice(b * width, (b + 1) * width)
                part = spectra[:, :, None, rows, columns] * filters[:, rows, columns]
                total = part if total is None else total.add_(part)
        assert total is not None
        moduli: Tensor = torch.fft.ifft2(total).abs().div_(step**2)
        return moduli.flatten(1, 2)

    def _averaged(self, signal: Tensor, r: int) -> Tensor:
        """The signal * phi at the maps' pixels."""
        rows, columns = self.averages[r]
        found: Tensor = rows @ signal @ columns.T
        return found


def wavelets(j: int, r: int, size: tuple[int, int]) -> Tensor:
    """Morlet wavelets of scale 2^j for signals of which every 2^r-th pixel is kept: Fourier transforms, (L, *size).

    Their mean is exactly 0. They are real in the Fourier domain, with a Gaussian of deviation 0.8 * 2^j pixels along
    the wave (twice that across it) and a wave of 8/3 * 2^j pixels.
    """
    deviation, wave, slant = 0.8 * 2 ** (j - r), 0.75 * math.pi / 2 ** (j - r), 4 / ORIENTATIONS
    made = []
    for number in range(ORIENTATIONS):
        angle = math.pi * number / ORIENTATIONS
        bump, ground = _aliased(size, angle, deviation, slant, wave), _aliased(size, angle, deviation, slant, 0.0)
        made.append(bump - ground * (bump[0, 0] / ground[0, 0]))
    return torch.stack(made)


def _aliased(size: tuple[int, int], angle: float, deviation: float, slant: float, wave: float) -> Tensor:
    """A Gaussian window times a wave, sampled at whole pixels: its spectrum, with 5 x 5 aliases."""
    offsets = 2 * math.pi * torch.arange(-2, 3, dtype=torch.float64)
    rows, columns = (2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64)[:, None] + offsets for side in size)
    rows, columns = rows[:, :, None, None], columns[None, None]  # (height, 5, width, 5)
    along = rows * math.sin(angle) + columns * math.cos(angle) - wave
    across = rows * math.cos(angle) - columns * math.sin(angle)
    found: Tensor = torch.exp(-0.5 * deviation**2 * (along**2 + (across / slant) ** 2))
    return found.sum((1, 3))


def _wavelet_scale(scales: int, size: tuple[int, int]) -> float:
    """A factor for all wavelets with which no step adds energy: |phi|^2 + sum |psi|^2 is 1 at most everywhere."""
    low = _averages_of(scales, 0, size[0])[:, None] * _averages_of(scales, 0, size[1])
    energy = torch.stack([wavelets(j, 0, size).square().sum(0) for j in range(scales)]).sum(0)
    energy = 0.5 * (energy + energy.flip(0, 1).roll((1, 1), (0, 1)))  # of real signals: both signs of a frequency
    room = (1 - low.square()).clamp_min(0)
    large = energy > 1e-3 * energy.max()
    return float((room[large] / energy[large]).min().sqrt())


def _averages_of(scales: int, r: int, size: int) -> Tensor:
    """phi along one side: the spectrum of a Gaussian of deviation 0.8 * 2^(J-1) pixels, 1 at frequency 0."""
    deviation = 0.8 * 2.0 ** (scales - 1 - r)
    frequency = 2 * math.pi * torch.fft.fftfreq(size, dtype=torch.float64)[:, None]
    offsets = 2 * math.pi * torch.arange(-2, 3, dtype=torch.float64)
    found = torch.exp(-0.5 * (deviation * (frequency + offsets)) ** 2).sum(1)
    return found / found[0]


def _averaging(scales: int, r: int, size: int, count: int) -> Tensor:
    """phi as a matrix (count, size): from one side of a signal to that of a map, with every 2^(J-r)-th place kept."""
    kernel: Tensor = torch.fft.ifft(_averages_of(scales, r, size)).real
    places = 2 ** (scales - r) * torch.arange(1, count + 1)
    return kernel[(torch.arange(size)[None] - places[:, None]) % size]


def _mirrored(side: int, before: int, padded: int) -> Tensor:
    """Which pixel stands at each of `padded` places, the image beginning at place `before`."""
    period = 2 * (side - 1)
    place = (torch.arange(padded) - before) % period
    return torch.where(place < side, place, period - place)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
