"""Checkpoints on disk: one safetensors file with JSON in its header and a digest of both. No pickle.

    checkpoint.safetensors           the last one
    checkpoint.safetensors.before    the one before

Guarantee: after a crash at any point, or an error while writing, at least one of the two is whole. A file that was
truncated or changed is noticed and not used. The digest is no signature: whoever can write the file can make it fit.
Nothing private depends on that, because what a resumed run releases is charged by its ledger, whatever the file says.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from adadp.errors import CheckpointError

FORMAT, VERSION = "adadp-checkpoint", 1
_LENGTH = 8  # bytes of a safetensors file that say how long its header is


@dataclass(frozen=True)
class Checkpoint:
    """JSON values, and tensors by name, which are copies on the CPU."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read, from which file, and why it is not the last one ("" if it is)."""

    checkpoint: Checkpoint
    path: Path
    refused: str = ""


def before(path: Path) -> Path:
    """Where the checkpoint before the last one is."""
    return path.with_name(path.name + ".before")


def write(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Put a checkpoint at `path`, on the disk, and keep the one that was there as `before(path)`.

    Raises:
        CheckpointError: it could not be written, in one line. Earlier ones are as they were.

    """
    path = Path(path)
    tensors = {name: _on_cpu(value) for name, value in checkpoint.tensors.items()}
    values = json.dumps(checkpoint.values, sort_keys=True, allow_nan=False)
    header = {"format": FORMAT, "version": str(VERSION), "values": values, "digest": _digest(values, tensors)}
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_synced(part, save(tensors, metadata=header))
            if path.exists():
                _keep(path)
            os.replace(part, path)
            _sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        kept = f"; the one that is there, {path}, is as it was" if path.exists() else ""
        raise CheckpointError(f"the checkpoint {path} could not be written: {reason}{kept}") from error


def read(path: str | os.PathLike[str]) -> Found:
    """The checkpoint at `path`; if it is missing or damaged, the one before, and why.

    Raises:
        CheckpointError: neither is there and whole. The message says what is wrong with each.

    """
    path = Path(path)
    refused: list[str] = []
    for file in (path, before(path)):
        try:
            return Found(_read(file), file, "; ".join(refused))
        except CheckpointError as error:
            refused.append(str(error))
    raise CheckpointError("; ".join(refused) + ". There is nothing to resume from")


def _read(path: Path) -> Checkpoint:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror}") from None
    try:
        header = _header(data)
        if header["version"] != str(VERSION):
            version = header["version"]
            raise CheckpointError(f"the checkpoint {path} is of version {version}, and this adadp reads {VERSION}")
        tensors = load(data)
        values = header["values"]
        if header["digest"] != _digest(values, tensors):
            raise ValueError("it does not match its digest")
        parsed = json.loads(values)
        if not isinstance(parsed, dict):
            raise ValueError("its values are not a table")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"the checkpoint {path} was truncated or changed, and is not used: {error}") from None
    return Checkpoint(parsed, tensors)


def _header(data: bytes) -> Mapping[str, str]:
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > len(data) - _LENGTH:
        raise ValueError("its header is not whole")
    header = json.loads(data[_LENGTH : _LENGTH + length])["__metadata__"]
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
    return dict(header)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _digest(values: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(values.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{len(name)} {name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def _keep(path: Path) -> None:
    """Make the checkpoint at `path` the one before. It stays there until the next one takes its place."""
    link = before(path).with_name(f".{before(path).name}.{secrets.token_hex(4)}.part")
    try:
        os.link(path, link)
    except OSError:  # no hard links here: then `path` is missing for a moment, and `read` takes the one before
        os.replace(path, before(path))
        return
    try:
        os.replace(link, before(path))
    finally:
        link.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


__all__ = ["Checkpoint", "Found", "before", "read", "write"]
