"""`adadp predict`: the classes that a finished run sees in new data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adadp.cli.output import JsonOption, RunArgument, argument


def predict(
    run: RunArgument,
    file: Annotated[Path, argument("Rows (.csv, .parquet, .npz), images (.npz), an image or a folder of images.")],
    json_output: JsonOption = False,
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
