"""`adadp calibrate`: the least noise that a budget allows."""

from __future__ import annotations

from typing import Annotated

from adadp.cli import pipeline as options
from adadp.cli.output import JsonOption, option
from adadp.errors import ConfigurationError


def calibrate(
    examples: options.Examples,
    lot: options.Lot,
    steps: options.Steps,
    epsilon: Annotated[float, option("The budget's epsilon.")],
    delta: Annotated[float, option("The budget's delta.")],
    accountant: options.AccountantOption = None,
    sampling: options.SamplingOption = options.SamplingName.POISSON,
    gaussian: options.GaussianOption = None,
    plot: options.PlotOption = None,
    json_output: JsonOption = False,
) -> None:
    """The smallest noise multiplier with which the whole pipeline keeps to a budget."""
    from adadp.accounting.calibration import calibrate_noise
    from adadp.accounting.guarantee import describe, round_up

    run = options.pipeline(examples, lot, steps, sampling, gaussian)
    if steps < 1:
        raise ConfigurationError("--steps must be 1 or more: without a step there is no noise to choose")
    name = run.accountant(accountant)
    found = calibrate_noise(run.composition, epsilon, delta, accountant=name, neighbours=run.neighbours)
    composition = run.composition(found.noise_multiplier)
    rows = [
        # Rounded up: with less noise than was found the budget would not hold.
        ("noise multiplier", round_up(found.noise_multiplier, 5)),
        ("epsilon", f"{round_up(found.spent.epsilon)} of {epsilon:g}"),
        ("delta", round_up(delta)),
        ("accountant", found.spent.accountant),
        ("neighbours", str(run.neighbours)),
    ]
    rows += [("released", describe(event, count)) for event, count in composition]
    values: dict[str, object] = {"noise_multiplier": found.noise_multiplier}
    drawn = (plot, composition, name)
    options.give(run, found.spent, "Calibrated", values, rows, drawn=drawn, json_output=json_output)
