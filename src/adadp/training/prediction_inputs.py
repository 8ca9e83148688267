"""Data to predict on: rows or images of the form that a run was trained with, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from adadp.data import DataError, DataNotFoundError, Dataset, Table
from adadp.data.dataset import as_images
from adadp.data.imagefolder import open_image
from adadp.data.tablefile import flattened, read_columns
from adadp.training.run_folder import FinishedRun
from adadp.training.settings import parse_image_size

_TABLES = (".csv", ".parquet", ".npz")


def read(path: str | Path, run: FinishedRun) -> Dataset | Table:
    """A file of rows, an .npz of images, one image, or a folder of images in the order of their names.

    Labels are not needed; those of what is returned are all 0.
    """
    source = Path(path)
    if not source.exists():
        raise DataNotFoundError(f"{source} does not exist")
    if run.config["kind"] == "table":
        return _table(source, run)
    if source.suffix.lower() == ".npz":
        return _dataset(source, _arrays(source), run)
    files = sorted(file for file in source.iterdir() if file.is_file()) if source.is_dir() else [source]
    if not files:
        raise DataError(f"{source} holds no files")
    return _dataset(source, np.stack([_image(file, run) for file in files]), run)


def _table(source: Path, run: FinishedRun) -> Table:
    if source.suffix.lower() not in _TABLES:
        raise DataError(f"{source}: this run was trained on a table; its rows come in {', '.join(_TABLES)}")
    kinds = run.config.get("kinds") or dict.fromkeys(run.config["category"], "category")
    person = run.config.get("person")  # no feature, and not needed here
    asked = kinds if person is None else {**kinds, person: "category"}
    columns = read_columns(source, asked, decimal_comma=run.config.get("decimal_comma", False))
    if person is not None:
        columns.pop(person, None)
    flat = flattened(source, columns)
    rows = len(next(iter(flat.values()))) if flat else 0
    labels = torch.zeros(rows, dtype=torch.int64)
    return Table(source.stem, flat, labels, run.classes, kinds=flat.kinds, target=run.target)


def _arrays(source: Path) -> np.ndarray[Any, Any]:
    images = [values for values in read_columns(source).values() if values.ndim > 2]
    if len(images) != 1:
        raise DataError(f"{source} must hold one array of images (n, height, width[, channels]), not {len(images)}")
    return images[0]


def _image(file: Path, run: FinishedRun) -> np.ndarray[Any, Any]:
    image = open_image(file, parse_image_size(run.config["image_size"]))
    pixels = np.asarray(image.convert("L" if run.config["image_shape"][0] == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], -1)


def _dataset(source: Path, pixels: np.ndarray[Any, Any], run: FinishedRun) -> Dataset:
    if pixels.dtype != np.uint8:
        raise DataError(f"{source}: images must be bytes (uint8, 0 to {run.config['maximum']}), not {pixels.dtype}")
    images = as_images(pixels)
    wanted = tuple(run.config["image_shape"])
    if tuple(images.shape[1:]) != wanted:
        raise DataError(f"{source}: images of {tuple(images.shape[1:])}, but the run was trained on {wanted}")
    labels = torch.zeros(len(images), dtype=torch.int64)
    return Dataset(source.stem, images, labels, run.classes, run.config["maximum"])
