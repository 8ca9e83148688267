"""`adadp predict`: the classes that a finished run sees in new data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            help="Rows (.csv, .parquet, .npz), images (.npz), an image or a folder of images.", show_default=False
        ),
    ],
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Print the class of each row or image, one on a line, in the order of the file."""
    from adadp.training import prediction_inputs as unlabelled
    from adadp.training import run_folder as runs

    finished = runs.read(run)
    found = finished.predict(unlabelled.read(file, finished)).tolist()
    names = [finished.classes[number] for number in found]
    if json_output:
        typer.echo(json.dumps({"predictions": names, "run": str(run)}))
    else:
        typer.echo("\n".join(names))
