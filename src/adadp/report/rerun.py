"""The command that makes a run again, from the settings that it noted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from adadp.data import NAMES
from adadp.training.settings import Settings

_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_NAMED = ("lr", "schedule", "momentum", "max_grad_norm")
_PLACES = {"test": "TEST-DATA", "ledger": "LEDGER", "data_dir": "DATA-DIR"}  # what stands for a path
# Follow from others, are chosen by the machine, belong to the one folder, or are written below in their own way.
_LEFT_OUT = ("epochs", "device", "out", "seed", "classes", "settings", "noise_multiplier", "dataset")


BREAK = " \\\n    "
"""Between options: a shell goes on with the next line."""


def rerun(settings: Mapping[str, Any], *, public: bool = False) -> str:
    """`adadp train` with the options that give this run's settings; what takes its default is left out.

    A run that is made again draws other noise, and costs its epsilon again.

    Args:
        settings: of `config.json`.
        public: whether paths are replaced by what stands for them.

    """
    lines = "adadp train"
    for word in _words(settings, public):
        lines += f"{BREAK if word.startswith('--') else ' '}{shlex.quote(word)}"
    return lines


def given(value: Any) -> bool:
    """Whether a setting was given: 0 is a value, an empty list and False are not."""
    return value is not None and value is not False and value not in ([], (), {})


def _words(settings: Mapping[str, Any], public: bool) -> Iterator[str]:
    known = settings.get("dataset") in NAMES
    if public and not known:
        yield from ("--dataset", "YOUR-DATA")
    elif isinstance(settings.get("dataset"), str):
        yield from ("--dataset", settings["dataset"])
    # A run without a `kind` has not ended: its classes are those that were asked for.
    classes, declared = settings.get("classes"), settings.get("classes_declared", "kind" not in settings)
    if isinstance(classes, list) and classes and declared:
        yield from ("--classes", ",".join(map(str, classes)))
    for name, default in _DEFAULTS.items():
        value = settings.get(name)
        if name in _LEFT_OUT or not given(value) or value == default:
            continue
        yield from _option(name, _PLACES[name] if public and name in _PLACES else value)
    if settings.get("noise_multiplier") is not None and settings.get("epsilon") is None:
        yield from _option("noise_multiplier", settings["noise_multiplier"])
    own = settings.get("settings")
    for name, value in (own if isinstance(own, dict) else {}).items():
        follows = name == "lr" and settings.get("noise_walk") is not None
        if value is not None and not follows:
            yield from _option(name, value) if name in _NAMED else ("--set", f"{name.replace('_', '-')}={value}")


def _option(name: str, value: Any) -> Iterator[str]:
    word = f"--{name.replace('_', '-')}"
    if value is True:
        yield word
    else:
        for each in value if isinstance(value, list | tuple) else [value]:
            yield from (word, f"{each}")
