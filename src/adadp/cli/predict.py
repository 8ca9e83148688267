"""`adadp predict`: the classes or numbers that a finished run sees in new data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adadp.cli.output import JsonOption, RunArgument, argument, option
from adadp.errors import ConfigurationError


def predict(
    run: RunArgument,
    file: Annotated[Path, argument("Rows (.csv, .parquet, .npz), images (.npz), an image or a folder of images.")],
    probabilities: Annotated[
        bool, option("Also print how probable the model takes each class to be.", "--probabilities")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Print the class (or number) of each row or image, one on a line, in the order of the file."""
    import torch

    from adadp.data import Table
    from adadp.training import prediction_inputs as unlabelled
    from adadp.training import run_folder as runs

    finished = runs.read(run)
    rows = unlabelled.read(file, finished)
    outputs = finished.outputs(rows)
    shares: list[list[float]] = []
    if not finished.classes:
        if probabilities:
            raise ConfigurationError(f"{run} predicts a number: it has no probabilities")
        assert isinstance(rows, Table)
        found: list[str] | list[float] = rows.in_units(outputs.squeeze(1).clamp(-1, 1)).tolist()
    else:
        found = [finished.classes[number] for number in outputs.argmax(1).tolist()]
        shares = torch.softmax(outputs.double(), 1).tolist() if probabilities else []
    if json_output:
        more = {"classes": list(finished.classes), "probabilities": shares} if probabilities else {}
        typer.echo(json.dumps({"predictions": found, **more, "run": str(run)}))
        return
    if probabilities:
        typer.echo("\t".join(["prediction", *finished.classes]))
    for row, one in enumerate(found):
        text = one if isinstance(one, str) else f"{one:.6g}"
        typer.echo("\t".join([text, *(f"{share:.4f}" for share in shares[row])] if probabilities else [text]))
