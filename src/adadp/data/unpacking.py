"""How large a file may become when it is unpacked.

A few bytes can claim, or be the compressed form of, more than any memory holds. Such a file is refused before it is
unpacked: a table or an array that people train on is larger than a 256th of what it unpacks to.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from adadp.errors import CorruptDataError

#: Unpacked size in bytes up to which nothing is refused, and how many times its own size a larger file may become.
ALWAYS, RATIO = 2**28, 256


def check_unpacked(path: Path, size: int) -> None:
    """Refuse a file that would unpack to `size` bytes, if that is out of proportion.

    Raises:
        CorruptDataError: it is more than 256 MiB and more than 256 times the file.

    """
    own = path.stat().st_size
    if size > max(ALWAYS, RATIO * own):
        raise CorruptDataError(
            f"{path} has {own:,} bytes and claims to unpack to {size:,}: it is damaged, or was made to fill the "
            "memory. It was not unpacked; put a good copy in its place"
        )


def parquet_size(metadata: Any) -> int:
    """Bytes that a parquet file's metadata claims: of its pages, and of its columns as numbers in memory."""
    pages = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return max(int(pages), 8 * int(metadata.num_rows) * int(metadata.num_columns))


def gunzip(path: Path) -> bytes:
    """Return what a gzip file unpacks to; refused as in `check_unpacked`, after 256 MiB at most."""
    with gzip.open(path) as file:
        content = file.read(ALWAYS + 1)
    check_unpacked(path, len(content))
    if len(content) > ALWAYS:  # in proportion, and larger than any published file
        raise CorruptDataError(f"{path} unpacks to more than {ALWAYS:,} bytes, and no published file does")
    return content
