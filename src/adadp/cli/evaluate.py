"""`adadp evaluate`: the accuracy of a finished run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from adadp.cli.output import DataDirOption, JsonOption, RunArgument, option, print_list, print_table
from adadp.errors import ConfigurationError


def evaluate(
    run: RunArgument,
    dataset: Annotated[
        str | None, option("A data set by name (its test split) or a path. [the run's own, by name]")
    ] = None,
    label: Annotated[str | None, option("The label's column. [the run's]")] = None,
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """How often a finished run is right, its preprocessing included."""
    from adadp import data
    from adadp.training import run_folder as runs
    from adadp.training.settings import parse_image_size

    finished = runs.read(run)
    config = finished.config
    name = config["dataset"] if dataset is None else dataset
    held: data.Dataset | data.Table
    if name in data.NAMES:
        held = data.load(name, "test", data_dir=data_dir)
        if held.classes != finished.classes:
            raise ConfigurationError(f"{name} has other classes than the run: {', '.join(finished.classes)}")
    elif dataset is None:
        raise ConfigurationError("this run was trained on data of your own: give --dataset with held-out data")
    else:
        held = data.read(
            name, label=label or config["label"], classes=finished.classes, text=config["text"],
            missing=config["missing"], size=parse_image_size(config["image_size"]),
            drop_other_labels=config.get("drop_other_labels", False),
        )  # fmt: skip
    if isinstance(held, data.Dataset) != (config["kind"] == "images"):
        raise ConfigurationError(f"{name}: the run was trained on {config['kind']}, and this is something else")
    if isinstance(held, data.Dataset) and list(held.input_shape) != config["image_shape"]:
        raise ConfigurationError(f"{name} has images of {held.input_shape}, the run's were {config['image_shape']}")
    found = finished.predict(held)
    accuracy = float((found == held.labels).float().mean())
    if json_output:
        values = {"accuracy": accuracy, "examples": len(held), "dataset": name, "run": str(run)}
        typer.echo(json.dumps({**values, "note": data.HELD_OUT_NOTE}))
        return
    print_table(str(run), [("accuracy", f"{accuracy:.2%} on {len(held):,} examples of {name}")])
    print_list("Note", [data.HELD_OUT_NOTE])
