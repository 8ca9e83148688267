"""Scattering features of whole data sets, and the directions in which those of synthetic images lie."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adadp import preprocessing
from adadp.data import Dataset
from adadp.features import cache
from adadp.features.scattering import Scattering
from adadp.shapes.probes import Blobs, PinkNoise

if TYPE_CHECKING:
    from adadp.preprocessing import PublicDirections

Halves = npt.NDArray[np.float16]

MADE = 8000
"""Synthetic images whose features show the directions; fewer, where an image has many features."""
_WORTH_KEEPING = 2_000  # images: fewer are mapped in seconds
_AT_A_TIME = 4096
_VERSION = "scattering 1"  # another number where the same images become other features


def features_of(data: Dataset, *, keep: bool = True, device: torch.device | None = None) -> Halves:
    """Scattering of each image, (n, features), rounded to 16 bits: read from the cache, or computed and kept there.

    Guarantee: no release. Each row follows from one image alone.
    """
    plan = Scattering.for_images(data.input_shape)
    keep = keep and worth_keeping(data)
    key = cache.key_of(f"{_VERSION} {plan} {data.maximum} {len(data)}", [data.images.numpy()]) if keep else ""
    found = cache.read(key, (len(data), plan.size)) if keep else None
    if found is None:
        found = np.empty((len(data), plan.size), dtype=np.float16)
        for first in range(0, len(data), _AT_A_TIME):
            part = slice(first, first + _AT_A_TIME)
            found[part] = halves(data.images[part].to(torch.float32) / data.maximum, plan, device)
        if keep:
            cache.write(key, found)
    return found


def worth_keeping(data: Dataset) -> bool:
    """Whether there are so many images that their features are kept on disk."""
    return len(data) >= _WORTH_KEEPING


def halves(images: Tensor, plan: Scattering, device: torch.device | None = None) -> Halves:
    """Features of images in [0, 1], rounded to 16 bits."""
    with torch.no_grad():
        return plan(images if device is None else images.to(device)).to(torch.float16).cpu().numpy()


def made_images(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """Synthetic images, half of them 1/f noise and half soft blobs, (count, *shape), in [0, 1]."""
    noise = count // 2
    return torch.cat([PinkNoise(shape)(noise, generator), Blobs(shape)(count - noise, generator)])


def count_of_made(shape: tuple[int, ...]) -> int:
    """How many synthetic images show the directions of images of this shape: fewer of large ones."""
    return min(MADE, max(1_000, 2**25 // Scattering.for_images(shape).size))


def most_directions(shape: tuple[int, ...]) -> int:
    """How many directions there are for images of this shape."""
    return min(Scattering.for_images(shape).size, count_of_made(shape) - 1)


@functools.lru_cache(maxsize=2)
def public_directions(shape: tuple[int, ...], count: int, power: float) -> PublicDirections:
    """The `count` largest directions of powers of features of synthetic images. They are the same every time."""
    plan, made = Scattering.for_images(shape), count_of_made(shape)
    key = cache.key_of(f"directions, {_VERSION} {plan} {made} {count} {power}", [])
    kept = cache.read(key, (plan.size + 1, count + 1), np.float32)
    if kept is not None:
        return preprocessing.PublicDirections(kept[:-1, -1], kept[:-1, :-1], kept[-1, :-1])
    generator = torch.Generator().manual_seed(0)  # public: nothing in it is a secret
    images = made_images(shape, made, generator)
    rows = np.concatenate([halves(part, plan) for part in torch.split(images, max(1, 2**22 // math.prod(shape)))])
    found = preprocessing.PublicDirections.of(rows, count, power)
    below = np.append(found.values, np.float32(0))
    cache.write(key, np.vstack([np.hstack([found.vectors, found.mean[:, None]]), below]))
    return found
