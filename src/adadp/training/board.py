"""A run's curves for TensorBoard: `adadp train --tensorboard`, then `tensorboard --logdir RUN`, at once or later.

For the curator's eyes: figures on held-out rows are among them without noise, and the time of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adadp.extras import require
from adadp.training.run_folder import HISTORY, METRICS

FOLDER = "tensorboard"
_GROUPS = {"epsilon": "privacy", "lr": "training"}
"""Where a figure of `metrics.jsonl` is shown; all others are those of held-out rows."""


def require_tensorboard() -> None:
    """Raise `MissingExtraError` where it is not installed."""
    require("tensorboard", "tensorboard", "tensorboard (--tensorboard)")


class Board:
    """Shows what a run adds to `metrics.jsonl` and `history.jsonl` from now on.

    Args:
        folder: the run's.
        on: whether anything is shown.
        step: how many steps were made already; what was shown of later ones is taken back.

    """

    def __init__(self, folder: Path, *, on: bool, step: int) -> None:
        self._read = {path: _size(path) for path in (folder / METRICS, folder / HISTORY)}
        self._writer: Any = None
        if on:
            writer = require("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
            self._writer = writer(str(folder / FOLDER), purge_step=step + 1 if step else None)

    def follow(self) -> None:
        """Show the lines that were added."""
        if self._writer is None:
            return
        for path, before in self._read.items():
            added = path.read_bytes()[before:] if path.exists() else b""
            for line in added.splitlines():
                values = json.loads(line)
                for name, value in _figures(values):
                    self._writer.add_scalar(name, value, values["step"])
            self._read[path] = before + len(added)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def _figures(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values to show of one line of either file."""
    for layer, figures in values.get("layers", {}).items():
        yield f"noise/{layer}", figures["noise"]
        yield f"signal/{layer}", figures["signal"]
    for name, value in values.items():
        if isinstance(value, int | float) and name not in ("step", "samples", "seconds"):
            yield f"{_GROUPS.get(name, 'held-out')}/{name}", value


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
