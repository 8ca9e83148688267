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
# Followed from others, chosen by the machine, or of the one folder.
_LEFT_OUT = (
    "epochs",
    "device",
    "out",
    "ledger",
    "seed",
    "classes",
    "settings",
    "noise_multiplier",
    "data_dir",
    "dataset",
)


def rerun(settings: Mapping[str, Any], *, public: bool = False) -> str:
    """`adadp train` with the options that give this run's settings; what takes its default is left out.

    A run that is made again draws other noise, and costs its epsilon again.

    Args:
        settings: of `config.json`.
        public: whether paths are replaced by what stands for them.

    """
    return " ".join(shlex.quote(word) for word in ("adadp", "train", *_words(settings, public)))


def _words(settings: Mapping[str, Any], public: bool) -> Iterator[str]:
    known = settings.get("dataset") in NAMES
    if public and not known:
        yield from ("--dataset", "YOUR-DATA")
    elif isinstance(settings.get("dataset"), str):
        yield from ("--dataset", settings["dataset"])
    # A run without a `kind` has not ended: its classes are those that were asked for.
    if settings.get("classes") and settings.get("classes_declared", "kind" not in settings):
        yield from ("--classes", ",".join(map(str, settings["classes"])))
    for name, default in _DEFAULTS.items():
        value = settings.get(name)
        if name in _LEFT_OUT or value is None or value in (default, False, [], ()):
            continue
        if name == "test" and public:
            value = "TEST-DATA"
        yield from _option(name, value)
    if settings.get("noise_multiplier") is not None and settings.get("epsilon") is None:
        yield from _option("noise_multiplier", settings["noise_multiplier"])
    own = settings.get("settings")
    for name, value in (own if isinstance(own, dict) else {}).items():
        if value is not None:
            yield from _option(name, value) if name in _NAMED else ("--set", f"{name.replace('_', '-')}={value}")


def _option(name: str, value: Any) -> Iterator[str]:
    word = f"--{name.replace('_', '-')}"
    if value is True:
        yield word
    else:
        for each in value if isinstance(value, list | tuple) else [value]:
            yield from (word, f"{each}")
