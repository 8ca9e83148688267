"""A run's folder: everything that is needed to use a trained model, and to believe what is said about it.

| file | |
| --- | --- |
| `config.json` | every setting as it was used, what the model needs to be built again, digests of the next two files |
| `model.safetensors` | weights |
| `preprocessing.safetensors` | the fitted preprocessing, where there is one |
| `guarantee.json`, `guarantee.md` | what may be said, for programs and for people |
| `releases.json` | what the guarantee is about: each kind of release, of this run and of all runs on the data |
| `history.jsonl` | how much of the released gradients is noise, along the way (`history`) |
| `metrics.jsonl` | loss, accuracy and epsilon along the way |
| `tensorboard` | the last two as curves, where they are asked for (`board`) |
| `result.json` | what `adadp train --json` prints |
| `run.json`, `checkpoint.safetensors` | to go on after an interruption (`checkpoints`) |
| `ledger.jsonl` | what was charged, unless the run was charged to a ledger elsewhere |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
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
from adadp.training.held_out import outputs_of
from adadp.training.preparation import Estimator, rows
from adadp.training.settings import parse_image_size, parse_range

CONFIG, WEIGHTS, FITTED = "config.json", "model.safetensors", "preprocessing.safetensors"
GUARANTEE, RELEASES, RESULT = "guarantee.json", "releases.json", "result.json"
METRICS, HISTORY = "metrics.jsonl", "history.jsonl"


def require_place(path: str | Path | None) -> None:
    """Refuse a folder that `create` could not make, before anything is spent."""
    folder = Path("runs") if path is None else Path(path)
    if path is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _taken(folder)
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written" if above.is_dir() else "is a file"
        raise ConfigurationError(f"out must be a folder that can be made, and {folder} is not: {above} {why}")


def _taken(folder: Path) -> ConfigurationError:
    return ConfigurationError(
        f"out must be a new folder: {folder} is there already and is not empty: no run is written over another"
    )


def create(path: str | Path | None, name: str) -> Path:
    """A new, empty folder at `path`, or the first free one of runs/NAME-1, runs/NAME-2, ...

    It is made for its owner alone, since some of its files are for the curator.
    """
    if path is None:
        number = 1
        while True:
            folder = Path("runs") / f"{name}-{number}"
            try:
                folder.mkdir(mode=0o700, parents=True)
                return folder
            except FileExistsError:
                number += 1
            except OSError as error:
                raise _no_folder(folder, error) from None
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _taken(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(folder, error) from None
    return folder


def _no_folder(folder: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"out must be a folder that can be made, and {folder} is not: {error.strerror}")


def write(folder: Path, config: Mapping[str, Any], model: nn.Module, estimator: Estimator | None) -> None:
    """Write the model, its preprocessing and all settings."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    if estimator is not None:
        preprocessing.save(folder / FITTED, estimator)
    _json(folder / CONFIG, {**config, "sha256": _digests(folder)})


def write_result(folder: Path, result: Mapping[str, Any], guarantee: Guarantee, releases: Mapping[str, Any]) -> None:
    """Write what came out, what may be said about it, and the releases that this is about."""
    (folder / GUARANTEE).write_text(guarantee.to_json() + "\n")
    (folder / "guarantee.md").write_text(guarantee.to_markdown())
    _json(folder / RELEASES, releases)
    _json(folder / RESULT, result)


def add_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line to a file of lines of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def forget_after(folder: Path, step: int) -> None:
    """Leave out lines after this step, which a run that is resumed writes again."""
    for path in (folder / METRICS, folder / HISTORY):
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that a crash tore
        return math.inf


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

    @property
    def target(self) -> tuple[float, float] | None:
        """Lowest and highest value of the number that is predicted; None for classes."""
        return parse_range(self.config.get("target_range"))

    def outputs(self, data: Dataset | Table) -> Tensor:
        """The model's outputs on each example, through the run's own preprocessing: (n, classes), or (n, 1)."""
        return outputs_of(self.model, rows(data, self.estimator))

    def predict(self, data: Dataset | Table) -> Tensor:
        """The number of the class of each example."""
        return self.outputs(data).argmax(1)


def read(path: str | Path) -> FinishedRun:
    """A run from its folder."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"{folder} is not the folder of a finished run: it has no {CONFIG}")
    try:
        config = _upgraded(_checked(json.loads((folder / CONFIG).read_text())))
        if "sha256" in config and config["sha256"] != _digests(folder):  # folders of version 0.2 have none
            raise ValueError(f"{WEIGHTS} or {FITTED} is damaged, or is not the file that was written with {CONFIG}")
        model = _model(config, load_file(folder / WEIGHTS))
        fitted = folder / FITTED
        estimator = preprocessing.load(fitted) if fitted.exists() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, SafetensorError) as error:
        raise ConfigurationError(f"{folder} cannot be read as a run: {error}") from error
    return FinishedRun(folder, config, model.eval(), estimator)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that predictions come from, those that are there."""
    found = {}
    for name in (WEIGHTS, FITTED):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _model(config: Mapping[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """The run's model with its weights; nothing is built before its size is known to be theirs."""
    built = config["built"], tuple(config["input_shape"]), len(config["classes"])
    with torch.device("meta"):
        outline = {name: value.shape for name, value in models.build(*built).state_dict().items()}
    if outline != {name: value.shape for name, value in weights.items()}:
        raise ValueError(f"the weights are not those of {CONFIG}'s model {config['built']!r}")
    if not all(value.is_floating_point() for value in weights.values()):
        raise ValueError("the weights are not floating-point numbers")
    model = models.build(*built)
    model.load_state_dict(weights)
    return model


def _checked(config: Any) -> dict[str, Any]:
    """`config`, if it has all that predicting needs, of the right types."""
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is not a table of settings")
    table = config.get("kind") == "table"
    wanted: dict[str, Callable[[Any], bool]] = {
        "built": lambda value: isinstance(value, str),
        "dataset": lambda value: isinstance(value, str),
        "kind": lambda value: value in ("table", "images"),
        "input_shape": _sizes,
        "classes": _texts,
        "text": _texts,
        "label": lambda value: value is None or isinstance(value, str),
        "missing": lambda value: isinstance(value, bool),
        "image_size": lambda value: value is None or parse_image_size(value) is not None,
        "image_shape": lambda value: table or (_sizes(value) and len(value) == 3),
        "maximum": lambda value: table or (type(value) in (int, float) and value > 0),
    }
    for name, fits in wanted.items():
        if name not in config or not fits(config[name]):
            raise ValueError(f"{CONFIG} has {f'{name} {config[name]!r}' if name in config else f'no {name}'}")
    return dict(config)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(size) is int and size > 0 for size in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what an older version did not write; it called categories text."""
    return config if "category" in config else {**config, "category": config["text"], "text": []}
