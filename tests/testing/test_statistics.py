"""Tests of what a loop draws find what is planted, and nothing where nothing is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.randomness import Randomness
from adadp.testing import inclusion, noise, processes
from testing import loops
from testing.loops import rows, trainer


def with_engine(make: Callable[[], PrivacyEngine], epochs: int = 2, **settings: Any) -> Callable[[Any], None]:
    def train(dataset: Any) -> None:
        model = loops.net()
        model, optimizer, loader = make().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
            data_loader=DataLoader(dataset, batch_size=8), **settings,
        )  # fmt: skip
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                loops.cross_entropy(model, batch).backward()
                optimizer.step()

    return train


class Weak(Randomness):
    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().normal(like)


class WeakEngine(PrivacyEngine):
    def __init__(self) -> None:
        super().__init__()
        self._randomness = Weak()


def test_the_engines_noise_is_as_charged() -> None:
    found = noise(trainer(), rows())
    assert found.passed, str(found)
    assert "proves nothing" in str(found)


def test_too_little_noise_and_noise_used_twice_are_found() -> None:
    weak = noise(with_engine(WeakEngine), rows())
    assert not weak.passed
    assert weak.p_values["variance"] < 1e-9
    twice = noise(with_engine(lambda: PrivacyEngine(seed=3)), rows())
    assert twice.p_values["independence"] == 0
    assert "run 0, lot 0 and run 1, lot 0" in str(twice)


def test_processes_that_are_forked_share_no_noise() -> None:
    engine = PrivacyEngine()  # made before the fork, and carried into each child
    found = processes(with_engine(lambda: engine), rows())
    assert found.passed, str(found)
    seeded = PrivacyEngine(seed=1)
    with pytest.raises(ConfigurationError, match="made with a seed"):
        processes(with_engine(lambda: seeded), rows())
    with pytest.raises(ConfigurationError, match="the function failed: ValueError: mine"):
        processes(lambda dataset: (_ for _ in ()).throw(ValueError("mine")), rows())


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_copies_of_an_engine_share_no_noise(again: Callable[[PrivacyEngine], PrivacyEngine]) -> None:
    """An engine that is made once and copied for each run of a sweep."""
    engine = PrivacyEngine()
    found = noise(with_engine(lambda: again(engine), epochs=1), rows())
    assert found.passed, str(found)


def test_inclusion_rates_match_q_and_shuffling_does_not() -> None:
    assert inclusion(trainer(epochs=10), rows(), lots=60).passed
    assert inclusion(trainer(epochs=10, sampling="fixed"), rows(), lots=60).passed
    shuffled = inclusion(trainer(epochs=10, sampling="shuffle"), rows(), lots=60)
    assert shuffled.p_values["two lots in a row"] < 1e-6
    with pytest.raises(ConfigurationError, match="fewer than two lots"):
        inclusion(lambda dataset: None, rows())
