"""How tests and audits see a run's releases, before and after the noise (`adadp.testing`, `adadp.audit`).

An `Observer` sees the releases of one run (`PrivateOptimizer.observe`), and the guarantee of that run is none. While a
`RunWatcher` is set (`watched_by`), every run that an engine of this process starts is shown to it, so that runs made
inside a user's own function can be observed. Nothing is written into a ledger's file then: a test charges no budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from adadp.accounting.events import Event
from adadp.errors import ConfigurationError
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev

if TYPE_CHECKING:
    from adadp.mechanism.optimizer import PrivateOptimizer
    from adadp.sampling.loader import PrivateLoader


@dataclass(frozen=True)
class Unnoised:
    """Sums just before their noise, for observers: private data.

    `kind` is "gradient", or what else an algorithm releases on the lot ("objectives", "redraw").
    """

    kind: str
    lot: int
    sums: BoundedSums
    stddev: Stddev
    noise_multiplier: float
    event: Event
    expected_lot: float


class Observer:
    """Sees what a step releases, before and after its noise. Subclasses override what they want to see."""

    def noising(self, release: Unnoised) -> NoisedSums | None:
        """Called before the noise is drawn. If sums are returned, they are released as they are, without noise."""
        return None

    def noised(self, release: Unnoised, noisy: NoisedSums) -> None:
        """Called with the noised sums, before the clipping turns them into a gradient."""

    def stepped(self, lot: int, gradient: ReleasedGradient) -> None:
        """Called with the private gradient that the optimizer gets."""


class RunWatcher(Protocol):
    """Sees every run that is started."""

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> Observer:
        """Called when a model was made private; what it returns observes the run."""


_watcher: RunWatcher | None = None


@contextmanager
def watched_by(watcher: RunWatcher) -> Iterator[None]:
    """Show all runs that are started inside to `watcher`.

    Raises:
        ConfigurationError: another watcher is set already.

    """
    global _watcher
    if _watcher is not None:
        raise ConfigurationError(
            "runs are being watched already: a function that is under test cannot test another one. Call one after "
            "the other."
        )
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def under_test() -> bool:
    """Whether runs are watched now."""
    return _watcher is not None


def attach(optimizer: PrivateOptimizer, loader: PrivateLoader) -> None:
    """Show a run that was just made to the watcher, if there is one."""
    if _watcher is not None:
        optimizer.observe(_watcher.started(optimizer, loader))


__all__ = ["Observer", "RunWatcher", "Unnoised", "attach", "under_test", "watched_by"]
