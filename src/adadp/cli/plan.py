"""`adadp plan`: what `adadp train` would do with the same options, before it spends anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adadp.cli.messages import as_options, warn
from adadp.cli.output import JsonOption, option, print_list, print_table
from adadp.cli.pipeline import warn_about_delta, warn_about_epsilon
from adadp.cli.run_options import RunOptions, takes_run_options
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.training.outlook import Choice, Outlook


@takes_run_options
def plan(
    run: RunOptions,
    examples: Annotated[
        int | None, option("How many rows (or persons) your own data has, held-out ones included: it is not opened.")
    ] = None,
    shape: Annotated[
        str | None,
        option("The shape of an image of your own, as in 3x32x32; or how many columns of numbers your table has."),
    ] = None,
    plot: Annotated[
        Path | None, option("Draw what epsilon, lot and epochs change into this file (.svg, .png).")
    ] = None,
    quick: Annotated[bool, option("Leave out what takes seconds: time, memory, and other choices.", "--quick")] = False,
    yes: Annotated[bool, typer.Option("--yes", hidden=True)] = False,
    json_output: JsonOption = False,
) -> None:
    """Look before you spend: noise, signal, time and memory of a training run, and what other choices would change.

    Takes the options of `adadp train`. No private value is read: your data is not opened. No ledger is charged.
    """
    del yes  # nothing is read off that would have to be confirmed: a line for `adadp train` may be taken as it is
    if plot is not None and quick:
        raise ConfigurationError("--plot draws other choices, which --quick leaves out")
    from adadp.data.outline import parse_shape
    from adadp.training.outlook import FACTORS, look_ahead
    from adadp.training.settings import Settings

    with as_options([*run.given(), "examples", "shape"]):
        settings = run.settings()
        if examples is not None and run.dataset is None and settings.dataset == Settings.dataset:
            settings = replace(settings, dataset="")  # data that has no place yet
        found = look_ahead(
            settings,
            examples=examples,
            shape=None if shape is None else parse_shape(shape),
            measured=not quick,
            factors=() if quick else FACTORS if plot is not None else FACTORS[1:-1],
        )
    if plot is not None:
        from adadp.cli.plan_plot import draw

        draw(plot, found)
    warnings = (*warn_about_delta(found.plan.delta, found.plan.population), *warn_about_epsilon(found.epsilon))
    if found.plan.algorithm.private:
        for warning in warnings:
            warn(warning)
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    _print(found)
    if plot is not None:
        typer.echo(f"\nWhat other choices would change is drawn in {plot}.")


def _print(found: Outlook) -> None:
    from adadp.accounting.composition import canonical
    from adadp.accounting.guarantee import describe

    plan = found.plan
    reading = f" ({plan.algorithm.reading} reading)" if plan.algorithm.reading else ""
    rows = [
        ("algorithm", f"{plan.algorithm.name}{reading}"),
        ("model", f"{plan.model_name}: {found.weights:,} weights are trained"),
        ("privacy", _privacy(found)),
    ]
    if plan.noise_multiplier is not None:
        rows.append(("noise multiplier", f"{plan.noise_multiplier:.5g}: noise over the bound on one example (sigma)"))
    rows += [
        ("lot", f"{plan.lot:,} of {plan.population:,} {plan.noun} on average (rate {plan.rate:.4g})"),
        ("steps", f"{plan.steps:,}, {plan.steps * plan.rate:.4g} epochs"),
        ("learning rate", f"{plan.algorithm.settings['lr']:.4g}, {plan.algorithm.settings['schedule']}"),
    ]
    beside = canonical([(event, 1) for event in plan.events])
    rows += [("released beside", describe(event, count, plan.unit)) for event, count in beside]
    if found.signal is not None:
        signal = found.signal
        rows.append(("signal / noise, a step", f"{signal.whole:.3g} in whole, {signal.direction:.3g} in one direction"))
        rows.append(("all steps", f"{signal.run_whole:.3g} in whole, {signal.run_direction:.3g} in one direction"))
    if found.measured is not None and found.seconds is not None:
        each = f"{_time(found.measured.step)} a step on {found.measured.device}"
        rows.append(("time", f"about {_time(found.seconds)}: {each}"))
        if found.memory is not None:
            rows.append(("memory", f"about {found.memory:,.0f} MiB, {found.measured.data:,.0f} of them the data"))
    rows += [("ledger", text) for text in plan.notices]
    count = f"{plan.population:,} {plan.noun} to train on, about {len(plan.test):,} held out"
    print_table(f"If you trained on {plan.train.name} ({count})", rows)
    if found.choices:
        _print_choices(found)
    print_list("How to read this", _notes(found))


def _privacy(found: Outlook) -> str:
    from adadp.accounting.guarantee import round_up

    plan, delta = found.plan, round_up(found.plan.delta)
    if not plan.algorithm.private:
        return "none: it would have no guarantee"
    if not plan.algorithm.sound:
        claim = plan.claimed_epsilon()
        return "none" if claim is None else f"none; {round_up(claim)} at delta {delta} would be claimed"
    return "none" if found.epsilon is None else f"epsilon {round_up(found.epsilon)} at delta {delta}, for {plan.unit}"


def _print_choices(found: Outlook) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("change", "epsilon", "noise", "lot", "steps", "signal", "time"):
        table.add_column(name, justify="left" if name == "change" else "right", no_wrap=True)
    last = None
    for choice in found.choices:
        if last not in (None, choice.changed):
            table.add_row()
        last = choice.changed
        table.add_row(*_cells(choice, found), style="bold" if choice.value == _now(found, choice.changed) else None)
    console = Console(highlight=False)
    console.print("\n[bold]What other choices would change[/bold] (signal / noise: of all steps, in whole)")
    console.print(table)
    print_list("Refused", [f"{_said(choice)}: {choice.refused}" for choice in found.choices if choice.refused])


def _now(found: Outlook, changed: str) -> float | None:
    plan = found.plan
    now = {"epsilon": plan.epsilon, "noise_multiplier": plan.noise_multiplier, "lot": plan.lot}
    return now.get(changed, plan.steps * plan.rate)


def _said(choice: Choice) -> str:
    value = f"{choice.value:,.0f}" if choice.changed == "lot" else f"{choice.value:.4g}"
    return f"{choice.changed.replace('_multiplier', '')} {value}"


def _cells(choice: Choice, found: Outlook) -> list[str]:
    from adadp.accounting.guarantee import round_up

    said = _said(choice) + ("*" if choice.value == _now(found, choice.changed) else "")
    if choice.refused is not None:
        return [said, "refused"]
    return [
        said,
        "none" if choice.epsilon is None else round_up(choice.epsilon, 3),
        "" if choice.noise_multiplier is None else f"{choice.noise_multiplier:.4g}",
        f"{choice.lot:,}",
        f"{choice.steps:,}",
        "" if choice.signal is None else f"{choice.signal.run_whole:.3g}",
        "" if choice.seconds is None else _time(choice.seconds),
    ]


def _time(seconds: float) -> str:
    """Seconds in words, in one or two digits."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def _notes(found: Outlook) -> list[str]:
    plan = found.plan
    notes = []
    if found.choices:
        notes.append("* is the run as planned; in each line one number is another, and the rest follows from it")
    if found.signal is not None:
        notes.append(
            "signal / noise is the most that can show: the length of a lot's mean gradient, if all its examples agreed "
            "and stood at the bound, over the noise; in whole (all weights), and along that mean's own direction. "
            "Computed from lot, noise, weights and steps; real gradients agree less, and less the longer a run is"
        )
    if found.measured is not None:
        notes.append(
            "time and memory: of private steps on made-up rows on this machine, without reading files and "
            "preprocessing; of other choices in proportion to the lot"
        )
    if plan.units is not None:
        notes.append(
            f"time is for one row a person; with {plan.units.max_rows} each, up to {plan.units.max_rows} times"
        )
    if plan.own_data:
        notes.append(
            "your data was not opened: N and the columns are as you declared them. Held-out rows are drawn by coins, "
            "so N will differ a little. Columns that you leave undeclared would add inputs, and a release if they hold "
            "numbers"
        )
    return notes
