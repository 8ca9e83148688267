"""What an accountant is, and the register of those that are known by name.

A new accountant is one class and one registration:

    @accountant("mine")
    class Mine(Accountant):
        def refusal(self, event, neighbours): ...                      # which events it covers
        def bound_epsilon(self, releases, delta, neighbours): ...      # -> Spent
        def bound_delta(self, releases, epsilon, neighbours): ...      # -> Spent

`PrivacyEngine(accountant="mine")`, ledgers, guarantees, calibration and the command find it by that name. A package
that should be found without being imported names it as an entry point of the group "adadp.accountants".
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, TypeVar

from adadp.accounting.composition import Canonical, Composition, canonical, refuse_uncovered
from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian, RenyiBlock, Uncovered
from adadp.errors import AccountingError, ConfigurationError

DEFAULT, BROADEST = "pld", "rdp"
"""The accountant that is used unless another is asked for, and the one that covers every event that has a proof."""


@dataclass(frozen=True)
class Spent:
    """What a composition costs: (epsilon, delta), whose bound it is, its Renyi order if any, and remarks."""

    epsilon: float
    delta: float
    accountant: str
    order: float | None = None
    notes: tuple[str, ...] = ()


def require_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ConfigurationError(f"delta must be above 0 and below 1, not {delta!r}")


def require_epsilon(epsilon: float) -> None:
    """Refuse an epsilon that is negative or not finite."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigurationError(f"epsilon must be a finite number >= 0, not {epsilon!r}")


def require_target(epsilon: float, delta: float) -> None:
    """Refuse what nothing can be held to: an epsilon that is not finite and above 0, or a delta outside (0, 1)."""
    require_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigurationError(f"the target epsilon must be a finite number above 0, not {epsilon!r}")


class Accountant(abc.ABC):
    """Bounds the cost of compositions. Register a subclass with `@accountant(name)`.

    Guarantee: if `bound_epsilon` returns epsilon for a delta, the releases together are (epsilon, delta)-DP under the
    relation asked for; the same for `bound_delta`. Both get canonical releases (at least one), all of which `refusal`
    has let pass. Every search in `calibration` rests on this alone, and on costs that do not fall as counts rise.
    """

    name: ClassVar[str]
    searches_start_from: ClassVar[str | None] = None
    """A cheaper accountant with a slightly larger bound: calibration begins where a search by that one ends."""

    @abc.abstractmethod
    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        """Why this event is not covered under this relation; None when it is. See `sampling_refusal`."""

    @abc.abstractmethod
    def bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        """An epsilon for which the releases are (epsilon, delta)-DP; infinite where none is found."""

    @abc.abstractmethod
    def bound_delta(self, releases: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        """A delta in (0, 1] for which the releases are (epsilon, delta)-DP."""

    def bound_profile(
        self, releases: Canonical, epsilons: Sequence[float], neighbours: Neighbours, aim: float
    ) -> list[float]:
        """The delta of each epsilon. `aim` is the delta of most interest, for accountants that discretise."""
        return [self.delta(releases, epsilon, neighbours).delta for epsilon in epsilons]

    def check(self, composition: Composition, neighbours: Neighbours) -> Canonical:
        """The canonical composition, if all of it is covered; `AccountingError` with the reason if not."""
        neighbours = Neighbours(neighbours)
        releases = canonical(composition)
        refuse_uncovered(releases)
        for event, _ in releases:
            reason = self.refusal(event, neighbours)
            if reason:
                other = covering_accountant(releases, neighbours, self.name)
                way_out = "" if other == self.name else f"; use the {other} accountant"
                raise AccountingError(f"the {self.name} accountant does not cover {event!r}: {reason}{way_out}")
        return releases

    def epsilon(self, composition: Composition, delta: float, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> Spent:
        """An epsilon for which the composition is (epsilon, delta)-DP. 0 for no release at all."""
        require_delta(delta)
        neighbours = Neighbours(neighbours)  # a plain string is compared with neither relation by `is`
        releases = self.check(composition, neighbours)
        if not releases:
            return Spent(0.0, delta, self.name)
        return self._sane(self.bound_epsilon(releases, delta, neighbours))

    def delta(self, composition: Composition, epsilon: float, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> Spent:
        """A delta (the paper's delta_*) for which the composition is (epsilon, delta)-DP. At most 1."""
        require_epsilon(epsilon)
        neighbours = Neighbours(neighbours)
        releases = self.check(composition, neighbours)
        if not releases:
            return Spent(epsilon, 0.0, self.name)
        return self._sane(self.bound_delta(releases, epsilon, neighbours))

    def _sane(self, spent: Spent) -> Spent:
        if not (spent.epsilon >= 0 and 0 <= spent.delta <= 1):  # not a number is neither
            raise AccountingError(f"the {self.name} accountant returned {spent!r}, which is no bound")
        return spent


def sampling_refusal(event: Event, neighbours: Neighbours) -> str | None:
    """Why no proof that is known here covers a sampling scheme under a relation; None where one does."""
    if isinstance(event, PoissonGaussian) and neighbours is not Neighbours.ADD_REMOVE:
        return "Poisson sampling is covered under add-or-remove-one neighbours only"
    if isinstance(event, FixedSizeGaussian) and neighbours is not Neighbours.REPLACE_ONE:
        return (
            "lots of a fixed size are covered under replace-one neighbours only: adding an example changes "
            "who else is drawn"
        )
    if isinstance(event, RenyiBlock) and event.neighbours not in (None, neighbours):
        return f"a privacy filter's divergences are about {event.neighbours} neighbours"
    return None


ACCOUNTANTS: dict[str, Accountant] = {}
Kind = TypeVar("Kind", bound=type[Accountant])


def accountant(name: str) -> Callable[[Kind], Kind]:
    """Register a class of accountants under a name.

    Raises:
        ConfigurationError: another class has this name. Replacing an accountant would change guarantees silently.
    """

    def register(kind: Kind) -> Kind:
        known = ACCOUNTANTS.get(name)
        if known is not None and (type(known).__module__, type(known).__qualname__) != (
            kind.__module__,
            kind.__qualname__,
        ):
            raise ConfigurationError(f"there is an accountant {name!r} already ({type(known).__qualname__})")
        kind.name = name
        ACCOUNTANTS[name] = kind()
        return kind

    return register


def get_accountant(name: str) -> Accountant:
    """The accountant of that name, or `ConfigurationError` with the names there are."""
    if name not in ACCOUNTANTS:
        for point in entry_points(group="adadp.accountants", name=str(name)):
            point.load()
    try:
        return ACCOUNTANTS[name]
    except KeyError:
        raise ConfigurationError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {name!r}") from None


def covering_accountant(composition: Composition, neighbours: Neighbours, preferred: str | None = None) -> str:
    """The accountant to use: `preferred` (None: `pld`) if it covers every event, otherwise `rdp` if that does.

    An event without a proof counts as what a published text claims for it. Where neither covers everything the answer
    is `preferred`: there is no guarantee then, whoever is asked.
    """
    preferred = preferred or DEFAULT
    claims = (event.claimed if isinstance(event, Uncovered) else event for event, _ in canonical(composition))
    events = [event for event in claims if event is not None]
    for name in (preferred, BROADEST):
        if all(get_accountant(name).refusal(event, Neighbours(neighbours)) is None for event in events):
            return name
    return preferred
