"""Synthetic inputs: their form, their range, and that they come from the generator they are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, PrivacyEngine, Probe
from adadp.shapes.probes import Blobs, PinkNoise, Vectors, ZipfTokens

MAKERS = {
    "blobs": (Blobs((3, 9, 7)), (3, 9, 7)),
    "pink": (PinkNoise((3, 9, 7)), (3, 9, 7)),
    "tokens": (ZipfTokens(50, 12), (12,)),
    "uniform": (Vectors(5, 0.0, 1.0), (5,)),
    "normal": (Vectors(5), (5,)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_form_and_generator(name: str) -> None:
    make, shape = MAKERS[name]
    first = make(6, torch.Generator().manual_seed(1))
    assert first.shape == (6, *shape)
    assert torch.equal(first, make(6, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, make(6, torch.Generator().manual_seed(2)))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("make", [Blobs((1, 8, 8), low=-2, high=3), PinkNoise((1, 8, 8), low=-2, high=3)])
def test_images_keep_their_range(make: Callable[[int, torch.Generator], Tensor]) -> None:
    images = make(50, torch.Generator().manual_seed(0))
    assert images.min() >= -2
    assert images.max() <= 3
    assert images.std() > 0.3  # not a constant picture


def test_pink_noise_has_more_power_at_low_frequencies() -> None:
    images = PinkNoise((1, 32, 32))(64, torch.Generator().manual_seed(0))
    power = torch.fft.rfft2(images - images.mean((2, 3), keepdim=True)).abs().square().mean((0, 1))
    assert power[1:4, 1:4].mean() > 10 * power[12:16, 12:16].mean()


def test_tokens_are_in_the_vocabulary_and_frequent_ones_come_first() -> None:
    tokens = ZipfTokens(100, 20)(500, torch.Generator().manual_seed(0))
    assert tokens.min() >= 0
    assert tokens.max() < 100
    counts = torch.bincount(tokens.flatten(), minlength=100)
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[5]


def test_token_probes_shape_a_text_model() -> None:
    torch.manual_seed(0)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 6), nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(ids).mean(1))
            return out

    data = TensorDataset(torch.randint(50, (64, 12)), torch.randint(3, (64,)))
    model = Text()
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        clipping=Ellipsoid(1.0, source=Probe(ZipfTokens(50, 12), count=32)),
    )
    before = model.head.weight.detach().clone()
    for ids, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    assert not torch.equal(before, model.head.weight)
    assert engine.get_epsilon(1e-5) > 0
