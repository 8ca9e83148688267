"""`adadp train`: from data to a trained model, and what its training cost."""

from __future__ import annotations

import json
import warnings as python_warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adadp.cli.confirmation import confirm
from adadp.cli.messages import as_options, warn
from adadp.cli.output import DataDirOption, JsonOption, option, print_list, print_table
from adadp.cli.pipeline import warn_about_delta, warn_about_epsilon
from adadp.errors import CheckpointWarning, ConfigurationError, InterruptedRunError
from adadp.persons import PERSON

if TYPE_CHECKING:
    from adadp.training.loop import Result
    from adadp.training.planning import Plan


def train(
    dataset: Annotated[
        str | None,
        option("digits, mnist, fashion-mnist, cifar10, cifar100, a .csv, .parquet or .npz file, a folder. [digits]"),
    ] = None,
    dataset_name: Annotated[
        str | None, option("What your own data is called in its ledger, which lies beside it. [the file's name]")
    ] = None,
    label: Annotated[str | None, option("The label's column, in a file of your own. [label]")] = None,
    classes: Annotated[
        str | None, option("The class names of your own data, as in no,yes: declared, not read off. [as they occur]")
    ] = None,
    drop_other_labels: Annotated[
        bool | None,
        option("Leave out rows of other labels, which are refused otherwise.", "--drop-other-labels"),
    ] = None,
    test: Annotated[str | None, option("Held-out data of your own, in another file or folder.")] = None,
    test_fraction: Annotated[float | None, option("Or the part of your data to hold out. [0.2]")] = None,
    task: Annotated[str | None, option("classes or regression: predict a number. [classes]")] = None,
    target_range: Annotated[
        str | None, option("For regression: the number's lowest and highest value, such as 0..100. Others are clipped.")
    ] = None,
    number: Annotated[
        list[str] | None, option("A column of numbers, or with its range: age=0..120 costs nothing. Repeatable.")
    ] = None,
    category: Annotated[
        list[str] | None, option("A column of categories, or with its values: size=S,M,L. Repeatable.")
    ] = None,
    text: Annotated[list[str] | None, option("A column of free text. Repeatable.")] = None,
    date: Annotated[
        list[str] | None, option("A column of dates, or with its range: seen=2020-01-01..2026-12-31. Repeatable.")
    ] = None,
    ignore: Annotated[list[str] | None, option("A column to leave out. Repeatable.")] = None,
    decimal_comma: Annotated[bool | None, option("Numbers are written 1.234,5.", "--decimal-comma")] = None,
    missing: Annotated[bool | None, option("Allow missing numbers and dates.", "--missing")] = None,
    person: Annotated[
        str | None, option("The column that says whose a row is: the guarantee is then for all rows of one person.")
    ] = None,
    rows_per_person: Annotated[int | None, option("Most rows of one person in a lot. [8]")] = None,
    image_size: Annotated[str | None, option("Resize images of your own, such as 32x32.")] = None,
    data_dir: DataDirOption = None,
    model: Annotated[str | None, option("tanh-cnn, paper, linear, mlp, resnet. [auto]")] = None,
    algorithm: Annotated[str | None, option("adadp, dpsgd, adal, adan, agd, dpopt, sgd. [adadp]")] = None,
    reading: Annotated[
        str | None, option("sound, or the paper's text: example, lot; for dpopt: published. [sound]")
    ] = None,
    epsilon: Annotated[
        float | None, option("Calibrate the noise to this epsilon for all this run releases. [1.0]")
    ] = None,
    budget: Annotated[
        float | None, option("Epsilon that all runs on this data together may spend; fixed by the first of them.")
    ] = None,
    spend_the_rest: Annotated[
        bool | None, option("Train although what is left means far more noise or fewer steps.", "--spend-the-rest")
    ] = None,
    delta: Annotated[
        float | None, option("The delta of the guarantee. [1e-4, less where N, the number of rows, is above 4,300]")
    ] = None,
    noise_multiplier: Annotated[float | None, option("Or give the noise over the bound (sigma).")] = None,
    lot: Annotated[int | None, option("Expected examples in a step. [about 4 sqrt(N)]")] = None,
    epochs: Annotated[float | None, option("How long, in passes over the data.")] = None,
    steps: Annotated[int | None, option("Or how long in steps. [600]")] = None,
    lr: Annotated[float | None, option("Learning rate at the start. [the algorithm's]")] = None,
    schedule: Annotated[str | None, option("constant, linear, exponential, cosine. [the algorithm's]")] = None,
    momentum: Annotated[float | None, option("SGD's momentum. [the algorithm's]")] = None,
    max_grad_norm: Annotated[float | None, option("Bound on an example's gradient. [the algorithm's]")] = None,
    set_: Annotated[
        list[str] | None, option("Any setting of the algorithm, such as beta=1.5. Repeatable.", "--set")
    ] = None,
    pca_noise_multiplier: Annotated[
        float | None, option("Project images by DP-PCA with this noise; its cost is in the printed epsilon.")
    ] = None,
    pca_components: Annotated[int | None, option("Directions that DP-PCA keeps. [60]")] = None,
    preprocessing_share: Annotated[
        float | None, option("Part of the budget for the scales of a table's columns. [0.1]")
    ] = None,
    paid_metrics: Annotated[
        bool | None, option("Release figures on held-out rows with noise, out of the same budget.", "--paid-metrics")
    ] = None,
    microbatch: Annotated[int | None, option("Most examples in memory at a time. [the lot]")] = None,
    evaluations: Annotated[int | None, option("How often accuracy is taken on the way. [10]")] = None,
    device: Annotated[str | None, option("cpu, cuda. [auto]")] = None,
    seed: Annotated[int | None, option("Repeatable noise and lots. Must stay secret. [none]")] = None,
    out: Annotated[str | None, option("The run's folder. [runs/DATASET-ALGORITHM-N]")] = None,
    ledger: Annotated[
        str | None,
        option(
            "Charge this ledger: --epsilon is for all that it holds. [your own data: one beside it; else in the folder]"
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None, option("Seconds between checkpoints; 0 for none. Ctrl-C makes one, too. [60]")
    ] = None,
    resume: Annotated[
        Path | None, option("Go on in this run's folder, with its settings; only --seed goes with it.")
    ] = None,
    config: Annotated[Path | None, option("A TOML file with any of these options; what is given here wins.")] = None,
    yes: Annotated[
        bool, option("What is read off your data (classes, kinds of columns) counts as public.", "--yes")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Train a model with differential privacy, and say what may be said about it."""
    given = {
        key: value for key, value in locals().items() if key not in ("config", "json_output", "set_", "yes", "resume")
    }
    if resume is not None:
        more = {**given, "set": set_, "config": config}
        _resume(resume, {key: value for key, value in more.items() if value is not None}, json_output)
        return
    from adadp.training import planning, run_folder, settings

    values = {} if config is None else settings.read_toml(config)
    values.update({key: value for key, value in given.items() if value is not None})
    if classes is not None:
        values["classes"] = [name.strip() for name in classes.split(",")]
    # One of two on the command line takes the place of the other in the file.
    for one, other in (
        ("epsilon", "noise_multiplier"),
        ("noise_multiplier", "epsilon"),
        ("steps", "epochs"),
        ("epochs", "steps"),
    ):
        if given[one] is not None and given[other] is None:
            values.pop(other, None)
    values["settings"] = {**values.get("settings", {}), **dict(_pair(text) for text in set_ or ())}
    where = "the command line" if config is None else str(config)
    with as_options(given):
        plan = planning.Plan(settings.from_mapping(values, where))
        run_folder.require_place(plan.settings.out)
    warnings = (*warn_about_delta(plan.delta, plan.population), *warn_about_epsilon(plan.epsilon))
    warnings = warnings if plan.algorithm.private else ()
    if not json_output:
        _print_plan(plan)
    confirm(plan, yes=yes, quiet=json_output)  # before anything is spent
    for warning in warnings:
        warn(warning)
    _run(plan, json_output, warnings, given)


def _resume(folder: Path, given: dict[str, Any], json_output: bool) -> None:
    """Go on with the run in a folder."""
    wrong = [key for key in given if key not in ("seed", "checkpoint_every")]
    if wrong:
        raise ConfigurationError(
            f"--resume goes on with the settings of {folder}: leave --{wrong[0].replace('_', '-')} out"
        )
    from adadp.training.checkpoints import plan_to_resume

    plan = plan_to_resume(folder, seed=given.get("seed"), checkpoint_every=given.get("checkpoint_every"))
    if not json_output:
        _print_plan(plan)
    _run(plan, json_output, (), ("seed", "checkpoint_every"))


def _run(plan: Plan, json_output: bool, warnings: Sequence[str], given: Collection[str]) -> None:
    from adadp.cli.interrupts import Interrupts
    from adadp.training import loop as training

    with as_options(given), _one_line_warnings(), Interrupts() as interrupts:
        try:
            if json_output:
                result = training.run(plan, None, interrupts.asked)
            else:
                from adadp.cli.progress import Bar

                with Bar(plan) as bar:
                    result = training.run(plan, bar.show, interrupts.asked)
        except InterruptedRunError as stopped:
            typer.echo(f"adadp: {stopped}", err=True)
            raise typer.Exit(130) from None
    if json_output:
        warnings = (*warnings, *([result.remark] if result.remark else []))
        typer.echo(json.dumps({**result.to_dict(), **({"warnings": list(warnings)} if warnings else {})}))
        return
    _print_result(result)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Say in one line, without a place in the code, that the last checkpoint was damaged."""
    with python_warnings.catch_warnings():
        usual = python_warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, CheckpointWarning):
                warn(str(message))
            else:
                usual(message, category, *place, **more)

        python_warnings.showwarning = show
        yield


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--set takes NAME=VALUE, not {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def _print_plan(plan: Plan) -> None:
    rows = []
    for name, value in plan.describe().items():
        if name == "seed" and value is not None:
            value = "given"  # it must stay secret
        if name == "settings":
            rows += [(f"  {key}", f"{item}") for key, item in value.items()]
        elif value not in (None, False, [], ()):
            rows.append((name.replace("_", "-"), f"{value:.6g}" if isinstance(value, float) else f"{value}"))
    print_table(f"Training on {plan.train.name}: {plan.population:,} {plan.noun}", rows)
    guarantee = plan.algorithm.guarantee
    typer.echo(f"guarantee: {guarantee if plan.units is None else guarantee.replace('one example', PERSON)}")


def _print_result(result: Result) -> None:
    from adadp.accounting.guarantee import round_up
    from adadp.cli.figures import print_classes, rows_of

    guarantee = result.guarantee
    epsilon = "none" if guarantee.epsilon is None else round_up(guarantee.epsilon)
    rows = rows_of(result.metrics, "held-out examples")
    if result.plan.ledger is None:
        rows.append(("epsilon", epsilon))
    else:
        alone = result.run_guarantee.epsilon
        rows.append(("epsilon of this run", "none" if alone is None else round_up(alone)))
        counted = "this run, the only one so far" if result.runs == 1 else f"all {result.runs:,} runs together"
        rows.append((f"epsilon of {result.plan.dataset_name!r}", f"{epsilon}: {counted}. This is the one to publish"))
    if result.claimed_epsilon is not None:
        rows.append(("claimed epsilon", f"{round_up(result.claimed_epsilon)} (Theorem 1 on the training steps alone)"))
    rows += [
        ("delta", round_up(guarantee.delta)),
        ("guarantee", result.sentence()),
        ("steps", f"{result.steps:,}"),
        ("time", f"{result.seconds:.1f} s"),
        ("run", str(result.folder)),
    ]
    print_table("Trained", rows)
    print_list(
        "This rests on" if guarantee.epsilon is not None else "Why there is no guarantee",
        guarantee.assumptions if guarantee.epsilon is not None else guarantee.reasons,
    )
    print_classes(result.metrics)
    print_list("Note", [result.to_dict()["note"]])
    if result.remark is not None:
        warn(result.remark)
