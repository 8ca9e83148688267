"""Which sums had the noise of which lot and attempt, so that no noise is ever added to two sums.

With a seed, noise and coins of a lot follow from (lot, attempt). A run that was interrupted and is resumed with its
seed draws them again. Whoever saw S + noise and S' + noise could subtract, and has S - S' without any noise: that
happens if weights, state, data, code or a library's rounding are not what they were. So the sums themselves are
compared, just before the noise: a keyed digest of each lot's sums, and of some noise, is written down before they are
released, and where the resumed run comes to a lot that is written down, its sums must have that digest.

- They have: what is released is, bit for bit, what was released then. It says nothing new, and is not charged again.
- They have not: nothing is released, and the attempt is ended for good. The next resumed run makes a new attempt: other
  coins, other noise, charged again.
- The lot is not written down: it was not released, so its noise is fresh. It is charged, unless the interrupted run had
  reserved it in the ledger already.

A new attempt has a random name, so that it meets no earlier one. Without a seed there is nothing to compare: noise and
coins come from fresh entropy, and every lot is charged.

The key follows from the seed: without the seed, digests show which lots of which attempts were equal, and nothing else.

Guarantee: a (lot, attempt) of a seed is the noise of at most one release of the line of runs that resume one another,
as long as ledger and digests (`<ledger>.sums`) are kept together. A copied file of digests is not gone on with: in it a
new attempt begins.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from adadp.accounting import unused
from adadp.accounting.events import Event
from adadp.errors import CheckpointError, NotTheSameRunError
from adadp.mechanism.sums import BoundedSums, Stddev
from adadp.randomness import Randomness

_LINE = re.compile(r"[0-9a-f]{16} \d+ (from \d+ \d+ \d+|ended \d+|\d+ [0-9a-f]{32})")


def path_of(ledger: Path) -> Path:
    """Where the digests of a ledger's runs are."""
    return ledger.with_name(ledger.name + unused.SUMS)


class Attempt:
    """The digests of one attempt of one run with a seed. `start` or `resume` comes first.

    Args:
        path: the file; runs that are open at the same time may share it.
        randomness: the run's, with its attempt.

    """

    def __init__(self, path: Path, randomness: Randomness) -> None:
        self._path, self._key = path, randomness.key_for("digests of sums")
        self._name = f"{hashlib.blake2b(b'name', key=self._key, digest_size=8).hexdigest()} {randomness.attempt}"
        self._noise = _some_noise(randomness)
        self._known: dict[int, str] = {}
        self._spare: dict[Event, int] = {}  # releases that the ledger holds for this attempt and that were not made
        self._file: int | None = None

    def start(self, lot: int, charged: int) -> None:
        """Begin to write digests, before `lot`; the ledger holds `charged` steps of this attempt."""
        self._append(f"from {lot} {charged} {unused.file_number(self._open())}")
        self.sync()

    def resume(self, lot: int, charged: Mapping[Event, int], runs: int) -> bool:
        """Go on from `lot`, where the ledger holds these steps of so many runs that made this attempt.

        Each run that died may have been charged for one release that it did not come to write down, and not make. It
        is left for one of the same cost. What other runs were charged for pays for nothing here: they made it.

        Returns:
            False if that must not be: digests are missing from there on or damaged, the attempt has ended, or this is a
            copy of the file, whose original may have gone on with the same noise.

        Raises:
            CheckpointError: more was released than the ledger holds.

        """
        began, lines = None, self._lines()
        number = unused.file_number(self._open())
        for words in lines or ():
            if words[0] == "from" and began is None:
                began = int(words[1]), int(words[2]), int(words[3])
            elif words[0] == "ended":
                return False
            elif words[0] != "from":
                self._known[int(words[0])] = words[1]
        if lines is None or began is None or began[0] > lot or began[2] != number:
            return False
        spare = sum(charged.values()) - began[1] - len(self._known)
        if spare < 0:
            raise CheckpointError(
                f"{self._path} knows of {len(self._known):,} releases of this run, and its ledger holds {-spare:,} "
                "fewer: the ledger was put back to an earlier state. Put back the one that belongs to it"
            )
        if spare > runs:
            return False
        kinds = [event for event, count in charged.items() if count]
        self._spare = {kinds[0]: spare} if len(kinds) == 1 else {}
        self.sync()  # what is trusted now must be there after a restart too
        return True

    def _lines(self) -> list[list[str]] | None:
        """The words of this attempt's lines, without its name; None where the file is not what was written."""
        try:
            *lines, torn = self._path.read_text().split("\n")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError):
            return None
        if torn:  # a write that did not end: its lot was not released
            os.truncate(self._path, sum(len(line) + 1 for line in lines))
        found = []
        for line in lines:
            if _LINE.fullmatch(line) is None:
                return None
            if line.startswith(self._name + " "):
                found.append(line.split(" ")[2:])
        return found

    def admit(self, lot: int, sums: BoundedSums, stddev: Stddev, event: Event, charge: Callable[[Event], None]) -> None:
        """Admit the release of `sums` with the noise of `lot`, and charge `event` for it unless it is paid for.

        Raises:
            NotTheSameRunError: this noise was added to other sums. Nothing may be released.

        """
        digest = self._digest(lot, sums, stddev)
        known = self._known.get(lot)
        if known is not None:
            if hmac.compare_digest(known, digest):
                return
            self._append(f"ended {lot}")
            self.sync()
            raise NotTheSameRunError(
                f"lot {lot} was released before the interruption, and its gradients are not those of then: weights, "
                "data, code, a library or the number of threads changed, or the model draws random numbers of its own "
                "(dropout). The same noise on both would come off by subtraction, so nothing was released. Resume "
                "again: lots are then drawn anew, with other noise, and charged again."
            )
        if self._spare.get(event, 0):
            self._spare[event] -= 1
        else:
            charge(event)
        self._append(f"{lot} {digest}")  # if the process dies before this, the release was not made, and is paid for
        self._known[lot] = digest

    def _digest(self, lot: int, sums: BoundedSums, stddev: Stddev) -> str:
        found = hashlib.blake2b(f"{self._name} {lot}".encode() + self._noise, key=self._key, digest_size=16)
        for name, value in sums.items():
            for part in (value, _as_tensor(stddev[name])):
                found.update(f"{name} {part.dtype} {list(part.shape)}".encode())
                found.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return self._file

    def _append(self, words: str) -> None:
        line = f"{self._name} {words}\n".encode()
        try:
            if os.write(self._open(), line) != len(line):
                raise OSError("a line was written in part")
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error}. Nothing was released") from error

    def sync(self) -> None:
        """Wait for the disk: before the run ends in the ledger, and before digests are relied on."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Sync, and close the file."""
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None


def _some_noise(randomness: Randomness) -> bytes:
    """Numbers of a stream of their own. They are others where another torch or processor makes others of one seed.

    Then equal sums would get another noise, and be a second release. Short and long draws are made in different ways.
    """
    stream = randomness.spawn("some noise")
    kinds = ((dtype, count) for dtype in (torch.float32, torch.float64) for count in (8, 64))
    return b"".join(stream.normal(torch.empty(count, dtype=dtype)).numpy().tobytes() for dtype, count in kinds)


def _as_tensor(value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def on_cpu(parameters: Mapping[str, Tensor]) -> bool:
    """Whether sums of these parameters can be compared: on a GPU the same work does not give the same bits."""
    return all(parameter.device.type == "cpu" for parameter in parameters.values())


__all__ = ["Attempt", "on_cpu", "path_of"]
