"""`adadp calibrate`: the least noise that a budget allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adadp.cli import pipeline as options
from adadp.cli.messages import warn
from adadp.cli.output import print_list, print_table
from adadp.errors import ConfigurationError


def calibrate(
    examples: options.Examples,
    lot: options.Lot,
    steps: options.Steps,
    epsilon: Annotated[float, typer.Option(help="The budget's epsilon.", show_default=False)],
    delta: Annotated[float, typer.Option(help="The budget's delta.", show_default=False)],
    accountant: options.AccountantOption = None,
    sampling: options.SamplingOption = options.SamplingName.POISSON,
    gaussian: options.GaussianOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the privacy profile into this file.", show_default=False)
    ] = None,
    json_output: options.JsonOption = False,
) -> None:
    """The smallest noise multiplier with which the whole pipeline keeps to a budget."""
    from adadp.accounting.calibration import calibrate_noise
    from adadp.accounting.guarantee import describe, round_up

    run = options.pipeline(examples, lot, steps, sampling, gaussian)
    if steps < 1:
        raise ConfigurationError("--steps must be 1 or more: without a step there is no noise to choose")
    found = calibrate_noise(
        run.composition,
        epsilon,
        delta,
        accountant=run.accountant(accountant),
        neighbours=run.neighbours,
    )
    warnings = options.warn_about_delta(delta, examples)
    assumptions = (*run.assumptions(), *found.spent.notes)
    if plot is not None:
        from adadp.cli.plot import draw_profile

        name = run.accountant(accountant)
        draw_profile(plot, run.composition(found.noise_multiplier), found.spent, name, run.neighbours)
    for warning in warnings:
        warn(warning)
    if json_output:
        values: dict[str, object] = {
            "noise_multiplier": found.noise_multiplier,
            "epsilon": found.spent.epsilon,
            "delta": delta,
            "accountant": found.spent.accountant,
            "assumptions": list(assumptions),
            "neighbours": str(run.neighbours),
        }
        if found.spent.order is not None:
            values["order"] = found.spent.order
        if warnings:
            values["warnings"] = list(warnings)
        typer.echo(json.dumps(values, indent=2))
        return
    rows = [
        # Rounded up: with less noise than was found the budget would not hold.
        ("noise multiplier", round_up(found.noise_multiplier, 5)),
        ("epsilon", f"{round_up(found.spent.epsilon)} of {epsilon:g}"),
        ("delta", round_up(delta)),
        ("accountant", found.spent.accountant),
        ("neighbours", str(run.neighbours)),
    ]
    rows += [("released", describe(event, count)) for event, count in run.composition(found.noise_multiplier)]
    print_table("Calibrated", rows)
    print_list("This rests on", assumptions)
    if plot is not None:
        typer.echo(f"\nThe privacy profile is in {plot}.")
