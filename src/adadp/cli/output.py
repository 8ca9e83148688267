"""What commands share: their options, and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adadp.cli.completion import Values, completer


def option(help: str, *names: str, values: Values | None = None) -> Any:
    """An option whose help says itself what is taken where it is left out; a shell completes `values`."""
    complete = None if values is None else completer(values)
    return typer.Option(*names, help=help, show_default=False, autocompletion=complete)


def argument(help: str) -> Any:
    """A positional argument that has to be given."""
    return typer.Argument(help=help, show_default=False)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
RunArgument = Annotated[Path, argument("The run's folder.")]
DataDirOption = Annotated[str | None, option("Where data sets lie.")]


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Two columns: what, and its value."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    console = Console(soft_wrap=False, highlight=False)
    console.print(f"[italic]{escape(title)}[/italic]")
    console.print(table)


def print_list(title: str, items: Sequence[str]) -> None:
    """A heading and its items; nothing where there are none."""
    if not items:
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"\n[bold]{escape(title)}[/bold]")
    grid = Table.grid(padding=(0, 1))
    for item in items:
        grid.add_row("-", escape(item))
    console.print(grid)
