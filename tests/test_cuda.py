"""The same bounded sums on a GPU as on a CPU, for every clipping and kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Clipping, Diagonal, Ellipsoid, Flat, Kronecker, Local, PrivacyEngine, Probe
from adadp.clipping import Automatic, PerLayer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

COUNT, SIDE = 40, 12


def vectors(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=generator)


class Net(nn.Module):
    """A convolution, vectors of more than 64 numbers (so that factors are of low rank), and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8)
        self.wide, self.head = nn.Linear(8 * (SIDE - 2) ** 2, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.norm(self.conv(x)).tanh().flatten(1)).relu())


CLIPPINGS: dict[str, Callable[[], Clipping]] = {
    "flat": lambda: Flat(0.5),
    "automatic": lambda: Automatic(0.5),
    "per layer": lambda: PerLayer(0.5),
    "diagonal": lambda: Ellipsoid(0.5, shape=Diagonal(0.5, 0.0), source=Probe(vectors, count=64)),
    "Kronecker": lambda: Ellipsoid(0.5, shape=Kronecker(), source=Probe(vectors, count=64)),
    "local": lambda: Local(0.5),
}


def trained(device: str, make: Callable[[], Clipping]) -> dict[str, Tensor]:
    """Two steps on all examples, with noise too small to be seen."""
    torch.manual_seed(0)
    model = Net().to(device)
    inputs, labels = torch.randn(COUNT, 1, SIDE, SIDE), torch.arange(COUNT) % 10
    inputs[3] = float("nan")
    inputs[4] *= 1e4
    data = TensorDataset(inputs.to(device), labels.to(device))
    private, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=1e-7, clipping=make(),
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
    return {name: value.detach().cpu() for name, value in copy.deepcopy(private).state_dict().items()}


@pytest.mark.parametrize("name", CLIPPINGS)
def test_the_same_as_on_a_cpu(name: str) -> None:
    here, there = trained("cpu", CLIPPINGS[name]), trained("cuda", CLIPPINGS[name])
    start = Net().state_dict()
    for key, value in here.items():
        assert value.isfinite().all()
        assert (value - start[key]).abs().max() > 0
        torch.testing.assert_close(there[key], value, rtol=1e-2, atol=1e-3)
