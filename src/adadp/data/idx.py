"""The IDX format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adadp.data.catalogue import Idx
from adadp.data.unpacking import gunzip
from adadp.errors import CorruptDataError

Bytes = npt.NDArray[np.uint8]


def find(source: Idx, folder: Path) -> Path | None:
    """Return the file in `folder`, compressed or not, if it is there."""
    for name in (f"{source.file}.gz", source.file):
        if (folder / name).is_file():
            return folder / name
    return None


def read(source: Idx, path: Path) -> Bytes:
    """Array of bytes in an IDX file, if its content has the published digest; else it is refused."""
    try:
        content = gunzip(path) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptDataError(
            f"{path} is damaged or cut short ({error}). Delete it, or put a good copy in its place"
        ) from error
    if hashlib.sha256(content).hexdigest() != source.digest:
        raise CorruptDataError(
            f"{path} does not hold the published {source.file} (SHA-256 of the content differs). Delete it, or put a "
            "good copy in its place"
        )
    dimensions = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
