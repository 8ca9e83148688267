"""Fixtures for pytest, found by entry point. Nothing of adadp is imported until one is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def adadp_influence() -> Callable[..., Any]:
    """`adadp.testing.influence`, which fails the test where the loop is not as it should be.

        def test_my_loop(adadp_influence):
            adadp_influence(train, dataset)

    It returns the result where no example that was tried moved a release by more than its bound. A loop that the engine
    refuses fails too, unless `refused=True` expects that.
    """

    def check(train: Callable[[Any], Any], dataset: Any, *, refused: bool = False, **options: Any) -> Any:
        from adadp.testing import influence

        found = influence(train, dataset, **options)
        if found.verdict != ("refused" if refused else "within"):
            pytest.fail(str(found), pytrace=False)
        return found

    return check
