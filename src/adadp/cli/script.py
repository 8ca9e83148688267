"""`adadp audit --script train.py:main`: measure what one example does to the releases of a user's own loop."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from adadp.cli.output import print_list, print_table
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.testing import Influence

_HOW = (
    "The function is called with a dataset, several times, and makes model, engine, DataLoader(dataset, ...) and loop "
    "inside: def main(dataset): ... (docs/testing.md)."
)


def run(script: str, dataset_from: str | None, examples: list[str], lots: int, key: int, delta: float) -> Influence:
    """Load the function and its data, and measure."""
    from adadp.testing import influence

    train, path = _function(script)
    dataset = _dataset(dataset_from or f"{path}:dataset", given=dataset_from is not None)
    return influence(train, dataset, examples=examples or "made", lots=lots, key=key, delta=delta)


def show(found: Influence, script: str, json_output: bool) -> None:
    """As a table, or as one line of JSON."""
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    from adadp.accounting.guarantee import round_up

    printed = "none" if found.epsilon is None else round_up(found.epsilon)
    rows = [
        ("verdict", f"{found.verdict}: {found.says}"),
        ("largest effect", f"{found.value:.4g}, where {found.bound:g} is promised"),
        ("epsilon printed", f"{printed} for these lots, at delta {round_up(found.delta)}"),
    ]
    if found.example is not None:
        rows.append(("example", found.example))
    if found.lot is not None:
        rows.append(
            (
                "where",
                f"lot {found.lot}" + (f", {found.kind or 'weights'} {found.parameter}" if found.parameter else ""),
            )
        )
    if found.why:
        rows.append(("because", found.why))
    print_table(f"Influence of one example on {script}", rows)
    print_list("Refused", [found.refused] if found.refused else [])
    print_list("Why there is no number", found.reasons)
    print_list("Not used", [f"{effect.example}: {effect.error}" for effect in found.skipped])
    print_list("What this says", [found.caveat])


def _function(script: str) -> tuple[Callable[[Any], Any], str]:
    path, name = _parts(script, "--script train.py:main")
    function = _found(path, name)
    if not callable(function):
        raise ConfigurationError(f"{script} is not a function. {_HOW}")
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if not required:
        raise ConfigurationError(f"{script} takes no dataset: it would train on the same data in both worlds. {_HOW}")
    return function, path


def _dataset(place: str, given: bool) -> Any:
    path, name = _parts(place, "--dataset-from train.py:data")
    try:
        found = _found(path, name)
    except ConfigurationError:
        if given:
            raise
        raise ConfigurationError(
            f"{path} has no dataset to train on: define dataset there, or a function that returns it, and name it with "
            "--dataset-from train.py:data"
        ) from None
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        return found
    found = found() if callable(found) else found
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise ConfigurationError(f"{place} is not a dataset with __len__ and __getitem__, but a {type(found).__name__}")
    return found


def _parts(text: str, example: str) -> tuple[str, str]:
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ConfigurationError(f"a function is named by its file and name, {example}, not {text!r}")
    return path, name


def _found(path: str, name: str) -> Any:
    """An object of a file, which is run once, as an import would."""
    module = _load(str(Path(path).resolve()))
    if not hasattr(module, name):
        raise ConfigurationError(f"{path} has no {name}")
    return getattr(module, name)


_loaded: dict[str, Any] = {}


def _load(path: str) -> Any:
    if path in _loaded:
        return _loaded[path]
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_script_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    _loaded[path] = module
    return module
