"""Statistical tests of what a loop draws: the noise's variance and independence, and how often examples are in lots.

Each is a hypothesis test at level 1e-6, so that a whole suite of them has no false alarms. A test that passes proves
nothing.
"""

from __future__ import annotations

import math
import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from adadp.errors import ConfigurationError, NoGuaranteeError, PrivacyError
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.sums import NoisedSums
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Microbatch
from adadp.testing.watching import (
    LOTS,
    RELEASED_NOTHING,
    EnoughLots,
    Train,
    on_hand_out,
    quietly_watched_by,
)

THRESHOLD = 1e-6
"""The p-value below which a test fails."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Tested:
    """The p-values of several tests of one property, by name. `details` says in words what was measured."""

    what: str
    p_values: dict[str, float]
    details: str

    @property
    def p_value(self) -> float:
        """The smallest p-value, corrected for the number of tests (Bonferroni)."""
        return min(1.0, min(self.p_values.values()) * len(self.p_values))

    @property
    def passed(self) -> bool:
        """Whether no test failed. That proves nothing."""
        return self.p_value >= THRESHOLD

    def __str__(self) -> str:
        found = ", ".join(f"{name} p = {value:.2g}" for name, value in self.p_values.items())
        verdict = "nothing found, which proves nothing" if self.passed else "not as it should be"
        return f"{self.what}: {verdict} ({found}; {self.details})"


# ---- noise ----------------------------------------------------------------------------------------------------------


def noise(train: Train, dataset: Any, *, runs: int = 2, lots: int = LOTS) -> Tested:
    """Whether the noise of a loop has the variance that is charged for, and is independent between lots and runs.

    Args:
        train: the user's own function, called `runs` times as it is.
        dataset: what it is called with.
        runs: how often. Noise that two runs share cancels in their difference.
        lots: how many releases of each run are used.

    """
    drawn = [each for number in range(runs) for each in _drawn(train, dataset, lots, f"run {number}")]
    return _tested("noise", drawn)


def processes(train: Train, dataset: Any, *, processes: int = 2, lots: int = LOTS) -> Tested:
    """Whether forked processes that run the loop share noise.

    An engine made before the fork, such as one at the top of a module, is carried into each child.

    Raises:
        PrivacyError: the engine refused to draw in a child.
        ConfigurationError: this system does not fork.

    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("this system does not fork: processes that are spawned draw their own entropy")
    context = multiprocessing.get_context("fork")
    drawn: list[_Drawn] = []
    for number in range(processes):  # one after the other: each starts from the same state of the parent
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_in_child, args=(sender, train, dataset, lots, f"process {number}"))
        child.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            raise ConfigurationError(f"process {number} ended without an answer") from None
        finally:
            child.join()
        if isinstance(found, BaseException):
            raise found
        drawn += found
    return _tested("noise over processes", drawn)


def _in_child(sender: Any, train: Train, dataset: Any, lots: int, name: str) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        sender.send(_drawn(train, dataset, lots, name))
    except PrivacyError as error:
        sender.send(type(error)(str(error)))
    except BaseException as error:
        sender.send(ConfigurationError(f"the function failed: {type(error).__name__}: {error}"))
    sender.close()


@dataclass(frozen=True)
class _Drawn:
    """The noise of one release, divided by the standard deviation that is charged for."""

    name: str
    values: Numbers


def _drawn(train: Train, dataset: Any, lots: int, name: str) -> list[_Drawn]:
    watch = _NoiseWatch(lots, name)
    _run(train, dataset, watch)
    if not watch.drawn:
        raise ConfigurationError(RELEASED_NOTHING)
    return watch.drawn


class _NoiseWatch(Observer):
    """Notes the noise of every release."""

    def __init__(self, lots: int, name: str) -> None:
        self._lots, self._name = lots, name
        self.drawn: list[_Drawn] = []

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> _NoiseWatch:
        on_hand_out(loader, self._handed_out)
        return self

    def _handed_out(self, microbatch: Microbatch) -> None:
        if microbatch.index == 0 and len(self.drawn) >= self._lots:
            raise EnoughLots

    def noised(self, release: Unnoised, noisy: NoisedSums) -> None:
        parts = []
        for name, value in noisy.items():
            spread = torch.as_tensor(release.stddev[name]).double().cpu()
            difference = (value.detach().double() - release.sums[name].detach().double()).cpu()
            parts.append((difference / spread).flatten())
        self.drawn.append(_Drawn(f"{self._name}, lot {release.lot}", torch.cat(parts).numpy()))


