"""The trade-off curve of a guarantee in plain words: how often an attacker can be right.

Guarantee: all numbers are upper bounds for every attack, whatever is known beside what was released. They follow from
the privacy profile of the releases (each of its points is a valid (epsilon, delta)), or, where releases have none, from
the guarantee's epsilon and delta alone. Either holds under the conditions that the guarantee lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.composition import Canonical
from adadp.accounting.curves import privacy_profile, trade_off
from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import Guarantee
from adadp.errors import AccountingError, ConfigurationError

ACCUSED = (0.001, 0.01, 0.05, 0.1)
"""Rates of false accusations that are put into words."""

_POINTS, _DRAWN = 60, 200


@dataclass(frozen=True)
class Attacker:
    """What a guarantee leaves to an attacker who asks whether one unit was in the data.

    Attributes:
        right: the most often a guess is right, if a fair coin decided whether it was in; 0.5 is luck.
        found: for each rate of false accusations the largest part found of those who were in.
        curve: (rate of false accusations, largest part found), from 0 to 1.
        from_releases: whether the bounds follow from all releases; otherwise from epsilon and delta alone.

    """

    right: float
    found: dict[float, float]
    curve: tuple[tuple[float, float], ...]
    from_releases: bool


def attacker(guarantee: Guarantee, releases: Canonical | None) -> Attacker | None:
    """What `guarantee`, over `releases` if they are known, leaves to an attacker; None where nothing is guaranteed."""
    if guarantee.epsilon is None:
        return None
    points = [(guarantee.epsilon, guarantee.delta)]
    profile = _profile(guarantee, releases)
    epsilons, deltas = zip(*(points + profile), strict=True)
    right = min(_right(epsilon, delta) for epsilon, delta in points + profile)
    rates = [(number / _DRAWN) ** 2 for number in range(_DRAWN + 1)]  # finer where few are accused
    found = [1 - missed for missed in trade_off(epsilons, deltas, [*ACCUSED, *rates])]
    named = dict(zip(ACCUSED, found, strict=False))
    return Attacker(right, named, tuple(zip(rates, found[len(ACCUSED) :], strict=True)), bool(profile))


def fits(guarantee: Guarantee, releases: Canonical) -> bool:
    """Whether these releases cost no more than the guarantee says: otherwise they are not what it is about."""
    if guarantee.epsilon is None:
        return True
    try:
        name = covering_accountant(releases, guarantee.neighbours, guarantee.accountant)
        cost = get_accountant(name).epsilon(releases, guarantee.delta, guarantee.neighbours).epsilon
    except (AccountingError, ConfigurationError):  # what no accountant covers has no epsilon
        return False
    return cost <= guarantee.epsilon * (1 + 1e-6)


def _profile(guarantee: Guarantee, releases: Canonical | None) -> list[tuple[float, float]]:
    """Points (epsilon, delta) from 0 to beyond the guarantee's epsilon; none where releases have no profile."""
    if not releases or guarantee.epsilon is None:
        return []
    neighbours = Neighbours(guarantee.neighbours)
    epsilons = _epsilons(guarantee.epsilon)
    try:
        name = covering_accountant(releases, neighbours, guarantee.accountant)
        deltas = privacy_profile(releases, epsilons, accountant=name, neighbours=neighbours, aim=guarantee.delta)
    except (AccountingError, ConfigurationError):
        return []
    return list(zip(epsilons, deltas, strict=True))


def _epsilons(epsilon: float) -> Sequence[float]:
    top = 1.5 * epsilon + 0.5
    return [top * (number / _POINTS) ** 2 for number in range(_POINTS + 1)]


def _right(epsilon: float, delta: float) -> float:
    """The most often a guess about a fair coin is right, under (epsilon, delta)."""
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))
