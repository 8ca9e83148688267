"""Optional packages, imported when they are needed. pyproject.toml lists them as extras of adadp."""

from __future__ import annotations

import importlib
from typing import Any

from adadp.errors import MissingExtraError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import and return `module`.

    Raises:
        MissingExtraError: it is not installed. The message says what needs it and which `extra` has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: pip install 'adadp[{extra}]'"
        ) from error
