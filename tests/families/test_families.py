"""Models of Hugging Face and PEFT: each gradient is that of its example alone, and a private step is what it says."""

from __future__ import annotations

import pytest
from families.compare import assert_same, by_capture, by_loop, released_and_expected
from families.hugging_face import FAMILIES

every_family = pytest.mark.parametrize("name", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore")


@every_family
@pytest.mark.parametrize("count", ["one", "some", "crowd"])
def test_gradients_are_those_of_each_example_alone(name: str, count: str) -> None:
    """One example; some, of unlike lengths; and as many as there are positions, which look like a batch then."""
    family = FAMILIES[name]
    task, model = family.task, family.make()
    batch = task.batch({"one": 1, "some": 4, "crowd": task.crowd}[count])
    padded = by_loop(model, task, batch)
    found = by_capture(model, task, batch)
    assert_same(found, padded)
    assert_same(found, by_loop(model, task, batch, task.bare))


@every_family
def test_a_private_step_is_the_sum_of_clipped_gradients(name: str) -> None:
    """As the engine releases it after its trials, with next to no noise."""
    family = FAMILIES[name]
    assert_same(*released_and_expected(family.make(), family.task), 1e-4)
