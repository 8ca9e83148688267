"""Records on disk that can only grow: JSON lines in a hash chain, and their count and head in a second file.

Every line holds the hash of the line before it, so an edited line breaks every later one. The head file
(`<name>.head`) holds the number of lines and the last hash, so a file that lost its end is seen too.

Guarantee: when `append` returns, the record is on the disk. After a crash at any point the file holds every
record whose `append` returned, and at most one more. Files of which fewer records can be read than were written are
refused, unless both were put back together to an earlier state, or rewritten with hashes that fit: keep a copy of the
head elsewhere for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

from adadp.errors import ConfigurationError, LedgerError, LedgerNotice

try:
    import fcntl
except ImportError:  # Windows: ledgers in memory work, files can be read and not written
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]

_START = hashlib.sha256(b"adadp ledger").hexdigest()
_SLOT = 256
_LOOK_AGAIN = 0.2  # seconds between two looks at a file that another process holds

#: The files that this process may append to, by device and inode, each with the process's id: a fork inherits the set.
_HELD: set[tuple[int, int, int]] = set()


def canonical_json(value: object) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a ledger holds plain JSON values only: {error}") from None


def _hash(record: Record) -> str:
    return hashlib.sha256(canonical_json(record).encode()).hexdigest()


def _head_slot(count: int, head: str) -> bytes:
    body = {"count": count, "head": head}
    text = canonical_json({**body, "check": _hash(body)[:16]})
    return text.ljust(_SLOT - 1).encode() + b"\n"


def _read_slot(data: bytes) -> tuple[int, str] | None:
    """(count, head) of one slot of the head file; None if it is empty or was torn by a crash."""
    try:
        value = json.loads(data)
        body = {"count": value["count"], "head": value["head"]}
        return (int(value["count"]), str(value["head"])) if value["check"] == _hash(body)[:16] else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Chain:
    """One file of chained records. Reading needs no lock; only the one process that holds it may append."""

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise LedgerError(f"a ledger is a file, and {str(path)!r} is a folder")
        self.path = path
        self.head_path = path.with_name(path.name + ".head")
        self._file: int | None = None
        self._head_file: int | None = None
        self._count, self._head = 0, _START
        self._size = 0
        self._head_lags = False  # a crash came between the last record and its slot of the head file
        self._broken = False

    def _refuse(self, reason: str) -> LedgerError:
        return LedgerError(f"the ledger {self.path} is refused: {reason}. Nothing was changed")

    def exists(self) -> bool:
        """Whether there is anything to verify."""
        return self.path.exists() or self.head_path.exists()

    def read(self) -> list[Record]:
        """Every record, verified against chain and head file. Raises `LedgerError` with what is wrong."""
        try:
            records, _ = self._read()
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be read: {error.strerror or error}") from error
        return records

    def _read_head(self) -> tuple[int, str, bool]:
        """Count and hash of the newest slot that can be read, and whether the other slot can be read too."""
        try:
            data = self.head_path.read_bytes()
        except FileNotFoundError:
            if self.path.exists() and self.path.stat().st_size > 0:
                raise self._refuse(f"its head file {self.head_path.name} is missing") from None
            return 0, _START, True
        slots = [_read_slot(data[place * _SLOT : (place + 1) * _SLOT]) for place in (0, 1)]
        known = [slot for place, slot in enumerate(slots) if slot is not None and slot[0] % 2 == place]
        if not known:
            raise self._refuse(f"its head file {self.head_path.name} is damaged")
        return *max(known), len(known) == 2

    def _read(self) -> tuple[list[Record], int]:
        """The records and how many bytes they take; anything after that is a record torn by a crash."""
        # The head first: a writer appends to the file before it moves the head, so the file is never behind.
        count, head, whole = self._read_head()
        data = self.path.read_bytes() if self.path.exists() else b""
        *lines, torn = data.split(b"\n")
        records: list[Record] = []
        heads = [_START]
        for number, line in enumerate(lines, 1):
            record, own = self._parse(line, number)
            if record.get("n") != number or record.get("prev") != heads[-1] or _hash(record) != own:
                raise self._refuse(f"line {number} was edited, or lines before it were removed or reordered")
            heads.append(own)
            records.append(record)
        most = max(count, self._count)
        if len(records) < most:
            raise self._refuse(f"it was truncated: {most} records were written and {len(records)} are left")
        if not whole and (len(records) == count if count else len(records) > 1):
            # A crash tears a slot after the line that it is about was written. Without that line the slot was damaged
            # in another way, and may have known of a line that is gone; and a new head file knows of none.
            raise self._refuse(f"its head file {self.head_path.name} is damaged, and may have known of more records")
        if heads[count] != head:
            raise self._refuse(f"record {count} is not the one that its head file knows: it was rewritten")
        if heads[self._count] != self._head:
            raise self._refuse(f"record {self._count} is not the one that was read before: it was rewritten")
        self._count, self._head = len(records), heads[-1]
        self._head_lags = bool(records) and not (whole and count == len(records))
        return records, len(data) - len(torn)

    def _parse(self, line: bytes, number: int) -> tuple[Record, str]:
        try:
            record = json.loads(line)
            own = record.pop("hash")
            if canonical_json({**record, "hash": own}).encode() != line:
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ConfigurationError):
            raise self._refuse(f"line {number} is not a record: it was edited or damaged") from None
        return record, own

    @property
    def locked(self) -> bool:
        """Whether this process may append."""
        return self._file is not None

    def lock(self, wait: float = 0.0) -> list[Record]:
        """Become the only one that may append; returns the records as they are now, verified.

        Where another process holds the file, wait for it for at most `wait` seconds, and say so once. Another ledger
        of this process is not waited for: nothing would let go of the file meanwhile.
        """
        if self._broken:
            raise self._refuse("an earlier write to it failed; open it again")
        if fcntl is None:  # two processes that write at once would both spend the same budget
            raise LedgerError(
                f"the ledger {self.path} cannot be written: this system has no POSIX file locks. Keep the ledger in "
                "memory (no path), or train under Linux, macOS or WSL"
            )
        try:
            return self._lock(wait)
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be written: {error}") from error

    def _lock(self, wait: float) -> list[Record]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        # The file holds the key of its fingerprints, so it is its owner's alone.
        file = os.open(self.path, flags, 0o600)
        try:
            self._hold(file, wait)
            records, size = self._read()
            if not self.head_path.exists():
                self._make_head()  # before the first line: a line without a head file would be refused
            self._head_file = os.open(self.head_path, os.O_RDWR)
            if os.fstat(file).st_size > size:
                # A crash tore this record before its `append` returned, so nothing was released on its
                # account.
                os.ftruncate(file, size)
            self._size = size
            self._require_ours(file, self._head_file)
            if self._head_lags:
                self._move_head(self._head_file, self._count, self._head)
        except BaseException:
            os.close(file)
            if self._head_file is not None:
                os.close(self._head_file)
                self._head_file = None
            raise
        self._file = file
        _HELD.add(_identity(file))
        return records

    def _hold(self, file: int, wait: float) -> None:
        """Take the lock on the open file, or raise `LedgerError` after `wait` seconds."""
        until, said = time.monotonic() + wait, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if _identity(file) in _HELD:
                    raise LedgerError(
                        f"the ledger {self.path} is in use by an earlier run of this process, which has not ended: "
                        "call engine.close() (or ledger.close(), run.close()) on it first"
                    ) from None
                if time.monotonic() >= until:
                    waited = f" {wait:g} s were waited." if wait else ""
                    raise LedgerError(
                        f"the ledger {self.path} is in use: a run of another process holds it.{waited} Wait for it to "
                        "end, or give this run a ledger of its own and add the costs"
                    ) from None
            if not said:
                said = True
                warnings.warn(
                    f"the ledger {self.path} is in use by another process: waiting up to {wait:g} s for its run to end",
                    LedgerNotice,
                    stacklevel=2,
                )
            time.sleep(_LOOK_AGAIN)

    def _make_head(self) -> None:
        """In one move, so that a crash does not leave an empty head file behind."""
        draft = self.head_path.with_name(self.head_path.name + ".new")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, _head_slot(0, _START))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, self.head_path)
        self._sync_folder()

    @staticmethod
    def _move_head(head_file: int, count: int, head: str) -> None:
        """Two slots take turns, so that a crash in this write leaves the other one whole."""
        os.pwrite(head_file, _head_slot(count, head), (count % 2) * _SLOT)
        os.fsync(head_file)

    def _require_ours(self, file: int, head_file: int) -> None:
        """Refuse when a path leads elsewhere than to the open file (an editor saves so), or the size is not ours."""
        for path, opened in ((self.path, file), (self.head_path, head_file)):
            if not path.exists() or not os.path.samestat(os.stat(path), os.fstat(opened)):
                raise self._refuse(f"{path.name} was removed or replaced while it was open")
        if os.fstat(file).st_size != self._size:
            raise self._refuse("something else wrote to it while it was open")

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def append(self, body: Record) -> None:
        """Write one record and return when it is on the disk, and the head after it."""
        if self._file is None or self._head_file is None:
            raise LedgerError(f"the ledger {self.path} is not open for writing")
        if self._broken:
            raise self._refuse("an earlier write to it failed; open it again")
        self._require_ours(self._file, self._head_file)
        record = {"n": self._count + 1, "prev": self._head, **body}
        head = _hash(record)
        line = canonical_json({**record, "hash": head}).encode() + b"\n"
        self._broken = True  # until everything below has happened
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("the record was written in part")
            os.fsync(self._file)
            count = self._count + 1
            self._move_head(self._head_file, count, head)
        except OSError as error:
            reason = f"the ledger {self.path} could not be written: {error}. Nothing may be released"
            raise LedgerError(reason) from error
        self._count, self._head = count, head
        self._size += len(line)
        self._broken = False

    def unlock(self) -> None:
        """Let other processes append."""
        if self._file is not None:
            _HELD.discard(_identity(self._file))
        for file in (self._file, self._head_file):
            if file is not None:
                os.close(file)
        self._file = self._head_file = None


def _identity(file: int) -> tuple[int, int, int]:
    found = os.fstat(file)
    return os.getpid(), found.st_dev, found.st_ino
