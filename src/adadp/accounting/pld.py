"""Privacy loss distributions from dp-accounting, at a discretisation chosen from the answer's size.

Guarantee: the answers are upper bounds at every discretisation. dp-accounting's connect-the-dots rounding
dominates the true distribution, what it truncates goes to an infinite loss, and what floating point may lose
is subtracted from delta beforehand (`LOST_PER_STEP`).

A fixed interval does not serve every question: at q = 0.5, sigma = 0.4 and a million steps epsilon is a
million and an interval of 1e-4 needs gigabytes, at q = 1e-6 it is 0.003 and the same interval is eight times
too loose. So the interval starts coarse, at 1/64 of a bound that is already known, and is divided by four
until epsilon stops falling or the arrays reach their limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Part = tuple[float, float, int]
"""(noise multiplier, sampling rate, how often): one kind of Poisson-sampled Gaussian release."""

LOST_PER_STEP = 1e-15
"""What one step may hide from delta. dp-accounting's profile of one step is right to 5e-16 (against 40-digit
arithmetic; a profile that is too small by x is dominated by one with x more infinite loss, so T steps lose
at most T x). Its Fourier transform, raised to the number of steps, lost under 1e-16 a step where the exact
answer is known (Gaussian, 10^6 steps)."""

_STABLE = 5e-4
"""Refining ends when epsilon falls by less than this fraction."""

_MOST_WORK = 2e6
"""In array elements. About 1.5 s and 300 MiB."""

_SINGLE_WORK = 15.0  # an element of one step costs a Python call, one of the composition a share of an FFT


class TooLargeError(Exception):
    """The arrays of this discretisation are beyond what may be spent."""


@dataclass(frozen=True)
class Direction:
    """The losses of one direction (adding or removing an example): probabilities on a grid, and at infinity.

    The same sums as dp-accounting's, over arrays: its loop over a million losses takes a second.
    """

    interval: float
    lowest: int
    probabilities: Any
    infinite: float

    @classmethod
    def of(cls, pmf: Any) -> Direction:
        """From dp-accounting's distribution. Rounding may have made a probability negative: it counts as 0."""
        import numpy

        return cls(pmf._discretization, pmf._lower_loss, numpy.maximum(pmf._probs, 0.0), float(pmf._infinity_mass))

    def delta(self, epsilon: float) -> float:
        """The expectation of max(0, 1 - e^(epsilon - loss))."""
        import numpy

        if epsilon >= (self.lowest + len(self.probabilities)) * self.interval:
            return self.infinite  # also where epsilon / interval is beyond any number
        first = max(0, math.floor(epsilon / self.interval) - self.lowest)
        above = self.probabilities[first:]
        losses = (numpy.arange(first, first + len(above)) + self.lowest) * self.interval
        return self.infinite + float(numpy.dot(numpy.maximum(-numpy.expm1(epsilon - losses), 0.0), above))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon whose delta is at most `delta`, up to 1e-5 of itself, rounded up."""
        if self.infinite > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, (self.lowest + len(self.probabilities)) * self.interval
        while high - low > 1e-5 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


@dataclass(frozen=True)
class Distribution:
    """A composed privacy loss distribution, in both directions, and what to add to its delta."""

    directions: tuple[Direction, ...]
    lost: float

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon for `delta`; infinite where the arithmetic cannot resolve a delta so small."""
        if delta <= 2 * self.lost:
            return math.inf
        return max(direction.epsilon(delta - self.lost) for direction in self.directions)

    def delta(self, epsilon: float) -> float:
        """The smallest delta for `epsilon`."""
        return min(1.0, max(direction.delta(epsilon) for direction in self.directions) + self.lost)


def _range(part: Part, log_truncation: float) -> float:
    """How far apart the largest and the smallest loss of one step are."""
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    sigma, rate, _ = part
    bounds = GaussianPrivacyLoss(
        sigma, sampling_prob=rate, adjacency_type=AdjacencyType.REMOVE, log_mass_truncation_bound=log_truncation
    ).connect_dots_bounds()
    return float(bounds.epsilon_upper - bounds.epsilon_lower)


