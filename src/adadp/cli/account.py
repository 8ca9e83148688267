"""`adadp account`: what a training run costs."""

from __future__ import annotations

import math
from typing import Annotated

from adadp.cli import pipeline as options
from adadp.cli.output import JsonOption, option
from adadp.errors import AccountingError, ConfigurationError


def account(
    examples: options.Examples,
    lot: options.Lot,
    noise_multiplier: options.NoiseMultiplier,
    steps: options.Steps,
    delta: Annotated[float | None, option("Give delta to get epsilon.")] = None,
    epsilon: Annotated[float | None, option("Or give epsilon to get delta.")] = None,
    accountant: options.AccountantOption = None,
    sampling: options.SamplingOption = options.SamplingName.POISSON,
    gaussian: options.GaussianOption = None,
    plot: options.PlotOption = None,
    json_output: JsonOption = False,
) -> None:
    """Epsilon for a delta, or delta for an epsilon."""
    from adadp.accounting.accountants import get_accountant
    from adadp.accounting.curves import gdp_mu
    from adadp.accounting.guarantee import describe, round_up

    if (delta is None) == (epsilon is None):
        raise ConfigurationError("give either --delta (to get epsilon) or --epsilon (to get delta)")
    options.require_noise("--noise-multiplier", noise_multiplier)
    run = options.pipeline(examples, lot, steps, sampling, gaussian)
    composition = run.composition(noise_multiplier)
    chosen = get_accountant(run.accountant(accountant))
    if delta is not None:
        spent = chosen.epsilon(composition, delta, run.neighbours)
    else:
        assert epsilon is not None
        spent = chosen.delta(composition, epsilon, run.neighbours)
    if not math.isfinite(spent.epsilon):
        raise AccountingError(f"no finite epsilon was found at delta {spent.delta:g}")
    rows = [("epsilon", round_up(spent.epsilon)), ("delta", round_up(spent.delta))]
    order = "" if spent.order is None else f", order {spent.order:g}"
    rows.append(("accountant", f"{spent.accountant}{order}"))
    rows.append(("neighbours", str(run.neighbours)))
    rows += [("released", describe(event, count)) for event, count in composition if count]
    if 0 < spent.delta < 1:
        mu = round_up(gdp_mu(spent.epsilon, spent.delta), 3)
        rows.append(("as hard to tell as", f"N(0, 1) from N({mu}, 1)"))
    drawn = (plot, composition, chosen.name)
    options.give(run, spent, "Privacy spent", {}, rows, drawn=drawn, json_output=json_output)
