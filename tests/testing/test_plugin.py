"""The pytest fixture `adadp_influence`."""

from __future__ import annotations

from typing import Any

import pytest

from testing import loops
from testing.loops import rows, trainer


def test_the_fixture_fails_a_false_loop(adadp_influence: Any) -> None:
    assert adadp_influence(trainer(), rows(), examples=["large"], among="own", lots=3).verdict == "within"
    with pytest.raises(pytest.fail.Exception, match=r"exceeded|refused"):
        adadp_influence(trainer(loops.class_weights), rows(), examples=["other class"], among="alike")
