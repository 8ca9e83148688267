"""CIFAR-10 and CIFAR-100 from parquet shards of images or from the published binary archive (no pickle)."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adadp.data.catalogue import Cifar, CifarSplit
from adadp.data.download import checksum
from adadp.data.unpacking import check_unpacked, parquet_size
from adadp.errors import CorruptDataError, DataNotFoundError
from adadp.extras import require

Bytes = npt.NDArray[np.uint8]

_PIXELS = 3 * 32 * 32


def digest(images: Bytes, labels: Bytes) -> str:
    """SHA-256 of the pixels (N x 32 x 32 x 3) followed by the labels."""
    hasher = hashlib.sha256(np.ascontiguousarray(images).data)
    hasher.update(np.ascontiguousarray(labels).data)
    return hasher.hexdigest()


def find(dataset: Cifar, split: CifarSplit, folder: Path) -> list[Path]:
    """Return the archive or the shards of a split in `folder`; an empty list if they are not there.

    A shard's name says of how many it is one (train-00000-of-00002.parquet): if one is missing, it is named.
    """
    shards = sorted(folder.glob(split.shards))
    if not shards:
        return [folder / dataset.archive] if (folder / dataset.archive).is_file() else []
    counted = re.search(r"-of-(\d+)\.parquet$", shards[0].name)
    if counted and len(shards) != int(counted[1]):
        present = {shard.name for shard in shards}
        names = [re.sub(r"\d+(?=-of-)", f"{i:05d}", shards[0].name) for i in range(int(counted[1]))]
        raise DataNotFoundError(f"{folder} lacks {', '.join(n for n in names if n not in present)}")
    return shards


def read(dataset: Cifar, split: CifarSplit, paths: list[Path]) -> tuple[Bytes, Bytes]:
    """Images (N, 32, 32, 3) and labels (N,), if they are the published ones; else the files are refused."""
    if paths[0].suffix == ".parquet":
        images, labels = _read_parquet(dataset, split, paths)
    else:
        # Where the content's digest is not known, the archive's own checksum has to do.
        source = dataset.download
        if split.digest is None and checksum(paths[0], source.algorithm) != source.checksum:
            raise CorruptDataError(f"{paths[0]} does not have the published {source.algorithm} {source.checksum}")
        images, labels = _read_archive(dataset, split, paths[0])
    named = " and ".join(str(path) for path in paths)
    if images.shape != (split.rows, 32, 32, 3):
        raise CorruptDataError(f"{named}: {len(images)} images of {images.shape[1:]}, not {split.rows} of 32x32x3")
    if split.digest is not None and digest(images, labels) != split.digest:
        raise CorruptDataError(
            f"{named}: the images or labels are not the published ones (SHA-256 differs). Put good copies in place"
        )
    return images, labels


def _read_parquet(dataset: Cifar, split: CifarSplit, paths: list[Path]) -> tuple[Bytes, Bytes]:
    parquet = require("pyarrow.parquet", "data", "reading CIFAR from parquet files")
    image = require("PIL.Image", "data", "decoding CIFAR's images")
    images, labels = [], []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                if file.metadata.num_rows > split.rows:
                    raise ValueError(f"{file.metadata.num_rows:,} rows, more than the data set has")
                check_unpacked(path, parquet_size(file.metadata))
                table = file.read()
            column = next(name for name in ("image", "img") if name in table.column_names)
            images += [_decode(image, row["bytes"]) for row in table[column].to_pylist()]
            labels += table[dataset.label_column].to_pylist()
        except CorruptDataError:
            raise
        except Exception as error:
            # pyarrow and Pillow raise what the place where they fail happens to raise.
            raise CorruptDataError(
                f"{path} is damaged or is not this data set ({type(error).__name__}: {error}). Put a good "
                f"copy in its place"
            ) from error
    try:
        return np.stack(images), np.asarray(labels, dtype=np.uint8)
    except (ValueError, OverflowError) as error:
        raise CorruptDataError(f"{paths[0].parent}: images of different sizes, or labels out of range") from error


def _decode(image: Any, content: bytes) -> Bytes:
    opened = image.open(io.BytesIO(content))
    if opened.size != (32, 32):  # before it is decoded: a few bytes may claim any size
        raise ValueError(f"an image of {opened.size[0]}x{opened.size[1]} pixels")
    return np.asarray(opened.convert("RGB"))


def _read_archive(dataset: Cifar, split: CifarSplit, path: Path) -> tuple[Bytes, Bytes]:
    record = dataset.label_bytes + _PIXELS
    try:
        with tarfile.open(path) as archive:
            found = {}
            for member in archive:  # a header is read before what it stands for
                if member.size > split.rows * record:
                    raise ValueError(f"{member.name} has {member.size:,} bytes")
                if member.name in split.members:
                    file = archive.extractfile(member)
                    found[member.name] = b"" if file is None else file.read()
                if len(found) == len(split.members):
                    break
            parts = [np.frombuffer(found[name], np.uint8).reshape(-1, record) for name in split.members]
    except (OSError, EOFError, tarfile.TarError, zlib.error, KeyError, ValueError, OverflowError) as error:
        raise CorruptDataError(f"{path} is damaged or cut short ({error}). Put a good copy in its place") from error
    rows = np.concatenate(parts)
    # Channels first in the file: R, G and B planes of 32 x 32. CIFAR-100 has the coarse label before the fine
    # one.
    images = rows[:, dataset.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, dataset.label_bytes - 1].copy()
