"""The ledger of a data set of the user's own: one file beside the data, to which every run on it is charged.

It is found by the data's declared name, never by what the data holds: `survey.csv` has
`survey.csv.adadp-ledger.jsonl` in its folder, or `NAME.adadp-ledger.jsonl` where a name was declared. So the same
name in two folders means two data sets, and all who train on one file see one record, from wherever they start.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adadp.accounting.accountants import covering_accountant
from adadp.accounting.budget import Budget
from adadp.accounting.composition import Canonical, Composition, canonical, releases_to_json
from adadp.accounting.events import Event, Neighbours
from adadp.accounting.guarantee import Guarantee, make_guarantee, round_up
from adadp.accounting.ledger import Ledger
from adadp.algorithms import Algorithm
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError
from adadp.training.settings import Settings

SUFFIX = ".adadp-ledger.jsonl"
FAR_MORE_NOISE = 3.0
"""A run that needs this many times the noise of a first run is refused unless it was asked for."""

_PARTS = {"preprocessing", "class_weights", "metrics"}  # keys in the plans of what a run releases beside its training
_NAME = re.compile(r"[^\W_][\w .-]{0,99}")


def ledger_path(dataset: str, name: str | None) -> Path:
    """Where the ledger of a file or folder of one's own is.

    Raises:
        ConfigurationError: the name is none for a file, or another than that of its ledger; or the folder cannot be
            written.

    """
    source = Path(dataset).resolve()
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"dataset_name must be letters, digits, spaces, dots, - and _ (100 at most, a letter or digit first), "
            f"not {name!r}"
        )
    path, usual = (source.parent / f"{each}{SUFFIX}" for each in (name or source.name, source.name))
    if usual != path and usual.exists():
        raise ConfigurationError(
            f"runs on {source.name} are charged to {usual}, and under the name {name!r} this one would not count with "
            "them: leave dataset_name out. If it is other data, give it a file of its own, or another place by ledger="
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(
            f"the ledger of this data belongs beside it ({path}), which cannot be written here: name another place "
            "by ledger=, the same one for every run on this data"
        )
    return path


@dataclass(frozen=True)
class Account:
    """The ledger that a run is charged to, and what its epsilon is for.

    Attributes:
        ledger: None for one in the run's own folder.
        of_run: whether `epsilon` is for the run alone; otherwise it is for everything in the ledger.
        uncharged: the data's ledger, where this run has no guarantee and is therefore kept out of it.
    """

    ledger: Ledger | None
    of_run: bool
    uncharged: Ledger | None = None

    def note_uncharged(self, text: str) -> None:
        """Record in the data's ledger that a run without a guarantee was made: what is said of the others rests on it.

        Charging it would leave all of them without a number, though nothing of it need ever be released.
        """
        if self.uncharged is not None:
            plan = {"without_guarantee": text, "unit": self.uncharged.unit}
            self.uncharged.start(plan, assumptions=[UNCHARGED.format(text)]).close()


UNCHARGED = (
    "a run without a guarantee was made on this data and is not counted ({}): nothing that it computed is released, "
    "and no setting of another run was chosen by it"
)


def account_for(
    settings: Settings, name: str, algorithm: Algorithm, *, own_data: bool, delta: float, unit: str
) -> Account:
    """The ledger of a run with these settings on data called `name`, read and not yet written, for one `unit`.

    Raises:
        ConfigurationError: a budget for data that has no ledger, or for an algorithm that none can hold; or a ledger
            that cannot be where it belongs.
        LedgerError: the ledger is refused, protects another unit, or has another budget.

    """
    path = settings.ledger
    if path is None and own_data:
        path = str(ledger_path(settings.dataset, settings.dataset_name))
    if path is None:
        if settings.budget is not None:
            raise ConfigurationError(
                "budget is for all runs on one data set together: give ledger= too, the file in which they are kept"
            )
        return Account(None, of_run=True)
    budget = None if settings.budget is None else Budget(settings.budget, delta)
    ledger = Ledger(path, dataset=name, unit=unit, delta=delta)
    if budget is not None:
        if not Path(path).exists():
            ledger = Ledger(path, dataset=name, budget=budget, unit=unit, delta=delta)
        elif ledger.budget != budget:
            raise LedgerError(_other_budget(ledger, budget))
    if ledger.budget is not None and algorithm.looks:
        raise ConfigurationError(
            f"budget cannot be shared by {algorithm}, which keeps a filter of its own: give it another ledger, whose "
            "cost comes on top"
        )
    if settings.ledger is None and not algorithm.sound:
        return Account(None, of_run=True, uncharged=ledger)
    return Account(ledger, of_run=settings.ledger is None or ledger.budget is not None)


def _other_budget(ledger: Ledger, asked: Budget) -> str:
    fixed = ledger.budget
    if fixed is None:
        return (
            f"budget cannot be set now: {ledger.path} was made without one, and a budget that is set after seeing what "
            "was released bounds nothing. Go on without it, or give a new ledger, whose cost comes on top"
        )
    return (
        f"budget is (epsilon {fixed.epsilon:g}, delta {fixed.delta:g}) in {ledger.path}, fixed when that was made, and "
        f"not (epsilon {asked.epsilon:g}, delta {asked.delta:g}): leave it out (and give that delta), or give a new "
        "ledger, whose cost comes on top"
    )


# ---- what is said before a run --------------------------------------------------------------------------------------


def standing(account: Account, delta: float, planned: Composition) -> tuple[str, ...]:
    """What the data's ledger holds already, and what it will hold with what this run has `planned`: a line, or none."""
    ledger = account.ledger or account.uncharged
    if ledger is None:
        return ()
    count, budget = runs_in(ledger), ledger.budget
    runs = f"{count} run{'' if count == 1 else 's'} so far" if count else "no run so far"
    text = f"ledger of {ledger.dataset!r}: {ledger.path}; {runs}"
    if account.uncharged is not None:
        return (
            f"{text}. This run has no guarantee and is not counted there, but noted: release nothing of it, and choose "
            "no setting of another run by it",
        )
    if budget is not None:
        return (f"{text}; budget of all runs: epsilon {budget.epsilon:g} at delta {budget.delta:g}",)
    if not ledger.composition():
        return (text,)
    epsilon = ledger.guarantee(delta).epsilon
    if epsilon is None:
        return (f"{text}, with no guarantee",)
    return (f"{text}, epsilon {round_up(epsilon)} at delta {delta:g}{_and_then(ledger, delta, planned)}",)


