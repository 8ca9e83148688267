"""A run's folder: everything that is needed to use a trained model, and to believe what is said about it.

| file | |
| --- | --- |
| `config.json` | every setting as it was used, and what the model needs to be built again |
| `model.safetensors` | weights |
| `preprocessing.safetensors` | the fitted preprocessing, where there is one |
| `guarantee.json`, `guarantee.md` | what may be said, for programs and for people |
| `metrics.jsonl` | accuracy and epsilon along the way |
| `result.json` | what `adadp train --json` prints |
| `ledger.jsonl` | what was charged, unless the run was charged to a ledger elsewhere |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from adadp import models, preprocessing
from adadp.accounting.guarantee import Guarantee
from adadp.data import Dataset, Table
from adadp.errors import ConfigurationError
from adadp.training.preparation import Estimator, rows

CONFIG, WEIGHTS, FITTED = "config.json", "model.safetensors", "preprocessing.safetensors"


def create(path: str | Path | None, name: str) -> Path:
    """A new, empty folder at `path`, or the first free one of runs/NAME-1, runs/NAME-2, ..."""
    if path is None:
        number = 1
        while True:
            folder = Path("runs") / f"{name}-{number}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is there already and is not empty: no run is written over another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(folder: Path, config: Mapping[str, Any], model: nn.Module, estimator: Estimator | None) -> None:
    """Write the model, its preprocessing and all settings."""
    _json(folder / CONFIG, config)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    if estimator is not None:
        preprocessing.save(folder / FITTED, estimator)


def write_result(folder: Path, result: Mapping[str, Any], guarantee: Guarantee) -> None:
    """Write what came out and what may be said about it."""
    _json(folder / "result.json", result)
    (folder / "guarantee.json").write_text(guarantee.to_json() + "\n")
    (folder / "guarantee.md").write_text(guarantee.to_markdown())


def add_metrics(folder: Path, values: Mapping[str, Any]) -> None:
    """Append one line to metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def _json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


@dataclass(frozen=True)
class FinishedRun:
    """A trained model with its preprocessing, ready for use."""

    folder: Path
    config: dict[str, Any]
    model: nn.Module
    estimator: Estimator | None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by number."""
        return tuple(self.config["classes"])

    def predict(self, data: Dataset | Table) -> Tensor:
        """The number of the class of each example, through the run's own preprocessing."""
        return predictions(self.model, rows(data, self.estimator))


@torch.no_grad()
def predictions(model: nn.Module, inputs: Tensor, batch: int = 2048) -> Tensor:
    """The class of the largest logit of each row, on the CPU; the model is left in the mode in which it was."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = [model(part.to(device)).argmax(1).cpu() for part in torch.split(inputs, batch)]
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def read(path: str | Path) -> FinishedRun:
    """A run from its folder."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"{folder} is not the folder of a finished run: it has no {CONFIG}")
    try:
        config = json.loads((folder / CONFIG).read_text())
        model = models.build(config["built"], tuple(config["input_shape"]), len(config["classes"]))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{folder} cannot be read as a run: {error}") from error
    fitted = folder / FITTED
    estimator = preprocessing.load(fitted) if fitted.exists() else None
    return FinishedRun(folder, config, model.eval(), estimator)
