"""Epsilon after every step, in a fraction of a millisecond: for loops that print it.

The exact answer composes all steps anew, which takes half a second. Between two answers only a few steps were added, so
here the distribution of an earlier moment (the anchor) is kept, with that of 1, 2, ..., 32 further steps. At epsilon
the delta of both together is one sum: over the losses of the further steps, times the anchor's delta at what is left.

Guarantee: every answer is an upper bound. Both distributions dominate the true ones, as in `pld`; what is cut off or
may be lost in rounding is added to the infinite loss. The interval is coarser than that of the exact answer, which is
why the bound is a little larger: by less than 1% for the runs of tests/accounting/test_running.py, and by up to 9% was
seen where rates or delta are tiny, or the ledger holds other releases beside the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adadp.accounting import pld, renyi
from adadp.accounting.accountant import Accountant, Spent
from adadp.accounting.accountants import Pld
from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, Neighbours, PoissonGaussian

IN_A_LOOP = 200
"""Asked again within as many releases, the answer is the running bound."""

NOTE = "epsilon is a bound for progress, a little above the exact one; asked again before the next step it is exact"
_FURTHER = 32
_AHEAD = 1000  # steps for which an interval is chosen, at least
_STABLE, _COARSER = 1e-2, 2  # how an interval is chosen: delta's error falls as its square
_OVER = 1 + 5e-4  # the exact answer may lie as much above the truth (`pld`), and no bound is to be below it
_CUT = 1e-9  # of delta: what is cut off at either end of a sum


class RunningEpsilon:
    """Answers for one ledger: the exact ones, or the running bound where a loop asks."""

    def __init__(self) -> None:
        self._asked: dict[float, Canonical] = {}  # by delta
        self._windows: dict[float, _Window] = {}

    def epsilon(self, accountant: Accountant, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        """As `accountant.epsilon`; a bound on it if `releases` grew by a few steps since `delta` was last asked for."""
        before = self._asked.get(delta)
        self._asked[delta] = releases
        event = None if before is None else _grown(before, releases, IN_A_LOOP)
        if event is None or not isinstance(accountant, Pld) or neighbours is not Neighbours.ADD_REMOVE:
            return accountant.epsilon(releases, delta, neighbours)
        window = self._windows.get(delta)
        if window is None or not window.reaches(releases):
            made = _Window.at(accountant, releases, event, delta)
            if made is None:
                return accountant.epsilon(releases, delta, neighbours)
            self._windows = {**self._windows, delta: made} if len(self._windows) < 4 else {delta: made}
            window = made
        return Spent(window.epsilon(releases), delta, accountant.name, notes=(NOTE,))


def _grown(before: Canonical, after: Canonical, at_most: int) -> PoissonGaussian | None:
    """The one kind of step of which `after` has more, 1..at_most; None where anything else differs."""
    counts = dict(before)
    more = [(event, count - counts.get(event, 0)) for event, count in after if count != counts.get(event, 0)]
    if len(more) != 1 or len(after) != len(counts.keys() | dict(after).keys()):
        return None
    event, number = more[0]
    return event if isinstance(event, PoissonGaussian) and event.rate < 1 and 0 < number <= at_most else None


@dataclass
class _Losses:
    """Losses in one direction on the grid: probabilities from index `lowest` on, and the mass of infinite loss."""

    lowest: int
    probabilities: Any
    infinite: float

    def and_then(self, other: _Losses, cut: float) -> _Losses:
        """Of both together. At either end at most `cut` becomes infinite, and so does what rounding may lose."""
        import numpy
        from scipy.signal import fftconvolve

        a, b = self.probabilities, other.probabilities
        both = numpy.maximum(fftconvolve(a, b), 0.0)
        rounding = 4e-15 * len(both) * float(numpy.linalg.norm(a) * numpy.linalg.norm(b))
        first = int(numpy.searchsorted(numpy.cumsum(both), cut))
        last = len(both) - int(numpy.searchsorted(numpy.cumsum(both[::-1]), cut))
        infinite = self.infinite + other.infinite + 2 * cut + min(rounding, 1e-12)
        return _Losses(self.lowest + other.lowest + first, both[first:last], infinite)


class _Anchor:
    """Delta at every point of the grid, for releases of one direction, and of them with further steps."""

    def __init__(self, losses: _Losses, interval: float, reach: int) -> None:
        import numpy
        from scipy.signal import lfilter

        self.losses, self._interval = losses, interval
        self._first = -reach  # what is asked for is never below
        pad = losses.lowest - 1 - self._first
        p = losses.probabilities
        p = numpy.concatenate([numpy.zeros(pad), p]) if pad >= 0 else p[-pad:]
        # With S(m) the mass above m: delta(m) = e^-h delta(m + 1) + (1 - e^-h) S(m), a sum of positive terms.
        above = numpy.concatenate([numpy.cumsum(p[::-1])[::-1], [0.0]])
        decay = math.exp(-interval)
        self._deltas = lfilter([-math.expm1(-interval)], [1.0, -decay], above[::-1])[::-1] * (1 + 1e-9)
        self._index = 0

    def _delta(self, index: int, further: _Losses) -> float:
        """At epsilon = index * interval, of the anchor's releases and the further ones."""
        import numpy

        weights = further.probabilities
        top = index - further.lowest - self._first
        beyond = max(0, top - len(self._deltas) + 1)  # smallest further losses, at which the anchor's delta is 0
        count = len(weights) - beyond
        finite = 0.0
        if count > 0:
            finite = float(numpy.dot(self._deltas[top - len(weights) + 1 : top - beyond + 1], weights[beyond:][::-1]))
        return finite + self.losses.infinite + further.infinite

    def epsilon(self, delta: float, further: _Losses) -> float:
        """The smallest epsilon for `delta`; infinite where there is none."""
        if self.losses.infinite + further.infinite > delta:
            return math.inf
        index = self._index
        while self._delta(index, further) > delta:
            index += 1
        while index > 0 and self._delta(index - 1, further) <= delta:
            index -= 1
        self._index = index
        if index == 0:
            return 0.0
        # No loss lies between two points, where delta is therefore S - e^(epsilon - end) R.
        left, right = self._delta(index - 1, further), self._delta(index, further)
        r = (left - right) / -math.expm1(-self._interval)
        inside = math.log1p((right - delta) / r) if r > delta - right else -self._interval
        end = index * self._interval
        return min(end, (end + max(inside, -self._interval)) * (1 + 1e-9))


