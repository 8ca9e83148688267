"""What engines print is compared with all that one example is in, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError, NoGuaranteeError
from adadp.testing import spending
from adadp.testing.fingerprints import unmatched
from testing import loops
from testing.loops import rows, trainer

DELTA = 1e-5


def test_one_engine_covers_what_it_did() -> None:
    for settings in ({}, {"sampling": "fixed"}, {"max_physical_batch_size": 3}):
        found = spending(trainer(epochs=1, **settings), rows())
        assert found.passed, str(found)
        assert found.releases == 6
        assert found.largest == pytest.approx(found.total, rel=1e-3)


def test_parts_that_do_not_overlap_are_not_added_up() -> None:
    def folds(dataset: Any, parts: list[range]) -> None:
        for part in parts:
            trainer(epochs=1)(Subset(Subset(dataset, range(48)), part))

    apart = spending(lambda dataset: folds(dataset, [range(24), range(24, 48)]), rows())
    assert apart.passed, str(apart)
    assert not spending(lambda dataset: folds(dataset, [range(32), range(16, 48)]), rows()).passed


def test_the_function_is_told_its_own_number_and_nothing_stays_changed() -> None:
    told: list[float] = []

    def train(dataset: Any) -> None:
        engine, model = PrivacyEngine(budget=(6.0, DELTA)), loops.net()
        for _ in range(2):
            _, optimizer, loader = engine.make_private(
                module=(model := loops.net()), optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
                data_loader=DataLoader(dataset, batch_size=8),
            )  # fmt: skip
            for batch in loader:
                optimizer.zero_grad()
                loops.cross_entropy(model, batch).backward()
                optimizer.step()
            told.append(engine.get_epsilon(DELTA))

    before = PrivacyEngine._open, PrivacyEngine.guarantee
    found = spending(train, rows())
    assert found.passed, str(found)
    assert found.largest == pytest.approx(told[-1])
    assert (PrivacyEngine._open, PrivacyEngine.guarantee) == before


def test_where_no_engine_prints_a_number_none_is_false() -> None:
    found = spending(trainer(sampling="shuffle", epochs=1), rows())
    assert found.printed == (None,)
    assert found.passed
    assert "no engine prints a number" in str(found)


def test_what_the_function_raises_is_raised() -> None:
    def asks(dataset: Any) -> None:
        engine, model = PrivacyEngine(strict=True), nn.Linear(6, 4)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
            data_loader=DataLoader(dataset, batch_size=8),
        )  # fmt: skip
        for batch in loader:
            optimizer.zero_grad()
            loops.cross_entropy(model, batch).backward()
            optimizer.step()
        engine.get_epsilon(DELTA)

    with pytest.raises(NoGuaranteeError, match=r"strict=True(?!.*observer)"):
        spending(asks, rows())


def test_relations_are_not_added_up() -> None:
    def both(dataset: Any) -> None:
        trainer(epochs=1)(dataset)
        trainer(epochs=1, sampling="fixed")(dataset)

    found = spending(both, rows())
    assert found.total is None
    assert not found.passed
    assert "no number is about both" in str(found)


def test_a_function_that_releases_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="released nothing"):
        spending(lambda dataset: None, rows())


def test_lengths_are_matched_once_each() -> None:
    assert unmatched([1.0, 1.0, 2.0], [1.0, 2.0], 0.0) == 1
    assert unmatched([1.0, 2.0], [1.0, 1.001, 2.0], 0.0) == 0
    assert unmatched([0.0, 1e-6, float("inf")], [0.0, 0.0, float("inf")], 1e-4) == 0
    assert unmatched([1.0, float("inf")], [1.0, 5.0], 0.0) == 1
