"""Models of Hugging Face and PEFT: each gradient is that of its example alone, and a private step is what it says."""

from __future__ import annotations

import pytest
import torch
from families.compare import assert_same, by_capture, by_loop, trainable
from families.hugging_face import FAMILIES
from families.tasks import Batch
from torch.utils.data import DataLoader

from adadp import PrivacyEngine

every_family = pytest.mark.parametrize("name", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore")


def items(batch: Batch) -> list[Batch]:
    return [{name: value[place] for name, value in batch.items()} for place in range(len(batch["labels"]))]


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
    family, bound = FAMILIES[name], 0.1
    task, model = family.task, family.make()
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=1e-7,
        data_loader=DataLoader(items(task.batch(8)), batch_size=4), max_grad_norm=bound, sampling="fixed",
    )  # fmt: skip
    plain = family.make()
    for batch in loader:
        plain.load_state_dict(model.state_dict())
        expected = by_loop(plain, task, batch)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in expected.values()]).norm(dim=0)
        factors = (bound / norms).clamp(max=1) / 4
        optimizer.zero_grad()
        optimizer.backward(task.losses(model, batch))
        optimizer.step()
        clipped = {key: torch.tensordot(factors, value, 1)[None] for key, value in expected.items()}
        released = {key: value.grad[None] for key, value in trainable(model).items() if value.grad is not None}
        assert_same(released, clipped, 1e-4)
