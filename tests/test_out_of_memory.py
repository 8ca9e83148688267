"""Running out of memory: which size would fit is tried out and said, and nothing half-done is released."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine, TrainingStep
from adadp.errors import LotTooLargeError
from adadp.out_of_memory import advising


class Hungry(nn.Module):
    """Takes no more than `most` examples at a time."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.layer, self.most, self.error = nn.Linear(3, 2), most, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        return self.layer(x)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
          RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("most", "said"), [(20, "max_physical_batch_size=16"), (5, "=4"), (0, "not even one")])
def test_the_size_that_fits_is_found(most: int, said: str, error: Exception) -> None:
    model = Hungry(most, error)
    data = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)
    engine = PrivacyEngine(seed=0)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=64),
    )  # fmt: skip
    capture = optimizer._step.capture
    check, capture.on_first_call = capture.on_first_call, None  # which takes a few examples only
    step = TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    batch = next(iter(loader))
    with pytest.raises(LotTooLargeError, match=said):
        step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not capture.recorded
    assert not engine._open().composition()
    model.most = 64
    capture.on_first_call = check
    step(*batch)  # the lot was not lost
    assert len(engine._open().composition()) == 1


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes"), advising(8):
        raise RuntimeError("shapes cannot be multiplied")


def test_a_step_that_runs_out_of_memory_itself_says_half() -> None:
    with pytest.raises(LotTooLargeError, match="max_physical_batch_size=64"), advising(100):
        raise ERRORS[0]
