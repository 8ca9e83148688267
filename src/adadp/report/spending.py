"""Epsilon over the steps of a run: what would have been spent had it stopped there.

Guarantee: each number is an upper bound on what this run had released by that step. It follows from the kinds of
releases and their planned numbers alone, no private value is in it. What a run releases beside its steps counts from
the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, FixedSizeGaussian, PoissonGaussian
from adadp.accounting.guarantee import Guarantee
from adadp.errors import AccountingError, ConfigurationError

_POINTS = 8


@dataclass(frozen=True)
class Spending:
    """(step, epsilon) of the run alone, and of all that the data's ledger held with it; empty where not known."""

    own: tuple[tuple[int, float], ...]
    together: tuple[tuple[int, float], ...]


def spending(own: Guarantee, releases: Canonical, everything: Canonical | None) -> Spending:
    """How the epsilon of a run grows.

    Args:
        own: the run's own guarantee, for its delta and relation.
        releases: of the run.
        everything: all releases on the data by its end.

    """
    steps = [(event, count) for event, count in releases if isinstance(event, PoissonGaussian | FixedSizeGaussian)]
    if own.epsilon is None or len(steps) != 1:
        return Spending((), ())
    (event, count), beside = steps[0], [pair for pair in releases if pair != steps[0]]
    others = _less(everything, releases)
    points = sorted({0, *(max(1, round(count * (number / _POINTS) ** 2)) for number in range(1, _POINTS + 1))})
    try:
        alone = _epsilons(event, points, beside, own)
        together = _epsilons(event, points, [*beside, *others], own) if others else ()
    except (AccountingError, ConfigurationError):
        return Spending((), ())
    return Spending(alone, together)


def _epsilons(
    event: Event, points: list[int], beside: list[tuple[Event, int]], own: Guarantee
) -> tuple[tuple[int, float], ...]:
    name = covering_accountant([*beside, (event, 1)], own.neighbours, own.accountant)
    chosen = get_accountant(name)
    return tuple(
        (point, chosen.epsilon([*beside, (event, point)], own.delta, own.neighbours).epsilon) for point in points
    )


def _less(everything: Canonical | None, releases: Canonical) -> list[tuple[Event, int]]:
    """What is in `everything` and not in `releases`; nothing where that is no part of it."""
    if everything is None:
        return []
    left = dict(everything)
    for event, count in releases:
        left[event] = left.get(event, 0) - count
    return [] if any(count < 0 for count in left.values()) else list(canonical(left))
