"""How much of each run's last reservation is left, so that a run that was killed is not charged for what it never made.

The file `<ledger>.left` has one slot for each run: the number of the record that reserved last, and how many of its
releases are left. It is written before each release without waiting for the disk. What a process wrote is read by every
later process as long as the system has not been restarted, however the process ended; after a restart it is not known
which writes reached the disk. So a slot counts only if it was written since the system was started (`boot_id`), and in
this very file: a copy that is put back does not know what was released since it was made.

Guarantee: a slot that counts never says that more is left than was not released.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from pathlib import Path

from adadp.errors import LedgerError

SUMS = ".sums"
"""Ends the name of the file with the digests of a ledger's released sums (`adadp.mechanism.attempts`)."""

_SLOT = struct.Struct("<QQQ")  # record, left, check


@cache
def boot_id() -> str | None:
    """The name of the time since this system was started; None where it has none, and slots never count."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def file_number(file: int) -> int:
    """What tells an open file from its copies."""
    return os.fstat(file).st_ino


def _check(record: int, left: int, number: int) -> int:
    return (record * 0x9E3779B97F4A7C15 ^ left * 0xC2B2AE3D27D4EB4F ^ number * 0xD6E8FEB86659FD93 ^ 0xADAD) % 2**64


class Unused:
    """The slots of one ledger's runs, which are numbered from 0. Whoever writes holds the ledger's lock."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + ".left")
        self._sums = ledger.with_name(ledger.name + SUMS)
        self._file: int | None = None
        self._number = 0

    def write(self, run: int, record: int, left: int) -> None:
        """Note that `left` of what record number `record` reserved are left. Raises where that cannot be written."""
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                self._number = file_number(self._file)
            os.pwrite(self._file, _SLOT.pack(record, left, _check(record, left, self._number)), run * _SLOT.size)
        except OSError as error:
            raise LedgerError(f"{self.path} could not be written: {error}. Nothing may be released") from error

    def left(self, run: int, record: int) -> int:
        """How many of what `record` reserved were not released; 0 where that is not known."""
        try:
            with self.path.open("rb") as file:
                number, data = file_number(file.fileno()), file.read()[run * _SLOT.size : (run + 1) * _SLOT.size]
        except OSError:
            return 0
        if len(data) < _SLOT.size:
            return 0
        found, left, check = _SLOT.unpack(data)
        return int(left) if found == record and check == _check(found, left, number) else 0

    def sync_digests(self) -> None:
        """Wait until all that dead runs wrote of their sums is on the disk."""
        if self._sums.exists():
            file = os.open(self._sums, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
