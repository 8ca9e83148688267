"""Runs that declared a number of steps are charged for all of them.

A loop that ends early may have ended because of what it saw: training stops when the loss stalls, and the number of
steps then depends on released values. The whole plan covers that, because a prefix of what was planned is
post-processing of all of it. So from its first step on, a run with n planned steps counts for max(made, n).

Which kind of step the rest would have been is known only where all steps are of one kind. Otherwise the rest counts as
a step at least as dear as every kind that the run has charged (`dearest`); that no dearer kind was still to come is
part of what every guarantee assumes: noise and rates were fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from adadp.accounting.events import Event, FixedSizeGaussian, Gaussian, PoissonGaussian, RenyiBlock, Uncovered


def is_step(event: Event) -> bool:
    """Whether the event counts towards a plan's "steps": preprocessing and filters do not."""
    return not isinstance(event, Gaussian | RenyiBlock)


def steps_in(counts: Mapping[Event, int]) -> int:
    """How many steps, of whatever kind."""
    return sum(count for event, count in counts.items() if is_step(event))


def dearest(kinds: Iterable[Event]) -> Event:
    """A step that costs at least as much as each of `kinds` (at least one, steps only).

    The cost of a step falls with its noise and rises with its rate, so the least noise at the highest rate will do. A
    kind that no proof covers is dearer than any that one does. Poisson lots and lots of a fixed size have no relation
    under which both are covered: there is no guarantee then, and any of them will do.
    """
    seen = list(kinds)
    for event in seen:
        if isinstance(event, Uncovered):
            return event
    poisson = [event for event in seen if isinstance(event, PoissonGaussian)]
    if poisson:
        return PoissonGaussian(min(e.noise_multiplier for e in poisson), max(e.rate for e in poisson))
    fixed = [event for event in seen if isinstance(event, FixedSizeGaussian)]
    largest = max(fixed, key=lambda event: event.lot / event.examples)
    return FixedSizeGaussian(min(e.noise_multiplier for e in fixed), largest.examples, largest.lot)


def as_planned(counts: Mapping[Event, int], steps: int | None) -> dict[Event, int]:
    """`counts` filled up to `steps` steps, if there is a step in them and a plan at all."""
    filled = {event: count for event, count in counts.items() if count}
    kinds = [event for event in filled if is_step(event)]
    left = 0 if steps is None or not kinds else steps - steps_in(filled)
    if left > 0:
        event = dearest(kinds)
        filled[event] = filled.get(event, 0) + left
    return filled
