"""A folder of images, one folder inside it for each class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from adadp.data.dataset import Dataset
from adadp.data.errors import CorruptDataError, DataError
from adadp.data.extras import require

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})


def read_images(
    path: Path,
    *,
    classes: tuple[str, ...] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
) -> Dataset:
    """Images of all classes, in the order of their names. The names of the folders are the classes (public).

    `size` (height, width) resizes every image by itself; without it all must be equally large. `grey` says
    whether there is one channel or three; without it there is one if all images are grey. Nothing is measured
    on pixels.
    """
    library = require("PIL.Image", "pillow", "reading images")
    folders = sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith("."))
    names = classes or tuple(folder.name for folder in folders)
    strangers = [folder.name for folder in folders if folder.name not in names]
    if strangers:
        raise DataError(
            f"{path / strangers[0]}: {strangers[0]!r} is none of the classes ({', '.join(names)})"
        )
    files = [
        (f, names.index(d.name))
        for d in folders
        for f in sorted(d.iterdir())
        if f.suffix.lower() in _SUFFIXES
    ]
    if len({label for _, label in files}) < 2 and classes is None:
        raise DataError(f"{path} must hold a folder of images for each of two or more classes")
    images = [_open(library, file, size) for file, _ in files]
    if grey is None:
        grey = all(image.mode in ("L", "1", "I;16") for image in images)
    arrays = [np.asarray(image.convert("L" if grey else "RGB")) for image in images]
    for (file, _), array in zip(files, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{file} is {array.shape[1]}x{array.shape[0]}, but {files[0][0].name} is "
                f"{arrays[0].shape[1]}x{arrays[0].shape[0]}: give a size, and all are resized to it"
            )
    pixels = torch.from_numpy(np.stack(arrays).reshape(len(arrays), *arrays[0].shape[:2], -1))
    labels = torch.tensor([label for _, label in files], dtype=torch.int64)
    public = ("the class names (names of folders)", "the size of the images and whether they are grey")
    return Dataset(path.name, pixels.permute(0, 3, 1, 2).contiguous(), labels, names, 255, public)


def _open(library: Any, file: Path, size: tuple[int, int] | None) -> Any:
    try:
        with library.open(file) as image:
            image.load()
            return image.copy() if size is None else image.resize((size[1], size[0]))
    except (OSError, ValueError, SyntaxError) as error:
        raise CorruptDataError(f"{file} is damaged or is no image ({error})") from error
