"""The options of a training run, declared once: `adadp train` spends what they ask for, `adadp plan` looks ahead.

    @takes_run_options
    def train(run: RunOptions, yes: ... = False) -> None:

A field of `RunOptions` is an option of every such command, with the name of a setting (`adadp.training.settings`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from adadp.cli import completion
from adadp.cli.output import DataDirOption, option
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.training.settings import Settings


@dataclass(frozen=True)
class RunOptions:
    """What was given on the command line; None for what was left out."""

    dataset: Annotated[
        str | None,
        option(
            "digits, mnist, fashion-mnist, cifar10, cifar100, a .csv, .parquet or .npz file, a folder. [digits]",
            values=completion.DATASETS,
        ),
    ] = None
    dataset_name: Annotated[
        str | None, option("What your own data is called in its ledger, which lies beside it. [the file's name]")
    ] = None
    label: Annotated[
        str | None, option("The label's column, in a file of your own. [label]", values=completion.columns)
    ] = None
    classes: Annotated[
        str | None, option("The class names of your own data, as in no,yes: declared, not read off. [as they occur]")
    ] = None
    drop_other_labels: Annotated[
        bool | None,
        option("Leave out rows of other labels, which are refused otherwise.", "--drop-other-labels"),
    ] = None
    test: Annotated[str | None, option("Held-out data of your own, in another file or folder.")] = None
    test_fraction: Annotated[float | None, option("Or the part of your data to hold out. [0.2]")] = None
    task: Annotated[
        str | None, option("classes or regression: predict a number. [classes]", values=completion.TASKS)
    ] = None
    target_range: Annotated[
        str | None, option("For regression: the number's lowest and highest value, such as 0..100. Others are clipped.")
    ] = None
    number: Annotated[
        list[str] | None,
        option(
            "A column of numbers, or with its range: age=0..120 costs nothing. Repeatable.", values=completion.columns
        ),
    ] = None
    category: Annotated[
        list[str] | None,
        option("A column of categories, or with its values: size=S,M,L. Repeatable.", values=completion.columns),
    ] = None
    text: Annotated[list[str] | None, option("A column of free text. Repeatable.", values=completion.columns)] = None
    date: Annotated[
        list[str] | None,
        option(
            "A column of dates, or with its range: seen=2020-01-01..2026-12-31. Repeatable.", values=completion.columns
        ),
    ] = None
    ignore: Annotated[list[str] | None, option("A column to leave out. Repeatable.", values=completion.columns)] = None
    decimal_comma: Annotated[bool | None, option("Numbers are written 1.234,5.", "--decimal-comma")] = None
    missing: Annotated[bool | None, option("Allow missing numbers and dates.", "--missing")] = None
    person: Annotated[
        str | None,
        option(
            "The column that says whose a row is: the guarantee is then for all rows of one person.",
            values=completion.columns,
        ),
    ] = None
    rows_per_person: Annotated[int | None, option("Most rows of one person in a lot. [8]")] = None
    image_size: Annotated[str | None, option("Resize images of your own, such as 32x32.")] = None
    data_dir: DataDirOption = None
    recipe: Annotated[
        str | None, option("Settings that go together: auto, none, or a name (docs/recipes.md). [auto for images]")
    ] = None
    model: Annotated[str | None, option("tanh-cnn, paper, linear, mlp, resnet. [auto]", values=completion.MODELS)] = (
        None
    )
    algorithm: Annotated[
        str | None, option("adadp, dpsgd, adal, adan, agd, dpopt, sgd. [adadp]", values=completion.ALGORITHMS)
    ] = None
    reading: Annotated[
        str | None,
        option("sound, or the paper's text: example, lot; for dpopt: published. [sound]", values=completion.READINGS),
    ] = None
    epsilon: Annotated[float | None, option("Calibrate the noise to this epsilon for all this run releases. [1.0]")] = (
        None
    )
    budget: Annotated[
        float | None, option("Epsilon that all runs on this data together may spend; fixed by the first of them.")
    ] = None
    spend_the_rest: Annotated[
        bool | None, option("Train although what is left means far more noise or fewer steps.", "--spend-the-rest")
    ] = None
    delta: Annotated[
        float | None, option("The delta of the guarantee. [1e-4, less where N, the number of rows, is above 4,300]")
    ] = None
    noise_multiplier: Annotated[float | None, option("Or give the noise over the bound (sigma).")] = None
    lot: Annotated[int | None, option("Expected examples in a step. [about 4 sqrt(N)]")] = None
    epochs: Annotated[float | None, option("How long, in passes over the data.")] = None
    steps: Annotated[int | None, option("Or how long in steps. [600]")] = None
    lr: Annotated[float | None, option("Learning rate at the start. [the algorithm's]")] = None
    noise_walk: Annotated[
        float | None, option("Or how far noise moves a weight in all, which chooses the rate. [the recipe's]")
    ] = None
    schedule: Annotated[
        str | None, option("constant, linear, exponential, cosine. [the algorithm's]", values=completion.SCHEDULES)
    ] = None
    momentum: Annotated[float | None, option("SGD's momentum. [the algorithm's]")] = None
    max_grad_norm: Annotated[float | None, option("Bound on an example's gradient. [the algorithm's]")] = None
    set_: Annotated[
        list[str] | None, option("Any setting of the algorithm, such as beta=1.5. Repeatable.", "--set")
    ] = None
    pca_noise_multiplier: Annotated[
        float | None, option("Project images by DP-PCA with this noise; its cost is in the printed epsilon.")
    ] = None
    pca_components: Annotated[int | None, option("Directions that DP-PCA keeps. [60]")] = None
    features: Annotated[str | None, option("What images are trained on: pixels, scattering. [the recipe's]")] = None
    directions: Annotated[int | None, option("Directions of features that are kept. [1500]")] = None
    mean_share: Annotated[float | None, option("Part of the budget for the mean of features. [0]")] = None
    moments_share: Annotated[float | None, option("Part of the budget for their second moments. [0]")] = None
    feature_power: Annotated[float | None, option("Features are raised to this power, at most 1. [0.5]")] = None
    no_cache: Annotated[bool | None, option("Keep no copy of features in your cache folder.", "--no-cache")] = None
    preprocessing_share: Annotated[
        float | None, option("Part of the budget for the scales of a table's columns. [0.1]")
    ] = None
    paid_metrics: Annotated[
        bool | None, option("Release figures on held-out rows with noise, out of the same budget.", "--paid-metrics")
    ] = None
    class_weights: Annotated[
        str | None,
        option(
            "Weights of classes in the loss, such as no=1,yes=5; or paid: from counts with noise, out of the budget."
        ),
    ] = None
    microbatch: Annotated[int | None, option("Most examples in memory at a time. [the lot]")] = None
    evaluations: Annotated[int | None, option("How often accuracy is taken on the way. [10]")] = None
    tensorboard: Annotated[
        bool | None,
        option("Also write curves for TensorBoard (extra tensorboard): tensorboard --logdir RUN.", "--tensorboard"),
    ] = None
    device: Annotated[str | None, option("cpu, cuda. [auto]", values=completion.DEVICES)] = None
    seed: Annotated[int | None, option("Repeatable noise and lots. Must stay secret. [none]")] = None
    out: Annotated[str | None, option("The run's folder. [runs/DATASET-ALGORITHM-N]")] = None
    ledger: Annotated[
        str | None,
        option(
            "Charge this ledger: --epsilon is for all that it holds. [your own data: one beside it; else in the folder]"
        ),
    ] = None
    checkpoint_every: Annotated[
        float | None, option("Seconds between checkpoints; 0 for none. Ctrl-C makes one, too. [60]")
    ] = None
    config: Annotated[Path | None, option("A TOML file with any of these options; what is given here wins.")] = None

    def given(self) -> dict[str, Any]:
        """The options that are settings, by the settings' names: None for what was left out."""
        return {name: value for name, value in asdict(self).items() if name not in ("config", "set_")}

    def settings(self) -> Settings:
        """The settings, checked: those of `--config`, and what the command line says in place of them."""
        from adadp.training import settings

        given = self.given()
        values = {} if self.config is None else settings.read_toml(self.config)
        values.update({name: value for name, value in given.items() if value is not None})
        if self.classes is not None:
            values["classes"] = [name.strip() for name in self.classes.split(",")]
        # One of two on the command line takes the place of the other in the file.
        for one, other in (
            ("epsilon", "noise_multiplier"),
            ("noise_multiplier", "epsilon"),
            ("steps", "epochs"),
            ("epochs", "steps"),
            ("lr", "noise_walk"),
            ("noise_walk", "lr"),
        ):
            if given[one] is not None and given[other] is None:
                values.pop(other, None)
        values["settings"] = {**values.get("settings", {}), **dict(_pair(text) for text in self.set_ or ())}
        return settings.from_mapping(values, "the command line" if self.config is None else str(self.config))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--set takes NAME=VALUE, not {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of `RunOptions`, which it gets as its first argument, before its own.

    Typer reads the options off a function's signature, so this makes the one that it reads.
    """
    kinds = get_type_hints(RunOptions, include_extras=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[name])
        for name, field in RunOptions.__dataclass_fields__.items()
    ]
    hints = get_type_hints(command, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in own]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        run = RunOptions(**{each.name: values.pop(each.name) for each in shared})
        command(run, **values)

    del called.__wrapped__  # what typer reads is below
    called.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in (*shared, *own)}
    return called
