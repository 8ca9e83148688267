"""What adadp calls makes torch warn of nothing: a user sees adadp's own warnings, and those of his own calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from loop import private
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from adadp.errors import ModelNotice, UntriedWarning


@pytest.fixture(autouse=True)
def _every_warning_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ModelNotice)
        warnings.simplefilter("ignore", UntriedWarning)
        yield


class Words(nn.Module):
    """Words, a layer that returns [n, T, 8] (and a state, perhaps), and the mean of that."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.embed, self.inside, self.head = nn.Embedding(9, 8), inside, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(self.embed(x))
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))


NUMBERS, IMAGES, TOKENS = torch.randn(24, 3), torch.randn(24, 1, 6, 6), torch.arange(24 * 5).view(24, 5) % 9


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), NUMBERS),
        (convolutions, IMAGES),
        (lambda: Words(encoder()), TOKENS),
        (lambda: Words(nn.LSTM(8, 8, batch_first=True)), TOKENS),
        (lambda: Words(nn.GRU(8, 8, batch_first=True)), TOKENS),
        (Bilinear, NUMBERS),  # through torch.func, which has no rule of its own for it
        (lambda: nn.Sequential(nn.ConvTranspose2d(1, 1, 2), nn.Flatten(), nn.Linear(49, 2)), IMAGES),
    ],
)
def test_training_warns_of_nothing(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(inputs, torch.arange(24) % 2), batch_size=6)
    engine, model, optimizer, loader = private(make(), optimizer=torch.optim.AdamW, data_loader=data)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for x, y in loader:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        scheduler.step()
    engine.guarantee(1e-5)
