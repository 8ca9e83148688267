"""The `adadp` command: its own commands, and those that other packages add by entry point.

A package adds a command with

    [project.entry-points."adadp.commands"]
    bench = "adadp_lab.bench.command:bench"

where the object is a function that typer understands, or a `typer.Typer`. It is imported only to run it or to print
its help: `adadp --help` imports all of them, `adadp train` and a shell's completion none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from adadp.cli.messages import OneLineGroup

GROUP = "adadp.commands"


class Commands(OneLineGroup):
    """The group of all commands: those registered here first, then those of installed packages, by name."""

    _names_are_enough = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which help prints them."""
        own = super().list_commands(ctx)
        return [*own, *sorted(point.name for point in entry_points(group=GROUP) if point.name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None. Commands of this package cannot be replaced by others."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in entry_points(group=GROUP, name=cmd_name):
            return TyperCommand(cmd_name) if self._names_are_enough else _command(point.load(), cmd_name)
        return None

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Completions of a command's name: other packages' commands are named, not imported, for a shell waits."""
        self._names_are_enough = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._names_are_enough = False


def _command(found: Any, name: str) -> Any:
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(found)
        found = app
    command = get_command(found)
    command.name = name
    return command


def run_alone(function: Callable[..., object]) -> None:
    """Run one command by itself (`python -m PACKAGE`), with the same reports of bad input."""
    app = typer.Typer(cls=OneLineGroup, add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    app.callback()(lambda: None)  # a group, though of one
    app([function.__name__, *sys.argv[1:]], prog_name="adadp")
