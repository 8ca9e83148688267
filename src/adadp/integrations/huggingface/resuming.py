"""What a trainer's checkpoint needs for a private run to go on from it: `adadp.pt` beside optimizer and scheduler."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adadp.engine import PrivacyEngine
from adadp.errors import CheckpointError

FILE = "adadp.pt"
_OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True)
class Saved:
    """A private run's checkpoint.

    Attributes:
        engine: position, clipping state, and the ledger where that is in memory (`PrivacyEngine.state_dict`).
        noise_multiplier: of the run, which goes on with it.
        steps: planned for the whole run.
        spending: what the ledger held for the weights.

    """

    engine: dict[str, Any]
    noise_multiplier: float
    steps: int
    spending: Any


def save(folder: str, engine: PrivacyEngine, noise_multiplier: float, steps: int) -> None:
    """Write `adadp.pt` into a checkpoint's folder, between two lots."""
    saved = {"engine": engine.state_dict(), "noise_multiplier": noise_multiplier, "steps": steps}
    torch.save(saved, Path(folder) / FILE)


def read(folder: str) -> Saved:
    """The private run that a checkpoint was made of.

    Raises:
        CheckpointError: the checkpoint is not one of a private trainer, or cannot be read.

    """
    path = Path(folder) / FILE
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {FILE}: it is not the checkpoint of a private trainer (or its budget was spent), "
            "and there is no run to go on with. Weights that were trained without this data, or whose cost is in this "
            "ledger, can be loaded with from_pretrained()."
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        spending = torch.load(Path(folder) / _OPTIMIZER, map_location="cpu", weights_only=True)["adadp"]
        return Saved(found["engine"], found["noise_multiplier"], found["steps"], spending)
    except (OSError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{folder} cannot be read ({type(error).__name__}): resume from an earlier checkpoint"
        ) from error