def _and_then(ledger: Ledger, delta: float, planned: Composition) -> str:
    epsilon = epsilon_with(ledger, delta, planned)
    return "" if epsilon is None else f", and {round_up(epsilon)} with this one"


def epsilon_with(ledger: Ledger, delta: float, planned: Composition) -> float | None:
    """The epsilon of everything in a ledger and of what is `planned`; None where there is no guarantee."""
    whole = [*ledger.composition(), *canonical(planned)]
    return make_guarantee(whole, delta, neighbours=ledger.neighbours or Neighbours.ADD_REMOVE).epsilon


def far_more_noise(
    ledger: Ledger, needed: float, first: float, epsilon: float, delta: float, accountant: str, *, insist: bool
) -> str:
    """What a partly spent epsilon means for this run, in one line.

    Args:
        ledger: which holds something already.
        needed: the noise multiplier with which this run keeps to `epsilon` together with it.
        first: the one with which a first run would.
        epsilon: for everything in the ledger.
        delta: at which it holds.
        accountant: by which `epsilon` is counted.
        insist: whether the run is wanted with whatever noise that takes.

    Raises:
        BudgetExhaustedError: `needed` is `FAR_MORE_NOISE` times `first`, or more, and nobody insists.

    """
    spent = ledger.guarantee(delta, accountant=accountant).epsilon
    text = (
        f"epsilon {epsilon:g} is for everything in {ledger.path}, which holds "
        f"{'an unknown amount' if spent is None else round_up(spent)} of it already: noise multiplier {needed:.4g}, "
        f"where a first run needs {first:.4g}"
    )
    if needed >= FAR_MORE_NOISE * first and not insist:
        total = "" if spent is None else f" (about {round_up(math.hypot(spent, epsilon), 2)} leaves this run its own)"
        raise BudgetExhaustedError(
            f"{text}, which leaves little to learn from. Give a larger epsilon{total}, or another ledger, whose cost "
            "comes on top; spend_the_rest trains with this noise all the same"
        )
    return text


