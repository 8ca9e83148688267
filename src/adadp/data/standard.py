"""The data sets that are known by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from adadp.data import cifar, decoded, idx
from adadp.data.catalogue import CATALOGUE, Cifar, Download, Entry, IdxSplit
from adadp.data.dataset import Dataset, as_images
from adadp.data.download import DownloadError, fetch
from adadp.data.folders import ENVIRONMENT, cache_folder, candidates
from adadp.errors import DataError, DataNotFoundError
from adadp.extras import require

Bytes = npt.NDArray[np.uint8]
Split = Literal["train", "test"]

NAMES = ("digits", *CATALOGUE)

PUBLISHED_TESTS = frozenset(
    name
    for name in NAMES
    if name not in CATALOGUE
    or not (isinstance(content := CATALOGUE[name].content, Cifar) and content.splits["test"].digest is None)
)
"""Names whose test examples are the published ones for sure: of others, any images in the right format are taken."""

# The embedded digits have no official split: every fifth image is for testing, a rule that reads no image.
_DIGITS_STRIDE = 5
DIGITS = tuple("0123456789")
DIGITS_ROWS = (1438, 359)
"""To train on, and held out."""


def load(
    name: str,
    split: Split = "train",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool | None = None,
) -> Dataset:
    """Load `digits`, `mnist`, `fashion-mnist`, `cifar10` or `cifar100`.

    Files are looked for in `data_dir`, then in $ADADP_DATA, then in the user's cache folder, then where the
    system's packages put them, each in a folder with the data set's name; then they are downloaded into the
    cache folder (unless `download` is False or $ADADP_OFFLINE is set). What is found but damaged is refused,
    not passed over. Images come as uint8 (n, channels, height, width) in their published order;
    `Dataset.inputs()` gives float32 in [0, 1]. `progress` shows a bar while downloading (default: if stderr
    is a terminal).
    """
    if split not in ("train", "test"):
        raise DataError(f"split must be 'train' or 'test', not {split!r}")
    if name == "digits":
        return _digits(split)
    if name not in CATALOGUE:
        raise DataError(f"no data set is called {name!r}; there are {', '.join(NAMES)}, or give the path of a file")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(f"data_dir {os.fspath(data_dir)!r} is not a folder")
    entry = CATALOGUE[name]
    images, labels = _arrays(entry, split, data_dir, download, sys.stderr.isatty() if progress is None else progress)
    return Dataset(name, as_images(images), torch.from_numpy(labels.astype(np.int64)), entry.classes)


def _digits(split: Split) -> Dataset:
    bunch = require("sklearn.datasets", "demo", "the digits data set").load_digits()
    images = torch.from_numpy(bunch.images.astype(np.uint8))[:, None]
    held_out = torch.arange(len(images)) % _DIGITS_STRIDE == _DIGITS_STRIDE - 1
    whole = Dataset("digits", images, torch.from_numpy(bunch.target.astype(np.int64)), DIGITS, 16)
    return whole.subset(held_out if split == "test" else ~held_out)


def _arrays(
    entry: Entry, split: Split, data_dir: str | os.PathLike[str] | None, download: bool, progress: bool
) -> tuple[Bytes, Bytes]:
    cached = cache_folder() / "decoded" / f"{entry.name}-{split}.safetensors"
    places = candidates(entry.folders, entry.system_folders, data_dir)
    found = _read(entry, split, places, cached)
    if found is None and isinstance(entry.content, Cifar):
        known = entry.content.splits[split].digest
        found = decoded.read(cached, known) if known is not None else None
    if found is not None:
        return found
    home = cache_folder() / "data" / entry.folders[0]
    wanted = _downloads(entry, split)
    reason = "downloading is off"
    if download and not os.environ.get("ADADP_OFFLINE"):
        try:
            for file, source in wanted.items():
                if not (home / file).exists():
                    fetch(source, home / file, progress=progress)
        except (DownloadError, OSError) as error:
            reason = str(error)
        else:
            found = _read(entry, split, [home], cached)
            if found is not None:
                return found
    looked = "\n".join(f"  {place}" for place in places)
    raise DataNotFoundError(
        f"{entry.name} ({split}) is not here, and {reason}.\nLooked in:\n{looked}\nPut {_files(entry, split)} into "
        f"one of these folders (or into a folder {entry.folders[0]!r} under --data-dir or ${ENVIRONMENT}), from:\n"
        + "\n".join(f"  {source.url}" for source in wanted.values())
    )


def _read(entry: Entry, split: Split, places: list[Path], cached: Path) -> tuple[Bytes, Bytes] | None:
    for place in places:
        if isinstance(entry.content, Cifar):
            paths = cifar.find(entry.content, entry.content.splits[split], place)
            if paths:
                return _decoded(entry.content, split, paths, cached)
        else:
            files = entry.content[split]
            images, labels = idx.find(files.images, place), idx.find(files.labels, place)
            if images is not None and labels is not None:
                return idx.read(files.images, images), idx.read(files.labels, labels)
    return None


def _decoded(content: Cifar, split: Split, paths: list[Path], cached: Path) -> tuple[Bytes, Bytes]:
    files = content.splits[split]
    # Only content of a known digest may come from the cache: then it does not matter which files it was made
    # from.
    kept = decoded.read(cached, files.digest) if files.digest is not None else None
    if kept is not None:
        return kept
    images, labels = cifar.read(content, files, paths)
    if files.digest is not None:
        decoded.write(cached, images, labels)
    return images, labels


def _downloads(entry: Entry, split: Split) -> dict[str, Download]:
    if isinstance(entry.content, Cifar):
        return {entry.content.archive: entry.content.download}
    files: IdxSplit = entry.content[split]
    return {f"{part.file}.gz": part.download for part in (files.images, files.labels)}


def _files(entry: Entry, split: Split) -> str:
    names = " and ".join(_downloads(entry, split))
    return f"{names} (or {entry.content.splits[split].shards})" if isinstance(entry.content, Cifar) else names
