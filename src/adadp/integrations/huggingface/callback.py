"""What a private trainer does between a trainer's steps: stop at the budget, and show epsilon in the progress bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from adadp.accounting.guarantee import round_up
from adadp.extras import require

if TYPE_CHECKING:
    from adadp.integrations.huggingface.trainer import PrivateTraining

_SECONDS = 1.0  # between two looks at epsilon: accounting takes milliseconds


def PrivacyCallback(trainer: PrivateTraining) -> Any:  # noqa: N802 - a class whose base is imported late
    """A TrainerCallback that comes before all others, so that they see the numbers that it corrects."""
    base: Any = require("transformers", "huggingface", "a private trainer").TrainerCallback
    return type("PrivacyCallback", (_Events, base), {})(trainer)


class _Events:
    """The events that matter, by a trainer's names for them."""

    def __init__(self, trainer: PrivateTraining) -> None:
        self._trainer = trainer
        self._before = (0, 0.0)
        self._shown = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember the count of steps: one that the budget does not allow is not counted."""
        self._before = state.global_step, state.epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop where the budget is spent; show epsilon."""
        if self._trainer.budget_spent:
            state.global_step, state.epoch = self._before
            control.should_training_stop = True
        bars = (getattr(callback, "training_bar", None) for callback in self._trainer._self.callback_handler.callbacks)
        bar = next((bar for bar in bars if bar is not None), None)
        if hasattr(bar, "set_postfix") and time.monotonic() - self._shown > _SECONDS:
            self._shown = time.monotonic()
            epsilon = self._trainer.guarantee.epsilon
            bar.set_postfix(epsilon="none" if epsilon is None else round_up(epsilon, 3), refresh=False)  # type: ignore[union-attr]
