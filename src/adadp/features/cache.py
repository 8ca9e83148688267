"""Features on disk: images that were mapped once are read the next time.

Features hold what the images hold, so the cache is the curator's alone: its folder and files may be read by their
owner only. A file's name is a digest of the images and of how they were mapped: changed images are other images. It
also names the digest of what the file holds, which is compared when it is read. Whoever can write a file can make
both agree and put one person's image into another's row, so nobody else's file is read, where a cache is shared. Clear
it by removing the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adadp.data.folders import cache_folder

Values = npt.NDArray[Any]

MOST = 4 * 2**30
"""Bytes that are kept; files that were not used for longest go first."""


def folder() -> Path:
    """Return the folder of kept features, which may not exist yet."""
    return cache_folder() / "features"


def read(key: str, shape: tuple[int, int], dtype: npt.DTypeLike = np.float16) -> Values | None:
    """What this user wrote under a key; None if there is nothing, or it is damaged (the file is then removed)."""
    for path in sorted(folder().glob(f"{key}-*.bin")):
        try:
            with path.open("rb") as file:
                if not _is_ours(file.fileno()):
                    continue
                values = np.fromfile(file, dtype=dtype)
            if values.size == shape[0] * shape[1] and _digest(values) == path.stem.partition("-")[2]:
                os.utime(path)
                return values.reshape(shape)
            path.unlink()
        except OSError:
            continue
    return None


def write(key: str, values: Values) -> None:
    """Keep features. A cache that cannot be written (a full disk, a read-only home) is no error."""
    home = folder()
    part = home / f".{key}.{secrets.token_hex(4)}.part"
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        home.chmod(0o700)
        _make_room(home, values.nbytes)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(np.ascontiguousarray(values).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, home / f"{key}-{_digest(values)}.bin")  # a reader never sees half a file
        finally:
            part.unlink(missing_ok=True)


def key_of(how: str, parts: Iterable[npt.NDArray[np.uint8]]) -> str:
    """A key for images and how they are mapped."""
    found = hashlib.blake2b(how.encode(), digest_size=16)
    for part in parts:
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def _is_ours(file: int) -> bool:
    """Whether an open file is this user's; where files have no owners, their folder's rights decide."""
    return not hasattr(os, "geteuid") or os.fstat(file).st_uid == os.geteuid()


def _digest(values: Values) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).hexdigest()


def _make_room(home: Path, wanted: int) -> None:
    """Remove what was not used for longest, and what a crash left half-written."""
    for left in home.glob(".*.part"):
        left.unlink(missing_ok=True)
    files = sorted(home.glob("*.bin"), key=lambda path: path.stat().st_mtime)
    total = wanted + sum(path.stat().st_size for path in files)
    for path in files:
        if total <= MOST:
            return
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
