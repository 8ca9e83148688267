"""Sentences of a report about guarantees: exact, and for readers who know no differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import Guarantee, round_up
from adadp.report.attacker import Attacker
from adadp.report.facts import Facts
from adadp.report.run import Run

NO_GUARANTEE = "No guarantee"
NOTHING_PROMISED = (
    "Nothing is promised to those whose data was used: whoever sees the weights may learn anything about anyone in the "
    "data. The weights are for the curator only."
)


def percent(part: float) -> str:
    """A bound in percent, never rounded down."""
    return f"{min(100.0, math.ceil(part * 1000 - 1e-9) / 10):g}%"


def attacks(found: Attacker, guarantee: Guarantee) -> list[str]:
    """The trade-off curve in plain words."""
    question = f"whether {guarantee.unit} was in the data"
    if guarantee.neighbours is Neighbours.REPLACE_ONE:
        question = f"which of two candidates for {guarantee.unit} was in the data"
    said = [
        "Suppose an attacker knows all other records, the program, all settings and everything that was published, and "
        f"asks {question}. If a fair coin had decided that, an attacker who guesses is right at most "
        f"{percent(found.right)} of the time. Luck alone is right 50% of the time."
    ]
    for rate, share in found.found.items():
        said.append(
            f"An attacker who may wrongly accuse {percent(rate)} of those who are not in the data finds at most "
            f"{percent(share)} of those who are (luck: {percent(rate)})."
        )
    return said


def epsilon_of(guarantee: Guarantee | None) -> str:
    """Epsilon as it is printed: rounded up, or none."""
    if guarantee is None:
        return "not known"
    return "none" if guarantee.epsilon is None else round_up(guarantee.epsilon)


def which_to_publish(run: Run) -> str:
    """Of two numbers, that of the data; empty where there is one."""
    if run.counted is None or run.counted < 2:
        return ""
    return (
        f"{run.counted:,} runs were charged for this data set. Whoever is in the data is exposed by all of them: "
        "publish the number of the data set. The run's own number compares methods, and nothing else."
    )


def since(run: Run) -> str:
    """What later runs changed; empty where there are none."""
    if run.since is None:
        return ""
    more = {0: "more was", 1: "1 run was"}.get(run.since.runs, f"{run.since.runs:,} runs were")
    then = epsilon_of(run.guarantee)
    return f"After this run {more} charged for the same data. When it ended, epsilon of the data set was {then}."


def conditions(facts: Facts) -> list[str]:
    """Everything that the guarantee rests on, once each: as the run says, and as the ledger says now."""
    run = facts.run
    found = [] if run.guarantee is None else [*run.guarantee.untried, *run.guarantee.assumptions]
    if run.since is not None:
        found += [*run.since.guarantee.untried, *run.since.guarantee.assumptions]
    return list(dict.fromkeys(found))


def sentences(items: Sequence[str]) -> list[str]:
    """Items of a list that begin with a capital and end with a stop."""
    return [text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".") for text in items if text]
