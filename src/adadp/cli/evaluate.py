"""`adadp evaluate`: how good a finished run is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adadp.cli import completion
from adadp.cli.output import DataDirOption, JsonOption, RunArgument, option, print_list, print_table
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.data import Dataset, Table
    from adadp.training.run_folder import FinishedRun


def evaluate(
    run: RunArgument,
    dataset: Annotated[
        str | None,
        option(
            "A data set by name (its test split) or a path. [the rows that the run held out]",
            values=completion.DATASETS,
        ),
    ] = None,
    label: Annotated[str | None, option("The label's column. [the run's]")] = None,
    data_dir: DataDirOption = None,
    seed: Annotated[int | None, option("The run's seed, if it was given one: its split follows from it.")] = None,
    json_output: JsonOption = False,
) -> None:
    """How often a finished run is right, its preprocessing included."""
    from adadp.cli.figures import print_classes, rows_of
    from adadp.training import held_out
    from adadp.training import run_folder as runs

    finished = runs.read(run)
    name = finished.config["dataset"] if dataset is None else dataset
    held = _held_out(finished, name, label, data_dir, seed, own=dataset is None)
    metrics = held_out.exact(held, finished.outputs(held), balanced=finished.config.get("class_weights") is not None)
    note = held_out.note(name, None, paid=False)
    if json_output:
        values = {"accuracy": metrics.values.get("accuracy"), "examples": len(held), "dataset": name, "run": str(run)}
        typer.echo(json.dumps({**values, "metrics": metrics.to_dict(), "note": note}))
        return
    print_table(str(run), rows_of(metrics, f"examples of {name}"))
    print_classes(metrics)
    print_list("Note", [note])


def _held_out(
    run: FinishedRun, name: str, label: str | None, data_dir: str | None, seed: int | None, *, own: bool
) -> Dataset | Table:
    """The rows that the run held out, or those of another place."""
    from adadp import data

    config = run.config
    if name in data.NAMES:
        held: Dataset | Table = data.load(name, "test", data_dir=data_dir)
        if held.classes != run.classes:
            raise ConfigurationError(f"{name} has other classes than the run: {', '.join(run.classes)}")
    elif own:
        held = _same_split(run, seed)
    else:
        options = _options(config)
        held = data.read(name, **{**options, "label": label or options["label"], "classes": run.classes or None})
    if isinstance(held, data.Dataset) != (config["kind"] == "images"):
        raise ConfigurationError(f"{name}: the run was trained on {config['kind']}, and this is something else")
    if isinstance(held, data.Dataset) and list(held.input_shape) != config["image_shape"]:
        raise ConfigurationError(f"{name} has images of {held.input_shape}, the run's were {config['image_shape']}")
    return held


def _same_split(run: FinishedRun, seed: int | None) -> Dataset | Table:
    """The rows that were held out when the run was trained, drawn again.

    Raises:
        ConfigurationError: the split cannot be had again, or the file has changed: rows that were trained on would
            pass for held out.

    """
    from adadp import data
    from adadp.randomness import derived

    config = run.config
    rows, persons = config.get("rows"), config.get("persons")
    if rows is None and persons is None:
        raise ConfigurationError("this run was trained on data of your own: give --dataset with held-out data")
    split = config["split_seed"]
    if split is None and config["test"] is None:
        if seed is None:
            raise ConfigurationError("this run was given a seed, which is not stored: give it again with --seed")
        split = derived(seed, "split")
    given = {**_options(config), "classes": run.classes or None}
    given |= {"test": config["test"], "test_fraction": config["test_fraction"], "seed": split}
    try:
        pair = data.read_held_out(config["dataset"], **given)
    except data.DataNotFoundError as error:
        raise ConfigurationError(f"{error}: give --dataset with held-out data") from error
    found, then = (pair.count, persons) if rows is None else (len(pair.train) + len(pair.test), rows)
    if found != then:
        whose = "persons" if rows is None else "rows"
        raise ConfigurationError(
            f"{config['dataset']} has other {whose} than when the run was trained ({then:,} then), so the rows that "
            "were held out cannot be told: give --dataset with held-out data"
        )
    return pair.test


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """How the run's data was read."""
    from adadp.training.planning import OF_OWN_DATA, read_options
    from adadp.training.settings import from_mapping

    names = (*OF_OWN_DATA, "task", "missing", "image_size")
    return read_options(from_mapping({name: config[name] for name in names if name in config}, "the run's config.json"))
