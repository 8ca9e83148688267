"""What was released in total: events and how often each happened.

The order of releases does not matter to any accountant, so a composition is brought into one canonical form
before it is accounted: equal events merged, sorted. Two orders of the same releases then give the same
number, to the last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adadp.accounting.events import Event, Uncovered, event_from_json, event_to_json
from adadp.errors import AccountingError, ConfigurationError

Composition = Mapping[Event, int] | Iterable[tuple[Event, int]]
Canonical = tuple[tuple[Event, int], ...]


def canonical(composition: Composition) -> Canonical:
    """Equal events merged, zero counts dropped, in an order that depends on the content only."""
    pairs = composition.items() if isinstance(composition, Mapping) else composition
    counts: dict[Event, int] = {}
    for event, count in pairs:
        # A float count such as 1e6 is refused: 0.5 releases have no meaning, and silence would truncate them.
        whole = hasattr(count, "__index__") and not isinstance(count, bool)
        if not whole or count < 0:
            raise ConfigurationError(f"the count of {event!r} must be a whole number >= 0, not {count!r}")
        if count:
            counts[event] = counts.get(event, 0) + operator.index(count)
    return tuple(sorted(counts.items(), key=lambda pair: (type(pair[0]).__name__, repr(pair[0]))))


def uncovered_reasons(composition: Composition) -> tuple[str, ...]:
    """Why this composition has no guarantee, each reason once. Empty when proofs cover every event."""
    return tuple(dict.fromkeys(event.reason for event, _ in canonical(composition) if isinstance(event, Uncovered)))


def refuse_uncovered(composition: Canonical) -> None:
    """Raise `AccountingError` if any event is covered by no proof."""
    reasons = uncovered_reasons(composition)
    if reasons:
        raise AccountingError("no accountant covers this composition, so it has no epsilon: " + "; ".join(reasons))


def releases_to_json(composition: Composition) -> list[list[Any]]:
    """The composition as plain JSON: pairs of an event and its count."""
    return [[event_to_json(event), count] for event, count in canonical(composition)]


def releases_from_json(values: Iterable[Sequence[Any]]) -> Canonical:
    """The inverse of `releases_to_json`. Raises `ConfigurationError` for anything that is not a composition."""
    try:
        return canonical([(event_from_json(event), count) for event, count in values])
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"not a list of releases: {error}") from None
