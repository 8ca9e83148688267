"""What a run would be, before anything of the data is looked at: noise against signal, time, memory, and other choices.

    look_ahead(Settings(dataset="mnist", epsilon=2.0))

Everything follows from settings and from what is public or declared about the data (`adadp.data.outline`). No file of
data is opened, nothing is written, and a ledger is read and not charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adadp import data
from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.composition import canonical
from adadp.accounting.events import Neighbours
from adadp.data import HeldOut, outline
from adadp.data.columns import declare
from adadp.errors import ConfigurationError, PrivacyError
from adadp.training.dataset_ledger import epsilon_with, runs_in
from adadp.training.measuring import Measured, measure
from adadp.training.planning import Plan, read_options
from adadp.training.settings import Settings

FACTORS = (0.25, 0.5, 2.0, 4.0)
"""By which epsilon, lot and epochs are changed, one at a time."""


@dataclass(frozen=True)
class Signal:
    """The most that a step can show through its noise, as ratios of lengths.

    A step releases a lot's mean: one example adds at most C / L to it, in the coordinates in which the noise is
    independent, and the noise has a deviation of sigma C / L in each of d coordinates. Gradients of a lot that all
    agreed would have a mean of length C. Real ones agree less, so these are upper bounds; they read no data.

    Attributes:
        direction: that length over the noise along its own direction, L / sigma.
        whole: over the length of the whole noise, L / (sigma sqrt(d)).
        run_direction, run_whole: of the sum of all T steps, where noise averages out: sqrt(T) times as much.

    """

    direction: float
    whole: float
    run_direction: float
    run_whole: float

    @classmethod
    def of(cls, lot: int, noise_multiplier: float, weights: int, steps: int) -> Signal:
        """From public numbers: the expected lot, sigma, how many weights are trained, and the number of steps."""
        direction = lot / noise_multiplier
        whole = direction / math.sqrt(weights)
        return cls(direction, whole, direction * math.sqrt(steps), whole * math.sqrt(steps))


@dataclass(frozen=True)
class Choice:
    """A plan in which one number was changed; `refused` says why there is none, and the rest is None then."""

    changed: str
    value: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    lot: int | None = None
    steps: int | None = None
    epochs: float | None = None
    signal: Signal | None = None
    seconds: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Standing:
    """What a ledger holds, and what it would hold with the run. Epsilons are None where there is no guarantee."""

    path: str
    runs: int
    budget: float | None
    epsilon: float | None
    epsilon_after: float | None


@dataclass(frozen=True)
class Outlook:
    """What a run would be. `epsilon` is None where it would have no guarantee."""

    plan: Plan
    epsilon: float | None
    weights: int
    signal: Signal | None
    measured: Measured | None
    choices: tuple[Choice, ...]
    ledger: Standing | None

    @property
    def seconds(self) -> float | None:
        """Of the whole run, without reading files and without preprocessing."""
        return None if self.measured is None else self.measured.seconds(self.plan.steps, _evaluated(self.plan))

    @property
    def memory(self) -> float | None:
        """MiB at the highest, the data included."""
        found = self.measured
        return None if found is None or found.memory is None else found.memory + found.data

    def to_dict(self) -> dict[str, Any]:
        """Plain values, by keys that stay."""
        plan = self.plan
        described = plan.describe()
        return {
            "dataset": plan.train.name,
            "examples": plan.population,
            "unit": plan.noun,
            "held_out": len(plan.test),
            "algorithm": plan.algorithm.name,
            "reading": plan.algorithm.reading or None,
            "model": plan.model_name,
            "input_shape": list(plan.input_shape),
            "weights": self.weights,
            "epsilon": self.epsilon,
            "delta": plan.delta,
            "claimed_epsilon": None if plan.algorithm.sound else plan.claimed_epsilon(),
            "noise_multiplier": plan.noise_multiplier,
            "lot": plan.lot,
            "rate": plan.rate,
            "steps": plan.steps,
            "epochs": described["epochs"],
            "settings": described["settings"],
            "gaussian": [event.noise_multiplier for event in plan.events],
            "signal": None if self.signal is None else asdict(self.signal),
            "seconds": self.seconds,
            "seconds_per_step": None if self.measured is None else self.measured.step,
            "memory_mib": self.memory,
            "data_mib": None if self.measured is None else self.measured.data,
            "device": str(plan.device),
            "choices": [asdict(choice) for choice in self.choices],
            "ledger": None if self.ledger is None else asdict(self.ledger),
            "notices": list(plan.notices),
        }


def look_ahead(
    settings: Settings,
    *,
    examples: int | None = None,
    shape: tuple[int, ...] | None = None,
    measured: bool = True,
    factors: tuple[float, ...] = FACTORS,
) -> Outlook:
    """What a run with these settings would be.

    Args:
        settings: as for `adadp.training.loop.train`. The file that `dataset` names is not opened.
        examples: how many rows data of the user's own has, held-out ones included; persons, where `person` is set.
        shape: of an image, (channels, height, width); or (n,) for a table of n columns of numbers without names.
        measured: do a few steps on made-up rows, for time and memory.
        factors: by which epsilon, lot and epochs are changed, one at a time; none: no other choices.

    Raises:
        ConfigurationError: the settings ask for what cannot be, or something is not declared.
        DataError: the declared form is not one that data can have.

    Guarantee:
        No value of the user's data is read: what is not declared is asked for. Nothing is written or charged.

    """
    pair = _outline(settings, examples, shape)
    plan = Plan(settings, outline=pair)
    times = measure(plan) if measured else None
    weights = trained(plan)
    return Outlook(
        plan=plan,
        epsilon=_epsilon(plan),
        weights=weights,
        signal=_signal(plan),
        measured=times,
        choices=tuple(_choices(plan, pair, times, factors)),
        ledger=_standing(plan),
    )


def _outline(settings: Settings, examples: int | None, shape: tuple[int, ...] | None) -> HeldOut:
    if settings.dataset in data.NAMES:
        if examples is not None or shape is not None:
            raise ConfigurationError(f"examples and shape are known of {settings.dataset}: leave them out")
        return outline.of_name(settings.dataset)
    if examples is None:
        raise ConfigurationError(
            "the data is not opened, and its rows are not counted: say with examples= how many there are"
            + ("" if settings.person is None else " of persons")
        )
    options = read_options(settings)
    columns = declare(**{name: options[name] for name in ("number", "category", "text", "date", "ignore")})
    usual = 0.2 if settings.test_fraction is None else settings.test_fraction
    form = outline.Form(
        rows=examples,
        classes=settings.classes,
        target=options["target"],
        columns=columns,
        shape=shape,
        held_out=0.0 if settings.test is not None else usual,
        persons=settings.person is not None,
    )
    return outline.of_form(_name(settings.dataset), form)


def _name(dataset: str) -> str:
    return Path(dataset).stem or "data"


def trained(plan: Plan) -> int:
    """How many weights are trained."""
    return sum(parameter.numel() for parameter in plan.model.parameters() if parameter.requires_grad)


def _signal(plan: Plan) -> Signal | None:
    if plan.noise_multiplier is None:
        return None
    return Signal.of(plan.lot, plan.noise_multiplier, trained(plan), plan.steps)


def _evaluated(plan: Plan) -> int:
    """How many rows are evaluated in a run: on the way, and at its end."""
    return (min(plan.settings.evaluations, plan.steps) + 1) * len(plan.test)


def _epsilon(plan: Plan) -> float | None:
    """What the run would cost by itself; with a ledger that was given, together with what that holds."""
    if plan.noise_multiplier is None or not plan.algorithm.sound:
        return None
    releases = canonical(plan.composition(plan.noise_multiplier))
    name = covering_accountant(releases, Neighbours.ADD_REMOVE, plan.accountant)
    found = get_accountant(name).epsilon(releases, plan.delta, Neighbours.ADD_REMOVE).epsilon
    return found if math.isfinite(found) else None


def _choices(plan: Plan, pair: HeldOut, measured: Measured | None, factors: tuple[float, ...]) -> Iterator[Choice]:
    """Plans with one number changed, and the plan itself among those of each number."""
    if not factors:
        return
    noise = plan.settings.noise_multiplier
    privacy = ("epsilon", plan.epsilon) if noise is None else ("noise_multiplier", noise)
    for changed, now in (privacy, ("lot", plan.lot), ("epochs", plan.steps * plan.rate)):
        if now is None:
            continue
        for factor in sorted({*factors, 1.0}):
            value = round(factor * now) if changed == "lot" else factor * now
            try:
                other = plan if factor == 1 else Plan(_changed(plan.settings, changed, value), outline=pair)
                yield _choice(changed, value, other, plan, measured)
            except PrivacyError as error:
                yield Choice(changed, value, refused=str(error))


def _changed(settings: Settings, changed: str, value: float) -> Settings:
    changes: dict[str, dict[str, Any]] = {
        "lot": {"lot": int(value)},
        "epochs": {"epochs": value, "steps": None},
        "epsilon": {"epsilon": value},
        "noise_multiplier": {"noise_multiplier": value},
    }
    return replace(settings, **changes[changed])


def _choice(changed: str, value: float, other: Plan, plan: Plan, measured: Measured | None) -> Choice:
    """`other` in numbers. Its steps take as long as the plan's, in proportion to the lot."""
    seconds = None
    if measured is not None:
        step = measured.step * other.lot / plan.lot
        times = replace(measured, step=step, refreshes=round(measured.refreshes * other.steps / plan.steps))
        seconds = times.seconds(other.steps, _evaluated(other))
    return Choice(
        changed, value, _epsilon(other), other.noise_multiplier, other.lot, other.steps, other.steps * other.rate,
        _signal(other), seconds,
    )  # fmt: skip


def _standing(plan: Plan) -> Standing | None:
    """What the data's ledger holds, and what it would hold with this run."""
    ledger = plan.ledger
    if ledger is None or ledger.path is None:
        return None
    now = ledger.guarantee(plan.delta).epsilon if ledger.composition() else 0.0
    after = None
    if ledger.budget is not None:
        after = ledger.budget.epsilon
    elif plan.noise_multiplier is not None and plan.algorithm.sound:
        after = epsilon_with(ledger, plan.delta, plan.alone(plan.noise_multiplier))
    return Standing(
        str(ledger.path), runs_in(ledger), None if ledger.budget is None else ledger.budget.epsilon, now, after
    )
