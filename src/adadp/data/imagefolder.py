"""A folder of images, one folder inside it for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adadp.data import labels
from adadp.data.dataset import Dataset
from adadp.errors import CorruptDataError, DataError
from adadp.extras import require

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})


def read_images(
    path: Path,
    *,
    classes: Sequence[object] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
    drop_other_labels: bool = False,
) -> Dataset:
    """Images of all classes, in the order of their names. The names of the folders are the classes (public).

    `classes` declares them: a folder of another name is refused, or with `drop_other_labels` left out.
    `size` (height, width) resizes every image by itself; without it all must be equally large. `grey` says
    whether there is one channel or three; without it there is one if all images are grey. Nothing is measured
    on pixels.
    """
    folders = sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith("."))
    names = tuple(folder.name for folder in folders) if classes is None else labels.declared(classes)
    strangers = [folder.name for folder in folders if folder.name not in names]
    if strangers and not drop_other_labels:
        raise DataError(
            f"{path / strangers[0]}: {strangers[0]!r} is none of the classes ({labels.listed(names)}). Declare it, "
            "or have such folders left out by rule (drop_other_labels)"
        )
    files = [
        (f, names.index(d.name))
        for d in folders
        if d.name in names
        for f in sorted(d.iterdir())
        if f.suffix.lower() in _SUFFIXES and f.is_file()
    ]
    if len({label for _, label in files}) < 2 and classes is None:
        raise DataError(f"{path} must hold a folder of images for each of two or more classes")
    if not files:
        raise DataError(f"{path} holds no image in a folder of one of the classes ({labels.listed(names)})")
    images: list[Any] = []
    for file, _ in files:
        images.append(open_image(file, size))
        if images[-1].size != images[0].size:  # before a folder of others fills the memory
            raise DataError(
                f"{file} is {_size(images[-1])}, but {files[0][0].name} is {_size(images[0])}: give a size "
                "(--image-size 32x32; size=(32, 32)), and all are resized to it"
            )
    if grey is None:
        grey = all(image.mode in ("L", "1", "I;16") for image in images)
    arrays = [np.asarray(image.convert("L" if grey else "RGB")) for image in images]
    pixels = torch.from_numpy(np.stack(arrays).reshape(len(arrays), *arrays[0].shape[:2], -1))
    numbers = torch.tensor([label for _, label in files], dtype=torch.int64)
    known = labels.public_names(names, classes is not None, drop_other_labels)
    public = (known, "the size of the images and whether they are grey")
    return Dataset(path.name, pixels.permute(0, 3, 1, 2).contiguous(), numbers, names, 255, public)


def open_image(file: Path, size: tuple[int, int] | None) -> Any:
    """An image as Pillow has it, resized to (height, width) where a size is given."""
    library = require("PIL.Image", "data", "reading images")
    try:
        with library.open(file) as image:
            image.load()
            return image.copy() if size is None else image.resize((size[1], size[0]))
    except Exception as error:  # Pillow's decoders raise what the place where they fail happens to raise
        raise CorruptDataError(f"{file} is damaged or is no image ({error})") from error


def _size(image: Any) -> str:
    return f"{image.size[0]}x{image.size[1]}"
