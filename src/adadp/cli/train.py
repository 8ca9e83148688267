"""`adadp train`: from data to a trained model, and what its training cost."""

from __future__ import annotations

import json
import warnings as python_warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adadp.cli.confirmation import confirm
from adadp.cli.messages import as_options, warn
from adadp.cli.output import JsonOption, option, print_list, print_table
from adadp.cli.pipeline import warn_about_delta, warn_about_epsilon
from adadp.cli.run_options import RunOptions, takes_run_options
from adadp.cli.several import saying_errors, speaking_for_all
from adadp.errors import CheckpointWarning, ConfigurationError, InterruptedRunError
from adadp.persons import PERSON

if TYPE_CHECKING:
    from adadp.distributed.group import Group
    from adadp.training.planning import Plan
    from adadp.training.result import Result


@takes_run_options
def train(
    run: RunOptions,
    resume: Annotated[
        Path | None, option("Go on in this run's folder, with its settings; only --seed goes with it.")
    ] = None,
    yes: Annotated[
        bool, option("What is read off your data (classes, kinds of columns) counts as public.", "--yes")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Train a model with differential privacy, and say what may be said about it."""
    from adadp.training.together import settled_together

    given = ("seed", "checkpoint_every") if resume is not None else tuple(run.given())

    def settle() -> Plan:
        """In process 0 alone."""
        with as_options(given):
            return _new(run, group, yes, json_output) if resume is None else _resumed(run, resume, group, json_output)

    with speaking_for_all() as group:
        plan = settled_together(group, settle)
        _run(plan, json_output, given)


def _new(run: RunOptions, group: Group, yes: bool, json_output: bool) -> Plan:
    """The plan of a new run: shown and confirmed before anything is spent."""
    from adadp.training import planning, run_folder

    plan = planning.Plan(run.settings(), group=group)
    run_folder.require_place(plan.settings.out)
    if not json_output:
        _print_plan(plan)
    confirm(plan, yes=yes, quiet=json_output)
    for warning in _warnings(plan):
        warn(warning)
    return plan


def _warnings(plan: Plan) -> tuple[str, ...]:
    if plan.resumed or not plan.algorithm.private:
        return ()
    return (*warn_about_delta(plan.delta, plan.population), *warn_about_epsilon(plan.epsilon))


def _resumed(run: RunOptions, folder: Path, group: Group, json_output: bool) -> Plan:
    """The plan of the run in a folder."""
    from adadp.training.checkpoints import plan_to_resume

    given = {**run.given(), "set": run.set_, "config": run.config}
    wrong = [key for key, value in given.items() if value is not None and key not in ("seed", "checkpoint_every")]
    if wrong:
        raise ConfigurationError(
            f"--resume goes on with the settings of {folder}: leave --{wrong[0].replace('_', '-')} out"
        )
    plan = plan_to_resume(folder, seed=run.seed, checkpoint_every=run.checkpoint_every, group=group)
    if not json_output:
        _print_plan(plan)
    return plan


def _run(plan: Plan, json_output: bool, given: Collection[str]) -> None:
    from adadp.cli.interrupts import Interrupts
    from adadp.training import loop as training

    # An error is said while signals are only noted: torchrun sends one when another process has died.
    with Interrupts() as interrupts, saying_errors(plan.group), as_options(given), _one_line_warnings():
        try:
            if json_output or not plan.group.first:
                result = training.run(plan, None, interrupts.asked)
            else:
                from adadp.cli.progress import Bar

                with Bar(plan) as bar:
                    result = training.run(plan, bar.show, interrupts.asked)
        except InterruptedRunError as stopped:
            if plan.group.first:
                typer.echo(f"adadp: {stopped}", err=True)
            raise typer.Exit(130) from None
    if not plan.group.first:
        return
    if json_output:
        warnings = (*_warnings(plan), *([result.remark] if result.remark else []))
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


def _print_plan(plan: Plan) -> None:
    rows, settings = [], plan.settings
    unused = {"rows_per_person": settings.person is None, "pca_components": settings.pca_noise_multiplier is None}
    for name, value in plan.describe().items():
        if name == "seed" and value is not None:
            value = "given"  # it must stay secret
        if name == "settings":
            rows += [(f"  {key}", f"{item}") for key, item in value.items()]
        elif value not in (None, False, [], ()) and not unused.get(name):
            rows.append((name.replace("_", "-"), f"{value:.6g}" if isinstance(value, float) else f"{value}"))
    print_table(f"Training on {plan.train.name}: {plan.population:,} {plan.noun}", rows)
    guarantee = plan.algorithm.guarantee
    typer.echo(f"guarantee: {guarantee if plan.units is None else guarantee.replace('one example', PERSON)}")


def _print_result(result: Result) -> None:
    from adadp.accounting.guarantee import round_up
    from adadp.cli.figures import print_classes, rows_of

    guarantee = result.guarantee
    epsilon = "none" if guarantee.epsilon is None else round_up(guarantee.epsilon)
    counted = result.plan.noun if result.plan.settings.paid_metrics else "examples"
    rows = rows_of(result.metrics, f"held-out {counted}")
    if result.plan.ledger is None:
        rows.append(("epsilon", epsilon))
    else:
        alone = result.run_guarantee.epsilon
        rows.append(("epsilon of this run", "none" if alone is None else round_up(alone)))
        counted = "this run, the only one so far" if result.runs == 1 else f"all {result.runs:,} runs together"
        rows.append((f"epsilon of {result.plan.dataset_name!r}", f"{epsilon}: {counted}. This is the one to publish"))
    if result.claimed_epsilon is not None:
        rows.append(("claimed epsilon", f"{round_up(result.claimed_epsilon)} (Theorem 1 on the training steps alone)"))
    if result.class_weights is not None:
        rows.append(("class weights", ", ".join(f"{name} {value:.3g}" for name, value in result.class_weights.items())))
    rows += [
        ("delta", round_up(guarantee.delta)),
        ("guarantee", result.sentence()),
        ("steps", f"{result.steps:,}"),
        ("time", f"{result.seconds:.1f} s"),
        ("run", str(result.folder)),
    ]
    if result.plan.settings.tensorboard:
        rows.append(("curves", f"tensorboard --logdir {result.folder} (for the curator's eyes only)"))
    print_table("Trained", rows)
    print_list(
        "This rests on" if guarantee.epsilon is not None else "Why there is no guarantee",
        guarantee.assumptions if guarantee.epsilon is not None else guarantee.reasons,
    )
    print_classes(result.metrics)
    print_list("Note", [result.to_dict()["note"]])
    if result.remark is not None:
        warn(result.remark)
