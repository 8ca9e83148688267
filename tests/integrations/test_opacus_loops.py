"""Loops as they are written for Opacus, on tiny made data: the import is the only thing of ours in them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adadp.errors import UnsupportedModuleError
from adadp.integrations.opacus import (
    DPGRU,
    DPLSTM,
    DPRNN,
    BatchMemoryManager,
    ModuleValidator,
    OpacusNotice,
    PrivacyEngine,
)

DELTA = 1e-3
WORDS, LENGTH = 30, 9


def pictures(count: int = 60, channels: int = 1, side: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    images = torch.randn(count, channels, side, side, generator=generator) / 2
    images[torch.arange(count), :, labels] += 2
    return TensorDataset(images, labels)


class Names(Dataset[tuple[Tensor, Tensor]]):
    """Texts of different lengths, and the language of each."""

    def __init__(self, count: int = 60) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator).tolist()
        self.items = [
            (torch.randint(1, 15, (length,), generator=generator) + 14 * (index % 2), torch.tensor(index % 2))
            for index, length in enumerate(lengths)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.items[index]


def to_the_longest(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([text for text, _ in batch], batch_first=True), torch.stack([label for _, label in batch])


def to_one_length(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    texts, labels = to_the_longest(batch)
    return F.pad(texts, (0, LENGTH - texts.shape[1])), labels


def evaluated(model: nn.Module, loader: Any) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)


# ---- digits: several runs, each made from what the last one returned ------------------------------------------------


def test_digits_in_several_runs() -> None:
    train_loader: Any = DataLoader(pictures(), batch_size=20, num_workers=0)
    test_loader = DataLoader(pictures(30), batch_size=30)
    results, epsilons = [], []
    for _ in range(2):
        model: Any = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(16, 3))
        optimizer: Any = optim.SGD(model.parameters(), lr=0.5, momentum=0)
        privacy_engine = PrivacyEngine(secure_mode=False)
        model, optimizer, train_loader = privacy_engine.make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        for _epoch in range(2):
            model.train()
            criterion = nn.CrossEntropyLoss()
            losses = []
            for data, target in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            epsilons.append(privacy_engine.accountant.get_epsilon(delta=DELTA))
        results.append(evaluated(model, test_loader))
        assert [(rate, steps) for _, rate, steps in privacy_engine.accountant.history] == [(1 / 3, 6)]
    assert epsilons[0] == epsilons[2] < epsilons[1] == epsilons[3]
    assert len(results) == 2


# ---- names: recurrent layers ----------------------------------------------------------------------------------------


class CharacterNet(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.rnn = kind(6, 5, num_layers=1, bidirectional=False, batch_first=True)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        x, _ = self.rnn(self.embedding(x), hidden)
        logits: Tensor = self.out(x[:, -1, :])
        return logits


def names_epoch(kind: type[nn.RNNBase], collate: Any) -> float:
    model: Any = CharacterNet(kind)
    train_loader: Any = DataLoader(Names(), batch_size=20, num_workers=0, pin_memory=False, collate_fn=collate)
    optimizer: Any = optim.SGD(model.parameters(), lr=2.0)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.5
    )
    criterion, accuracies = nn.CrossEntropyLoss(), []
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # after the step, as some loops have it
        accuracies.append(float(logits.argmax(-1).eq(y).sum()) / len(y))
    assert 0 <= statistics.mean(accuracies) <= 1
    return privacy_engine.accountant.get_epsilon(delta=DELTA)


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_names_padded_to_one_length(kind: type[nn.RNNBase]) -> None:
    assert 0 < names_epoch(kind, to_one_length) < 10


def test_names_padded_to_the_longest_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"padding reaches the result.*one fixed length"):
        names_epoch(DPLSTM, to_the_longest)


# ---- pictures in colour: a bound for each parameter, modes, a rate that falls ---------------------------------------


@pytest.mark.parametrize(("mode", "per_layer"), [("hooks", False), ("functorch", True), ("ew", True)])
def test_pictures_with_bounds_of_layers(mode: str, per_layer: bool) -> None:
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), nn.Linear(6, 3),
    )  # fmt: skip
    optimizer: Any = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = len([p for _, p in model.named_parameters() if p.requires_grad])
    bounds: Any = [1.2 / np.sqrt(count)] * count if per_layer else 1.2
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(pictures(channels=3), batch_size=20),
        noise_multiplier=1.5,
        max_grad_norm=bounds,
        clipping="per_layer" if per_layer else "flat",
        grad_sample_mode=mode,
    )
    for epoch in range(1, 3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / 3))
        model.train()
        for images, target in train_loader:
            output = model(images)
            loss = nn.CrossEntropyLoss()(output, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert set(state["state_dict"]) == {name for name, _ in model.named_parameters()}
    assert privacy_engine.accountant.get_epsilon(delta=DELTA) < 5


# ---- reviews: lots of one size --------------------------------------------------------------------------------------


class ReviewNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pool = nn.Embedding(WORDS, 6), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze(-1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


def test_reviews_without_poisson_sampling() -> None:
    model: Any = ReviewNet()
    optimizer: Any = optim.Adam(model.parameters(), lr=0.02)
    privacy_engine = PrivacyEngine()
    loader = DataLoader(Names(), batch_size=20, collate_fn=to_one_length, shuffle=True)
    with pytest.warns(OpacusNotice, match="lots of one size"):
        model, optimizer, train_loader = privacy_engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False,
        )  # fmt: skip
    for data, label in train_loader:
        assert len(data) == 20
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(data), label)
        loss.backward()
        optimizer.step()
    guarantee = privacy_engine.guarantee(DELTA)
    assert (str(guarantee.neighbours), guarantee.accountant) == ("replace-one", "rdp")
    assert privacy_engine.accountant.get_epsilon(delta=DELTA) == guarantee.epsilon


# ---- two networks: one of them sees the data ------------------------------------------------------------------------


def test_a_generator_learns_from_a_private_discriminator() -> None:
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, bias=False), nn.GroupNorm(2, 6), nn.ReLU(True),
        nn.ConvTranspose2d(6, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator: Any = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 6, 4, bias=False),
        nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    optimizer_d: Any = optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    privacy_engine = PrivacyEngine()
    discriminator, optimizer_d, loader = privacy_engine.make_private(
        module=discriminator, optimizer=optimizer_d, data_loader=DataLoader(pictures(), batch_size=20),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    optimizer_g = optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    before = [p.detach().clone() for p in generator.parameters()]
    for real, _ in loader:
        optimizer_d.zero_grad(set_to_none=True)
        fake = generator(torch.randn(len(real), 4, 1, 1))
        error_real = criterion(discriminator(real), torch.ones(len(real)))
        error_fake = criterion(discriminator(fake.detach()), torch.zeros(len(real)))
        (error_real + error_fake).backward()
        optimizer_d.step()
        optimizer_d.zero_grad(set_to_none=True)
        optimizer_g.zero_grad()
        # As many fakes as planned, not as many as were drawn: how many rows a lot has is private.
        fake = generator(torch.randn(20, 4, 1, 1))
        criterion(discriminator(fake), torch.ones(20)).backward()
        optimizer_g.step()
    assert all(bool((p != old).any()) for p, old in zip(generator.parameters(), before, strict=True))
    assert privacy_engine.accountant.steps == 3
    assert privacy_engine.accountant.get_epsilon(delta=DELTA) < 10


# ---- the tutorials --------------------------------------------------------------------------------------------------


def test_an_image_tutorial() -> None:
    model: Any = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    assert ModuleValidator.validate(model, strict=False)
    model = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(model, strict=False)
    optimizer: Any = optim.RMSprop(model.parameters(), lr=1e-3)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(pictures(), batch_size=20), epochs=2,
        target_epsilon=5.0, target_delta=DELTA, max_grad_norm=1.2,
    )  # fmt: skip
    assert optimizer.noise_multiplier > 0
    for _ in range(2):
        model.train()
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer
        ) as memory_safe_data_loader:
            for images, target in memory_safe_data_loader:
                optimizer.zero_grad()
                loss = nn.CrossEntropyLoss()(model(images), target)
                loss.backward()
                optimizer.step()
    assert 4.9 < privacy_engine.get_epsilon(DELTA) <= 5.0


class TextClassifier(nn.Module):
    """A body that is not trained, its last block and a head that are; it computes its loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> tuple[Any, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=attention_mask == 0)
        logits = self.head(x[:, 0])
        return None if labels is None else F.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("ghost", [False, True])
