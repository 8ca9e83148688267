"""Decoded arrays of images in the user's cache: decoding takes ten seconds, reading them less than one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from adadp.data.cifar import digest

Bytes = npt.NDArray[np.uint8]


def read(path: Path, expected: str | None) -> tuple[Bytes, Bytes] | None:
    """Images and labels from the cache, or None if they are not there or not right (the file is then
    ignored).

    Right means: the digest is `expected`, or, where that is not known, the one noted when the file was
    written.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            noted = (file.metadata() or {}).get("digest")
            images, labels = file.get_tensor("images"), file.get_tensor("labels")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    return (images, labels) if digest(images, labels) == (expected or noted) else None


def write(path: Path, images: Bytes, labels: Bytes) -> None:
    """Keep decoded arrays. A cache that cannot be written (a full disk, a read-only home) is no error."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            arrays = {"images": np.ascontiguousarray(images), "labels": np.ascontiguousarray(labels)}
            save_file(arrays, part, metadata={"digest": digest(images, labels)})
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
