"""Images and labels as tensors, with what is public about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_images(pixels: np.ndarray[Any, Any]) -> Tensor:
    """Arrays of images (n, height, width[, channels]) as torch has them: (n, channels, height, width)."""
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    return torch.from_numpy(np.array(pixels.transpose(0, 3, 1, 2), order="C"))


@dataclass(frozen=True)
class Dataset:
    """Images with class labels.

    images : uint8, shape (n, channels, height, width).
    labels : int64, shape (n,), 0..len(classes)-1.
    maximum : the largest value a pixel can have in this format (255; 16 for digits): public, never measured.
    public : what counts as public about it, in sentences for the reader of a guarantee.
    persons : whose each image is, shape (n,); None where each image is a unit of privacy of its own.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    maximum: int = 255
    public: tuple[str, ...] = field(default=("the class names and the size of the images",))
    persons: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image: (channels, height, width)."""
        return tuple(self.images.shape[1:])

    def inputs(self) -> Tensor:
        """Images as float32 in [0, 1], (n, channels, height, width): divided by `maximum`, a constant."""
        return self.images.to(torch.float32) / self.maximum

    def subset(self, index: Tensor) -> Dataset:
        """Return the examples at `index` (a boolean mask or positions, shape (m,))."""
        persons = None if self.persons is None else self.persons[index.numpy()]
        return replace(self, images=self.images[index], labels=self.labels[index], persons=persons)