def test_a_text_tutorial(ghost: bool) -> None:
    texts, labels = to_one_length(Names().items)
    model: Any = TextClassifier().train()
    for p in model.parameters():
        p.requires_grad = False
    for layer in (model.blocks[-1], model.head):
        for p in layer.parameters():
            p.requires_grad = True
    optimizer: Any = optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
    loader: Any = DataLoader(TensorDataset(texts, (texts > 0).long(), labels), batch_size=12)
    settings: dict[str, Any] = {"criterion": nn.CrossEntropyLoss(), "grad_sample_mode": "ghost"} if ghost else {}
    privacy_engine = PrivacyEngine()
    made = privacy_engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_delta=1 / len(loader) ** 3, target_epsilon=7.5,
        epochs=1, max_grad_norm=0.1, **settings,
    )  # fmt: skip
    model, optimizer, loader = made[0], made[1], made[-1]
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as batches:
        for ids, mask, target in batches:
            optimizer.zero_grad()
            outputs = model(input_ids=ids, attention_mask=mask, labels=target)
            loss = made[2](outputs[1], target) if ghost else outputs[0]
            loss.backward()
            assert math.isfinite(loss.item())
            optimizer.step()
    assert privacy_engine.get_epsilon(1 / 5**3) <= 7.5
