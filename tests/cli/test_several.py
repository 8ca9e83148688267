"""One of several processes that torchrun started: what it says when another has died."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from adadp.cli import several, train
from adadp.errors import DistributedError
from adadp.training import loop


class KilledError(Exception):
    """In the place of what a signal does to a process that did not ask for it."""


@pytest.fixture
def deadly() -> Any:
    def kill(*_: object) -> None:
        raise KilledError

    before = signal.signal(signal.SIGTERM, kill)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_does_not_come_before_the_error(deadly: None, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """torchrun sends it as soon as another process has died, whatever this one is about to say."""
    said = []

    def say(message: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        said.append(message)

    def run(*_: object) -> None:
        raise DistributedError("the processes could not agree")

    monkeypatch.setattr(several, "say_error", say)
    monkeypatch.setattr(loop, "run", run)
    plan: Any = SimpleNamespace(group=SimpleNamespace(alone=False, first=rank == 0, rank=rank))
    with pytest.raises(typer.Exit):
        train._run(plan, True, ())
    assert said == [f"{'' if rank == 0 else 'process 1: '}the processes could not agree"]
