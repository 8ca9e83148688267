"""The door through which tests watch runs that a user's own function makes (`adadp.testing`, `adadp.audit`).

While a watcher is set, every run that an engine of this process starts is shown to it, and the watcher observes what
the run releases before its noise. So the guarantee of every such run is none (`PrivateOptimizer.observe`), and
nothing is written into a ledger's file: a test charges nobody's budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.mechanism.optimizer import PrivateOptimizer
    from adadp.mechanism.step import Observer
    from adadp.sampling.loader import PrivateLoader


class Watcher(Protocol):
    """Sees every run that is started."""

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> Observer:
        """Called when a model was made private; what it returns observes the run."""


_watcher: Watcher | None = None


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
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


def watching() -> bool:
    """Whether runs are watched now."""
    return _watcher is not None


def attach(optimizer: PrivateOptimizer, loader: PrivateLoader) -> None:
    """Show a run that was just made to the watcher, if there is one."""
    if _watcher is not None:
        optimizer.observe(_watcher.started(optimizer, loader))


__all__ = ["Watcher", "attach", "watched_by", "watching"]
