"""Packages that only some formats need, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from adadp.data.errors import MissingExtraError


def require(module: str, package: str, purpose: str) -> Any:
    """Import `module`, or say how to install `package`, which `purpose` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: pip install 'adadp[data]' (or {package})"
        ) from error
