"""Fitted preprocessing on disk, for later prediction: one safetensors file, JSON in its header, no pickle."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from adadp.accounting.events import Gaussian
from adadp.errors import ConfigurationError
from adadp.preprocessing.encoding import DeclaredOneHot, HashedOneHot
from adadp.preprocessing.free_text import FreeText
from adadp.preprocessing.pca import DPPCA
from adadp.preprocessing.scaler import DPStandardScaler
from adadp.preprocessing.shaped_features import ShapedFeatures
from adadp.preprocessing.table_preprocessor import TablePreprocessor

_KNOWN = (DPPCA, DPStandardScaler, HashedOneHot, DeclaredOneHot, FreeText, ShapedFeatures, TablePreprocessor)
_CLASSES = {known.__name__: known for known in _KNOWN}
_FORMAT = "adadp-preprocessing-1"


def save(path: str | os.PathLike[str], estimator: object) -> None:
    """Write a fitted estimator of this package: settings and released values, never the seed."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    state = _encode(estimator, arrays, "")
    target = Path(path)
    # Written beside the target and renamed, so that a reader never sees half a file.
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(arrays, part, metadata={"format": _FORMAT, "state": json.dumps(state)})
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote: a fitted estimator that transforms exactly as the saved one did."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("format") != _FORMAT:
            raise ConfigurationError(f"{path} is not a file of adadp.preprocessing (format {metadata.get('format')!r})")
        return _decode(json.loads(metadata["state"]), arrays)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is damaged and cannot be read: {error}") from error


def _encode(value: Any, arrays: dict[str, np.ndarray[Any, Any]], key: str) -> Any:
    if type(value).__name__ in _CLASSES and isinstance(value, _CLASSES[type(value).__name__]):
        params = {k: v for k, v in value.get_params(deep=False).items() if k != "random_state"}
        fitted = {k: v for k, v in vars(value).items() if k.endswith("_") and not k.startswith("_")}
        return {
            "class": type(value).__name__,
            "params": {k: _encode(v, arrays, f"{key}{k}.") for k, v in params.items()},
            "fitted": {k: _encode(v, arrays, f"{key}{k}.") for k, v in fitted.items()},
        }
    if isinstance(value, np.ndarray):
        name = key.rstrip(".")
        arrays[name] = np.ascontiguousarray(value)
        return {"array": name}
    if isinstance(value, Gaussian):
        return {"gaussian": value.noise_multiplier}
    if isinstance(value, dict):
        return {"dict": {str(k): _encode(v, arrays, f"{key}{k}.") for k, v in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v, arrays, f"{key}{i}.") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(v, arrays, f"{key}{i}.") for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(f"a {type(value).__name__} cannot be saved without pickle")


def _decode(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        estimator = _CLASSES[value["class"]](**{k: _decode(v, arrays) for k, v in value["params"].items()})
        for name, fitted in value["fitted"].items():
            if not name.endswith("_") or name.startswith("_"):  # no method is replaced
                raise ConfigurationError(f"{name!r} is not a fitted value")
            setattr(estimator, name, _decode(fitted, arrays))
        if isinstance(estimator, TablePreprocessor):
            estimator.upgrade()
        return estimator
    if "array" in value:
        return arrays[value["array"]]
    if "gaussian" in value:
        return Gaussian(value["gaussian"])
    if "tuple" in value:
        return tuple(_decode(v, arrays) for v in value["tuple"])
    return {k: _decode(v, arrays) for k, v in value["dict"].items()}
