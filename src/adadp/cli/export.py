"""`adadp export`: a finished run as others may have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adadp.cli.messages import warn
from adadp.cli.output import JsonOption, RunArgument, argument, option, print_table


def export(
    run: RunArgument,
    folder: Annotated[Path, argument("A new folder for what others may have.")],
    without_guarantee: Annotated[
        bool, option("Export a run whose guarantee is none, too; its card says so.", "--without-guarantee")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Write weights, preprocessing and a model card into a new folder, for use without adadp.

    Nothing that only the curator may see goes there: no rows, no figures that were not paid for, no seeds, no paths.
    """
    from adadp.training.export import export as write

    found = write(run, folder, without_guarantee=without_guarantee)
    if found.guarantee.epsilon is None:
        warn(f"this model has no guarantee: its weights may give records away. Do not publish {folder}")
    if json_output:
        values = {"folder": str(found.folder), "files": list(found.files), "guarantee": found.guarantee.to_dict()}
        typer.echo(json.dumps(values))
        return
    print_table(f"Exported to {found.folder}", [("files", ", ".join(found.files))])
    typer.echo(found.guarantee.sentence())
    typer.echo("Read README.md before you publish it: names of the data, its columns and its classes are in it.")
