"""The guarantee in a trainer's state (`trainer_state.json`)."""

from __future__ import annotations

from typing import Any

from adadp.accounting.guarantee import Guarantee

STATE = "adadp"
"""The guarantee's name among a TrainerState's `stateful_callbacks`."""


def write_into_state(state: Any, guarantee: Guarantee) -> None:
    """Put the guarantee where a TrainerState keeps what callbacks export, and saves it."""
    state.stateful_callbacks[STATE] = {"args": {}, "attributes": {"guarantee": guarantee.to_dict()}}
