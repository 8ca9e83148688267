"""Metrics that modules and callbacks log while they train: values computed from private examples, without noise.

They would reach loggers, the progress bar and whatever monitors them, so they are dropped, with one warning for each
name, unless their name was declared public. Validation has results of its own, which are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from typing import Any


class PrivateMetricWarning(UserWarning):
    """A metric of training examples was not logged."""


class TrainingMetrics:
    """Stands before the trainer's collection of training results.

    Args:
        results: the collection (`epoch_loop._results`), whose `log` is replaced until `restore`.
        public: names, or patterns of names, that were declared public.
        trying: whether a trial runs `training_step` now, which Lightning is not to notice.

    """

    def __init__(self, results: Any, public: Collection[str], trying: Callable[[], bool]) -> None:
        self._results, self._public, self._trying = results, public, trying
        self._log: Callable[..., None] = results.log
        self._dropped: set[str] = set()
        results.log = self._logged

    def restore(self) -> None:
        """Let everything through again."""
        self._results.__dict__.pop("log", None)

    def log_public(self, module: Any, name: str, value: float) -> None:
        """Log a value that is public, to the progress bar and to loggers."""
        public, self._public = self._public, (name,)
        try:
            module.log(name, value, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        finally:
            self._public = public

    def _logged(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if any(fnmatch(name, pattern) for pattern in self._public):
            if not self._trying():
                self._log(fx, name, value, *args, **kwargs)
            return
        if name not in self._dropped:
            self._dropped.add(name)
            warnings.warn(
                f"{name} was not logged: {fx} computes it from private examples, and nobody paid for it. It reaches no "
                "logger, no progress bar and no callback. Log validation metrics instead, or, if it holds nothing of "
                f"the data (a learning rate), declare it: Private(public_metrics=[{name!r}]).",
                PrivateMetricWarning,
                stacklevel=2,
            )


__all__ = ["PrivateMetricWarning", "TrainingMetrics"]
