"""Values that a shell completes after an option, known in a tenth of a second: torch is not imported for them.

    adadp --install-completion      # for the shell that it is called from: bash, zsh, fish, PowerShell
    adadp train --algorithm <TAB>

Names are written down here; a test compares them with the registries. Names that packages add are not completed.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import typer

Values: TypeAlias = "Sequence[str] | Callable[[typer.Context], Iterable[str]]"

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100")
MODELS = ("auto", "tanh-cnn", "paper", "linear", "mlp", "resnet")
ALGORITHMS = ("adadp", "dpsgd", "adal", "adan", "agd", "dpopt", "sgd")
READINGS = ("sound", "example", "lot", "published")
SCHEDULES = ("constant", "linear", "exponential", "cosine")
ACCOUNTANTS = ("pld", "rdp", "theorem1")
TASKS = ("classes", "regression")
DEVICES = ("auto", "cpu", "cuda")

_LONGEST_LINE = 2**16  # characters of a file's first line that are read


def columns(context: typer.Context) -> Iterable[str]:
    """Names of the columns of the .csv that stands before on the line as --dataset; none of another file."""
    path = Path(str(context.params.get("dataset")))
    if path.suffix.lower() != ".csv" or not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            line = file.readline(_LONGEST_LINE)
        names = next(csv.reader([line], delimiter=max(",;\t", key=line.count)), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return [name.strip() for name in names if name.strip().isprintable() and " " not in name.strip()]


def completer(values: Values) -> Callable[[typer.Context], list[str]]:
    """The function that typer calls for an option's values; it keeps those that begin with what is typed."""

    def complete(ctx: typer.Context) -> list[str]:
        return list(values(ctx) if callable(values) else values)

    return complete