def little_room(
    ledger: Ledger, event: Event, steps: int, beside: Collection[tuple[Event, int]], *, insist: bool
) -> str | None:
    """How many of the planned steps the ledger's budget holds, in one line; None where it holds all of them.

    Raises:
        BudgetExhaustedError: it holds none; or fewer than half of them, and nobody insists.

    """
    room = ledger.room(event, steps, beside)
    budget = ledger.budget
    if room is None or budget is None or room >= steps:
        return None
    sigma = float(getattr(event, "noise_multiplier", math.nan))
    text = f"budget {budget.epsilon:g} of all runs on {ledger.dataset!r} has room for {room:,} of {steps:,} steps"
    text += f" with noise multiplier {sigma:.4g}"
    if room == 0 or (2 * room < steps and not insist):
        raise BudgetExhaustedError(
            f"{text}. Give a smaller epsilon for this run (more noise) or fewer steps, or another ledger, whose cost "
            "comes on top" + ("; spend_the_rest trains as far as it goes" if room else "")
        )
    return f"{text}: training ends there"


def nothing_left(ledger: Ledger, epsilon: float, delta: float, accountant: str) -> BudgetExhaustedError:
    """The refusal of a run for which no noise keeps everything in the ledger within `epsilon`."""
    spent = ledger.guarantee(delta, accountant=accountant).epsilon
    return BudgetExhaustedError(
        f"epsilon {epsilon:g} is for everything in {ledger.path}, which holds "
        f"{'what no proof covers' if spent is None else round_up(spent)} already: no noise leaves room for this run. "
        "Give a larger epsilon, or another ledger, whose cost comes on top"
    )


# ---- what is said after it ------------------------------------------------------------------------------------------


def runs_in(ledger: Ledger) -> int:
    """How many runs were charged: the preprocessing and the figures of a run are none of their own."""
    charges = ledger.charges()
    trained = sum(1 for run in ledger.runs if charges[run.id] and not _PARTS & run.plan.keys())
    return trained + len(ledger.inherited)


def guarantee_of(ledger: Ledger, runs: Collection[str], delta: float, accountant: str, whole: Guarantee) -> Guarantee:
    """What may be said about some runs of a ledger alone; `whole` is the guarantee over all of it.

    It is no guarantee for the data: the other runs looked at it too.
    """
    relation = ledger.neighbours or Neighbours.ADD_REMOVE
    releases = releases_of(ledger, runs)
    reasons = [text for run in ledger.runs if run.id in runs for text in run.remarks.reasons]
    return make_guarantee(
        releases, delta, accountant=covering_accountant(releases, relation, accountant), neighbours=relation,
        unit=whole.unit, reasons=reasons,
    )  # fmt: skip


def releases_of(ledger: Ledger, runs: Collection[str]) -> Canonical:
    """Return what some runs of a ledger released."""
    charges = ledger.charges()
    return canonical([pair for name in runs for pair in charges[name]])


def on_record(ledger: Ledger, runs: Collection[str], own: Guarantee) -> dict[str, Any]:
    """The releases that guarantees are about, as plain values: of these runs, with their guarantee `own`, and of all.

    Events, plans and the random ids of runs are no secret: this may be published.
    """
    return {
        "dataset": ledger.dataset,
        "runs": runs_in(ledger),
        "ids": [run.uid for run in ledger.runs if run.id in runs],
        "own": own.to_dict(),
        "own_releases": releases_to_json(releases_of(ledger, runs)),
        "all_releases": releases_to_json(ledger.composition()),
    }
