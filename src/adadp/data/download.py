"""Published files to disk: resumed where they broke off, checked before they get their name."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from pathlib import Path

from adadp.data.catalogue import Download
from adadp.errors import CorruptDataError, DataError

_CHUNK = 1 << 20
_TIMEOUT = 30.0


class DownloadError(DataError):
    """A file could not be fetched: no network, no such file, or the connection broke off."""


def checksum(path: Path, algorithm: str) -> str:
    """Hexadecimal digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def fetch(source: Download, target: Path, *, progress: bool = True) -> Path:
    """Put `source` at `target`, which afterwards has the published checksum; else raise and leave no
    `target`.

    Bytes go to `target` + ".part". A later call asks the server for the rest only; where the server does not
    do that, or the part is not a beginning of the file, it starts again.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    had = part.stat().st_size if part.exists() else 0
    if had < source.size:
        _receive(source, part, had, progress)
    if had and part.stat().st_size >= source.size and not _complete(source, part):
        # What was there before was not a beginning of this file. Without it, one clean attempt.
        part.unlink(missing_ok=True)
        _receive(source, part, 0, progress)
    if part.stat().st_size < source.size:
        raise DownloadError(
            f"{source.url} broke off after {part.stat().st_size} of {source.size} bytes; run it again to go "
            f"on from there"
        )
    if not _complete(source, part):
        part.unlink()
        raise CorruptDataError(
            f"what {source.url} sends does not have the published {source.algorithm} checksum {source.checksum}; it "
            "was deleted. The file may have changed at its source, or something between here and there changes it"
        )
    os.replace(part, target)
    return target


def _complete(source: Download, part: Path) -> bool:
    return part.stat().st_size == source.size and checksum(part, source.algorithm) == source.checksum


def _receive(source: Download, part: Path, offset: int, progress: bool) -> None:
    headers = {"User-Agent": "adadp", **({"Range": f"bytes={offset}-"} if offset else {})}
    try:
        request = urllib.request.Request(source.url, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            resumed = offset > 0 and response.status == 206
            shown = _bar(source, offset if resumed else 0) if progress else nullcontext(_show_nothing)
            with part.open("ab" if resumed else "wb") as file, shown as advance:
                # Never more than was announced: a server that sends without end must not fill the disk.
                left = source.size + 1 - (offset if resumed else 0)
                while left > 0 and (chunk := response.read(min(_CHUNK, left))):
                    file.write(chunk)
                    left -= len(chunk)
                    advance(len(chunk))
    except urllib.error.HTTPError as error:
        if error.code != 416 or not offset:
            raise DownloadError(f"{source.url} could not be fetched: {error}") from error
        # The server has no such range: what was there before is not a beginning of this file.
        part.unlink()
        _receive(source, part, 0, progress)
    except (OSError, HTTPException) as error:
        # A broken connection keeps what came; fetch() then says how to go on. No connection at all ends here.
        if not part.exists() or isinstance(error, urllib.error.URLError):
            raise DownloadError(f"{source.url} could not be fetched: {error}") from error


@contextmanager
def _bar(source: Download, done: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields what moves it. Without rich there is none."""
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _show_nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(source.url.rsplit("/", 1)[-1], total=source.size, completed=done)
        yield lambda count: bar.advance(task, count)


def _show_nothing(count: int) -> None:
    """Move no bar."""