def _truncations(parts: tuple[Part, ...], tail: float) -> tuple[float, list[float]]:
    """Each part's share of the mass that may be cut off, and the logarithm of what one step may lose."""
    share = tail / (2 * len(parts))
    return share, [max(-50.0, math.log(share / count)) for _, _, count in parts]


def _window(pmf: Any, count: int, tail: float) -> int:
    """How many elements dp-accounting's self-composition will hold."""
    from dp_accounting.pld.common import compute_self_convolve_bounds

    low, high = compute_self_convolve_bounds(pmf._probs, count, tail)
    return int(high) - int(low) + 1


def build(parts: tuple[Part, ...], interval: float, tail: float) -> tuple[tuple[Direction, ...], float]:
    """The composition at one interval and the work it took. `TooLargeError` before it takes too much."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    share, truncations = _truncations(parts, tail)
    work = _SINGLE_WORK * sum(
        2 * _range(part, bound) / interval for part, bound in zip(parts, truncations, strict=True)
    )
    if work > _MOST_WORK:
        raise TooLargeError
    directions: list[list[Any]] = [[], []]
    for (sigma, rate, count), bound in zip(parts, truncations, strict=True):
        single = from_gaussian_mechanism(
            sigma, value_discretization_interval=interval, sampling_prob=rate, log_mass_truncation_bound=bound
        )
        # Sparse distributions (under a thousand losses) compose in slow dictionaries: make all of them dense.
        remove = single._pmf_remove.to_dense_pmf()
        add = remove if rate == 1 else single._pmf_add.to_dense_pmf()
        for pmfs, pmf in zip(directions, (remove, add), strict=True):
            work += _window(pmf, count, share)
            if work > _MOST_WORK:
                raise TooLargeError
            pmfs.append(pmf.self_compose(count, share) if count > 1 else pmf)
    composed: list[Direction] = []
    for pmfs in directions:
        pmfs.sort(key=lambda pmf: int(pmf.size))
        result = pmfs[0]
        for pmf in pmfs[1:]:
            work += result.size + pmf.size
            if work > _MOST_WORK:
                raise TooLargeError
            result = result.compose(pmf, share)
        composed.append(Direction.of(result))
    return tuple(composed), work


@lru_cache(maxsize=8)  # each holds megabytes
def distribution(parts: tuple[Part, ...], delta: float, scale: float, stable: float = _STABLE) -> Distribution | None:
    """The composition, fine enough for its epsilon at `delta`; None where no affordable discretisation
    resolves it.

    `scale` is an upper bound on that epsilon. It only chooses where the search begins. It ends when epsilon falls by
    less than the fraction `stable`.
    """
    lost = LOST_PER_STEP * sum(count for _, _, count in parts)
    if delta <= 2 * lost or not (math.isfinite(scale) and scale > 0):
        return None
    tail = min(1e-5 * delta, 1e-8)
    # Coarser than a few points to one step's losses is never useful, and e^interval has to be a number.
    widest = max(map(_range, parts, _truncations(parts, tail)[1]))
    interval = 2.0 ** math.floor(math.log2(min(scale / 64, widest / 8)))
    best: Distribution | None = None
    epsilon = math.inf
    while True:
        try:
            composed, work = build(parts, interval, tail)
        except TooLargeError:
            if best is not None or interval > widest:
                return best
            interval *= 4  # a tiny epsilon at a large delta: less than that is known of a wide distribution
            continue
        except (MemoryError, OverflowError, ValueError):
            # The last two are how dp-accounting reports noise so small that its profile is not a number.
            return best
        candidate = Distribution(composed, lost)
        value = candidate.epsilon(delta)
        if value <= epsilon:
            best, previous, epsilon = candidate, epsilon, value
            if math.isfinite(value) and previous - value <= stable * value:
                return best
        elif math.isfinite(epsilon):
            return best  # refining made it worse: rounding noise has taken over
        if 3 * work > _MOST_WORK:
            return best
        interval /= 4
