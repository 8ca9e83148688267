"""Fixtures for pytest, found by entry point. adadp itself is imported only when one is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def adadp_influence() -> Callable[..., Any]:
    """`adadp.testing.influence`, as a check that fails the test unless the verdict is "within".

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