def _tested(what: str, drawn: list[_Drawn]) -> Tested:
    values = np.concatenate([each.values for each in drawn])
    count, square = len(values), float((values**2).sum())
    variance = 2 * min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count))
    if not math.isfinite(square):
        variance = 0.0
    shift = 2 * float(stats.norm.sf(abs(float(values.sum())) / math.sqrt(count)))
    pairs, closest, worst = 0, "", 1.0
    for place, one in enumerate(drawn):
        for other in drawn[:place]:
            if len(one.values) != len(other.values):
                continue
            pairs += 1
            chance = _unrelated(one.values, other.values)
            if chance < worst:
                closest, worst = f"; closest: {other.name} and {one.name}", chance
    found = {"variance": float(variance), "mean": shift, "independence": min(1.0, worst * max(1, pairs))}
    deviation = math.sqrt(square / count) if math.isfinite(square) else math.nan
    return Tested(what, found, f"{len(drawn)} releases, deviation {deviation:.4f} of what is charged for{closest}")


def _unrelated(one: Numbers, other: Numbers) -> float:
    """The p-value of the correlation of two releases' noise."""
    if np.allclose(one, other, rtol=1e-3, atol=1e-6):
        return 0.0
    if len(one) < 4:
        return 1.0
    return float(stats.pearsonr(one, other).pvalue)


# ---- lots -----------------------------------------------------------------------------------------------------------


def inclusion(train: Train, dataset: Any, *, lots: int = 100) -> Tested:
    """Whether examples are in lots as often as the rate q says, independently of the lot before.

    Args:
        train: the user's own function; it has to run for `lots` lots.
        dataset: what it is called with.
        lots: how many are counted. 100 lots at q = 0.1 find an example that is in twice as many as it should be.

    """
    watch = _LotWatch(lots)
    _run(train, dataset, watch)
    if watch.loader is None or len(watch.held) < 2:
        raise ConfigurationError("fewer than two lots were handed out: let the function train for longer")
    examples, rate = watch.loader.sampling.examples, watch.loader.sampling.lot / watch.loader.sampling.examples
    table = np.zeros((len(watch.held), examples), dtype=bool)
    for number, indices in enumerate(watch.held.values()):
        table[number, list(indices)] = True
    count = table.sum(0)
    chances = 2 * np.minimum(stats.binom.cdf(count, len(table), rate), stats.binom.sf(count - 1, len(table), rate))
    fixed = len({int(size) for size in table.sum(1)}) == 1 and watch.loader.sampling.name == "fixed"
    total = 1.0 if fixed else _binomial(int(table.sum()), table.size, rate)
    again = int((table[1:] & table[:-1]).sum())
    found = {
        "each example": min(1.0, float(chances.min()) * examples),
        "all examples": total,
        "two lots in a row": _binomial(again, table[1:].size, rate**2),
    }
    return Tested("inclusion", found, f"{len(table)} lots, rate {table.mean():.4f} where {rate:.4f} is charged for")


def _binomial(count: int, trials: int, chance: float) -> float:
    return float(stats.binomtest(count, trials, min(1.0, chance)).pvalue)


class _LotWatch(Observer):
    """Notes which examples were handed out."""

    def __init__(self, lots: int) -> None:
        self._lots = lots
        self.loader: PrivateLoader | None = None
        self.held: dict[int, set[int]] = {}

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> _LotWatch:
        if self.loader is None:
            self.loader = loader
            on_hand_out(loader, self._handed_out)
        return self

    def _handed_out(self, microbatch: Microbatch) -> None:
        if microbatch.index == 0 and len(self.held) >= self._lots:
            raise EnoughLots
        self.held.setdefault(microbatch.lot, set()).update(microbatch.indices)


def _run(train: Train, dataset: Any, watch: _NoiseWatch | _LotWatch) -> None:
    # NoGuaranteeError: the loop asked for an epsilon, and there is none while it is watched.
    with quietly_watched_by(watch), suppress(EnoughLots, NoGuaranteeError):
        train(dataset)


__all__ = ["THRESHOLD", "Tested", "inclusion", "noise", "processes"]
