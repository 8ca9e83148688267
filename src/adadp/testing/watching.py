"""What all tests of a user's training function share: it is run under watch, quietly, and ended after enough lots."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from adadp.errors import UntriedWarning
from adadp.mechanism.observation import RunWatcher, watched_by
from adadp.mechanism.optimizer import BudgetWarning
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Microbatch

LOTS = 8
"""How many lots are looked at by default."""

RELEASED_NOTHING = "the function released nothing: it has to make a model private and train it"

Train = Callable[[Any], Any]
"""The user's own function: it makes model, engine, loader and loop, and is called with a dataset."""


class EnoughLots(BaseException):
    """Ends a training function when enough lots were seen. Not an Exception, so that no loop catches it."""


@contextmanager
def quietly_watched_by(watcher: RunWatcher) -> Iterator[None]:
    """Show every private run that is started inside to `watcher`, without warnings that are meant for training."""
    with warnings.catch_warnings(), watched_by(watcher):
        warnings.simplefilter("ignore", UntriedWarning)
        warnings.simplefilter("ignore", BudgetWarning)
        yield


def on_hand_out(loader: PrivateLoader, react: Callable[[Microbatch], None]) -> None:
    """Call `react` with every microbatch that the loader hands out, after the engine's own hook."""
    own = loader.lots.on_hand_out

    def handed_out(microbatch: Microbatch) -> None:
        own(microbatch)
        react(microbatch)

    loader.lots.on_hand_out = handed_out
