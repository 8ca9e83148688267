"""Optional packages, imported when they are needed. pyproject.toml lists them as extras of adadp."""

from __future__ import annotations

import importlib
from typing import Any

from adadp.errors import MissingExtraError


def require(module: str, extra: str | None, purpose: str) -> Any:
    """Import and return `module`. `extra` is the extra of adadp that has it; None: it is in `lab`, beside the library.

    Raises:
        MissingExtraError: it is not installed. The message says what needs it and what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        source = "./lab (in adadp's repository)" if extra is None else f"'adadp[{extra}]'"
        raise MissingExtraError(f"{purpose} needs {package}, which is not installed: pip install {source}") from error
