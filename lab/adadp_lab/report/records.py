"""How results are written: a file is there as a whole, or not at all."""

from __future__ import annotations

import json
import os
import secrets
from importlib import metadata
from pathlib import Path
from typing import Any


def write(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it: whoever reads the file, or interrupts this, finds no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON."""
    write(path, json.dumps(values, indent=1) + "\n")


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
