"""What `account`, `calibrate` and `ledger add` share: a training run as numbers on a command line."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adadp.accounting.events import Event, Gaussian, Neighbours
from adadp.accounting.guarantee import PUBLIC_NUMBER
from adadp.cli import completion
from adadp.cli.messages import warn
from adadp.cli.output import JsonOption as JsonOption
from adadp.cli.output import option, print_list, print_table
from adadp.errors import ConfigurationError
from adadp.sampling.schemes import scheme

if TYPE_CHECKING:
    from adadp.accounting.accountant import Spent
    from adadp.accounting.composition import Composition

_MOST_EXAMPLES, _MOST_STEPS = 10**12, 10**9
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6


class SamplingName(enum.StrEnum):
    """How lots are drawn."""

    POISSON = "poisson"
    FIXED = "fixed"


Examples = Annotated[int, option("Size N of the dataset.")]
Lot = Annotated[int, option("Expected size L of a lot; the rate is L / N.")]
Steps = Annotated[int, option("Number T of steps.")]
NoiseMultiplier = Annotated[float, option("Noise over one example's bound (sigma).")]
SamplingOption = Annotated[
    SamplingName, typer.Option(help="poisson: add-or-remove-one neighbours. fixed: replace-one.")
]
AccountantOption = Annotated[
    str | None,
    option(
        "pld, rdp, theorem1 or one that a package adds. Default: pld, or rdp where lots have a fixed size.",
        values=completion.ACCOUNTANTS,
    ),
]
GaussianOption = Annotated[
    list[float] | None,
    typer.Option(
        "--gaussian",
        help="One more Gaussian release on all examples (DP-PCA), of this noise multiplier. Repeatable.",
    ),
]
PlotOption = Annotated[Path | None, option("Draw the privacy profile into this file.")]


@dataclass(frozen=True)
class Pipeline:
    """Training lots and the Gaussian releases beside them."""

    examples: int
    lot: int
    steps: int
    sampling: SamplingName
    gaussian: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= _MOST_EXAMPLES:
            raise ConfigurationError(f"--examples must be in 1..{_MOST_EXAMPLES:,}, not {self.examples:,}")
        if not 1 <= self.lot <= self.examples:
            raise ConfigurationError(
                f"--lot must be in 1..{self.examples:,} (--examples), not {self.lot:,}: the sampling rate "
                "cannot exceed 1"
            )
        if not 0 <= self.steps <= _MOST_STEPS:
            raise ConfigurationError(f"--steps must be in 0..{_MOST_STEPS:,}, not {self.steps:,}")
        for sigma in self.gaussian:
            require_noise("--gaussian", sigma)

    @property
    def neighbours(self) -> Neighbours:
        """The relation for which this sampling has a proof."""
        return scheme(self.sampling.value).neighbours

    def accountant(self, asked: str | None) -> str:
        """The accountant that was asked for; otherwise the tightest that covers the sampling."""
        from adadp.accounting.accountants import covering_accountant

        return asked or covering_accountant(self.composition(1.0), self.neighbours)

    def step(self, noise_multiplier: float) -> Event:
        """One training step."""
        return scheme(self.sampling.value)(self.examples, self.lot).event(noise_multiplier)

    def composition(self, noise_multiplier: float) -> list[tuple[Event, int]]:
        """Everything released."""
        others: list[tuple[Event, int]] = [(Gaussian(sigma), 1) for sigma in self.gaussian]
        return [(self.step(noise_multiplier), self.steps), *others]

    def assumptions(self) -> tuple[str, ...]:
        """What the number rests on, in words."""
        from adadp.accounting.guarantee import FIXED_BEFOREHAND

        if self.sampling is SamplingName.POISSON:
            drawn = (
                f"each example is in each lot independently with probability {self.lot / self.examples:g}; "
                "neighbouring datasets differ by adding or removing one example"
            )
        else:
            drawn = (
                f"each lot is {self.lot:,} of {self.examples:,} examples drawn without replacement; "
                "neighbouring datasets differ by replacing one example, and the noise multiplier is over one "
                "example's bound"
            )
        return (
            drawn,
            "the noise and the lots come from secure randomness that stays secret",
            PUBLIC_NUMBER,
            FIXED_BEFOREHAND,
        )


def require_noise(name: str, sigma: float) -> None:
    """Refuse noise that is absent, not a number or absurd."""
    if not (math.isfinite(sigma) and _LEAST_NOISE <= sigma <= _MOST_NOISE):
        limits = f"{_LEAST_NOISE:g}..{_MOST_NOISE:g}"
        raise ConfigurationError(f"{name} must be a number in {limits}, not {sigma:g}")


def warn_about_delta(delta: float, examples: int) -> tuple[str, ...]:
    """A warning where delta allows to publish an example outright."""
    if delta < 1 / examples:
        return ()
    return (f"delta {delta:g} is 1/N or more (N = {examples:,}): publishing one random example would satisfy it",)


def warn_about_epsilon(epsilon: float | None) -> tuple[str, ...]:
    """A warning where epsilon promises next to nothing by itself."""
    from adadp.accounting.guarantee import LARGE_EPSILON, large_epsilon

    return () if epsilon is None or epsilon < LARGE_EPSILON else (large_epsilon(epsilon),)


def pipeline(examples: int, lot: int, steps: int, sampling: SamplingName, gaussian: Sequence[float] | None) -> Pipeline:
    """The options as one value, checked."""
    return Pipeline(examples, lot, steps, sampling, tuple(gaussian or ()))


def give(
    run: Pipeline,
    spent: Spent,
    title: str,
    values: dict[str, object],
    rows: list[tuple[str, str]],
    *,
    drawn: tuple[Path | None, Composition, str],
    json_output: bool,
) -> None:
    """Print what a command found: `values` as JSON, or `rows` as a table with what they rest on.

    Args:
        run: the pipeline that was accounted for.
        spent: what it costs.
        title: of the table.
        values: keys of the command's own, which come first; those of every command are added.
        rows: the table.
        drawn: the file for a plot of the privacy profile (None: no plot), the releases, and the accountant's name.
        json_output: whether to print JSON and nothing else.
    """
    plot, composition, accountant = drawn
    if plot is not None:
        from adadp.cli.plot import draw_profile

        draw_profile(plot, composition, spent, accountant, run.neighbours)
    warnings = (*warn_about_delta(spent.delta, run.examples), *warn_about_epsilon(spent.epsilon))
    for warning in warnings:
        warn(warning)
    assumptions = (*run.assumptions(), *spent.notes)
    if json_output:
        values |= {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "accountant": spent.accountant,
            "assumptions": list(assumptions),
            "neighbours": str(run.neighbours),
        }
        if spent.order is not None:
            values["order"] = int(spent.order) if spent.order.is_integer() else spent.order
        if warnings:
            values["warnings"] = list(warnings)
        typer.echo(json.dumps(values))
        return
    print_table(title, rows)
    print_list("This rests on", assumptions)
    if plot is not None:
        typer.echo(f"\nThe privacy profile is in {plot}.")