class _Window:
    """What is kept between two answers for one delta."""

    def __init__(self, event: PoissonGaussian, delta: float, interval: float, horizon: int, cut: float) -> None:
        self._event, self._delta, self._interval, self._horizon, self._cut = event, delta, interval, horizon, cut
        self._steps: tuple[list[_Losses], list[_Losses]] = ([], [])

    @classmethod
    def at(cls, accountant: Pld, releases: Canonical, event: PoissonGaussian, delta: float) -> _Window | None:
        """A window that begins here; None where no distribution is to be had."""
        count = dict(releases)[event]
        horizon = max(_AHEAD, 4 * count)
        ahead = tuple((each, horizon if each == event else number) for each, number in releases)
        aim = renyi.epsilon(ahead, delta, Neighbours.ADD_REMOVE)[0]
        found = pld.distribution(accountant.parts(ahead), delta, aim, _STABLE) if aim > 0 else None
        if found is None:
            return None
        window = cls(event, delta, _COARSER * found.directions[0].interval, horizon, _CUT * delta)
        window._begin(accountant, releases)
        return window

    def _begin(self, accountant: Pld, releases: Canonical) -> None:
        interval, tail = self._interval, min(1e-5 * self._delta, 1e-8)
        single, _ = pld.build(((self._event.noise_multiplier, self._event.rate, 1),), interval, 1e-3 * tail)
        for blocks, direction in zip(self._steps, single, strict=True):
            blocks.append(_of(direction))
        whole, _ = pld.build(accountant.parts(releases), interval, tail)
        self._releases, self._accountant = releases, accountant
        self._extend(_FURTHER)
        self._place([_of(direction) for direction in whole])

    def _extend(self, count: int) -> None:
        for blocks in self._steps:
            while len(blocks) < count:
                blocks.append(blocks[-1].and_then(blocks[0], self._cut))

    def _place(self, losses: list[_Losses]) -> None:
        reach = max(each.lowest + len(each.probabilities) for blocks in self._steps for each in blocks) + 1
        self._anchors = [_Anchor(each, self._interval, reach) for each in losses]

    def reaches(self, releases: Canonical) -> bool:
        """Whether this window can answer for `releases`."""
        event = _grown(self._releases, releases, self._horizon)
        return releases == self._releases or (event == self._event and dict(releases)[event] <= self._horizon)

    def epsilon(self, releases: Canonical) -> float:
        """The bound."""
        now = dict(releases)[self._event]
        more = now - dict(self._releases)[self._event]
        if more > _FURTHER:
            blocks = [each[_FURTHER - 1] for each in self._steps]
            losses = [anchor.losses for anchor in self._anchors]
            for _ in range(more // _FURTHER):
                losses = [one.and_then(block, self._cut) for one, block in zip(losses, blocks, strict=True)]
            done = more - more % _FURTHER
            self._releases = _with(self._releases, self._event, done)
            indices = [anchor._index for anchor in self._anchors]
            self._place(losses)
            for anchor, index in zip(self._anchors, indices, strict=True):
                anchor._index = index
            more -= done
        left = self._delta - pld.LOST_PER_STEP * sum(count for _, count in releases)
        nothing = _Losses(0, [1.0], 0.0)
        found = [
            anchor.epsilon(left, blocks[more - 1] if more else nothing)
            for anchor, blocks in zip(self._anchors, self._steps, strict=True)
        ]
        return max(found) * _OVER


def _of(direction: pld.Direction) -> _Losses:
    return _Losses(direction.lowest, direction.probabilities, direction.infinite)


def _with(releases: Canonical, event: Event, more: int) -> Canonical:
    return tuple((each, count + more if each == event else count) for each, count in releases)
