"""Where data is looked for, in order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = "ADADP_DATA"


def cache_folder() -> Path:
    """Return adadp's cache folder, which may not exist yet. $XDG_CACHE_HOME moves it on every system."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "adadp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "adadp"
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "adadp" / "Cache"
    return Path.home() / ".cache" / "adadp"


def candidates(
    folders: tuple[str, ...], system_folders: tuple[str, ...], data_dir: str | os.PathLike[str] | None
) -> list[Path]:
    """List the folders that may hold a data set's files: data_dir, $ADADP_DATA, the cache, the system's."""
    roots = [Path(data_dir)] if data_dir is not None else []
    if os.environ.get(ENVIRONMENT):
        roots.append(Path(os.environ[ENVIRONMENT]))
    roots.append(cache_folder() / "data")
    return [root / folder for root in roots for folder in folders] + [Path(f) for f in system_folders]
