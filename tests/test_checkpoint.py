"""adadp.checkpoint: whole files or none, and what is damaged is noticed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from adadp.checkpoint import Checkpoint, before, read, write
from adadp.errors import CheckpointError


def made(number: int) -> Checkpoint:
    tensors = {
        "weights": torch.full((40, 5), float(number)),
        "half": torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
        "count": torch.tensor(number),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    return Checkpoint({"number": number, "text": "ä"}, tensors)


def number_at(path: Path) -> int:
    found = read(path).checkpoint
    assert torch.equal(found.tensors["weights"], made(found.values["number"]).tensors["weights"])
    return int(found.values["number"])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.safetensors"
    write(path, made(3))
    found = read(path)
    assert (found.path, found.refused) == (path, "")
    assert found.checkpoint.values == {"number": 3, "text": "ä"}
    for name, tensor in made(3).tensors.items():
        assert found.checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.checkpoint.tensors[name], tensor)
    with safe_open(path, framework="pt") as file:  # it is an ordinary safetensors file
        assert json.loads(file.metadata()["values"])["number"] == 3
    assert os.stat(path).st_mode & 0o077 == 0


def test_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for number in range(4):
        write(path, made(number))
    assert (number_at(path), number_at(before(path))) == (3, 2)
    assert {file.name for file in tmp_path.iterdir()} == {"c", "c.before"}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "values", "version", "noise", "header"])
def test_a_damaged_file_is_refused_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    write(path, made(1))
    write(path, made(2))
    data = path.read_bytes()
    changed: dict[str, Callable[[], bytes]] = {
        "truncated": lambda: data[:-7],
        "flipped": lambda: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "empty": lambda: b"",
        "values": lambda: data.replace(rb"\"number\": 2", rb"\"number\": 7"),
        "version": lambda: data.replace(b'"version":"1"', b'"version":"9"'),
        "noise": lambda: os.urandom(500),
        "header": lambda: (2**62).to_bytes(8, "little") + data[8:],
    }
    if damage == "missing":
        path.unlink()
    else:
        assert changed[damage]() != data
        path.write_bytes(changed[damage]())
    found = read(path)
    assert found.path == before(path)
    assert found.checkpoint.values["number"] == 1
    assert str(path) in found.refused
    assert "\n" not in found.refused
    before(path).write_bytes(b"also")
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        read(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path, Checkpoint({"a": 1}, {"b": torch.ones(3)}))
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read(path)


@pytest.mark.parametrize("call", ["write", "fsync", "open", "replace", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_of_the_disk_is_one_line_and_earlier_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = tmp_path / "c"
    write(path, made(1))
    write(path, made(2))

    def failing(*arguments: Any, **rest: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    if call == "link":  # not every file system has hard links
        write(path, made(3))
        monkeypatch.undo()
        assert (number_at(path), number_at(before(path))) == (3, 2)
        return
    with pytest.raises(CheckpointError) as refused:
        write(path, made(3))
    monkeypatch.undo()
    assert os.strerror(number) in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert number_at(path) == 2
    assert read(path).refused == ""
    assert not list(tmp_path.glob(".*"))
    write(path, made(4))
    assert number_at(path) == 4


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one, as far as a process may have it: the system refuses to write on."""
    code = (
        "import sys, resource, torch; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from adadp.checkpoint import Checkpoint, write\n"
        "path = Path(sys.argv[1]); write(path, Checkpoint({}, {'a': torch.zeros(10)}))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "write(path, Checkpoint({}, {'a': torch.zeros(10000)}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c"), *sys.path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("is as it was")
    assert "could not be written: File too large" in done.stderr
    assert len(read(tmp_path / "c").checkpoint.tensors["a"]) == 10
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_after_a_kill_at_any_moment_there_is_a_whole_one(tmp_path: Path) -> None:
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from adadp.checkpoint import Checkpoint, write\n"
        "path, number = Path(sys.argv[1]), 0\n"
        "while True:\n"
        "    number += 1\n"
        "    write(path, Checkpoint({'number': number}, {'weights': torch.full((40, 5), float(number))}))\n"
        "    if number == 1: print('ready', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "c"), *sys.path], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(200):
            number_at(tmp_path / "c")
            assert read(tmp_path / "c").refused == ""
        child.send_signal(signal.SIGKILL)
    assert number_at(tmp_path / "c") > 1
    assert read(tmp_path / "c").refused == ""
