"""Loops as people write them: right ones, and ones whose printed epsilon is false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adadp import Flat, PrivacyEngine

Train = Callable[[Any], None]


def rows(count: int = 48, features: int = 6, classes: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, features, generator=generator)
    return TensorDataset(inputs, torch.randint(classes, (count,), generator=generator))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer(
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    make: Callable[[], nn.Module] = net,
    *,
    wrap: Callable[[Any], Any] = lambda dataset: dataset,
    collate: Any = None,
    lot: int = 8,
    epochs: int = 3,
    workers: int = 0,
    lr: float = 0.1,
    bound: float | None = 1.0,
    rows_: bool = False,
    **settings: Any,
) -> Train:
    """An ordinary training function with one thing exchanged."""

    def train(dataset: Any) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        made = {key: value() if callable(value) else value for key, value in settings.items()}
        loader = DataLoader(wrap(dataset), batch_size=lot, collate_fn=collate, num_workers=workers)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=bound, **made
        )
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                if rows_:
                    optimizer.backward(loss(model, batch))
                else:
                    loss(model, batch).backward()
                optimizer.step()

    return train


# ---- texts ----------------------------------------------------------------------------------------------------------

VOCABULARY = 16


class Texts(Dataset[Tensor]):
    """Sequences of different lengths."""

    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.texts = [torch.randint(1, VOCABULARY, (3 + i % 5,), generator=generator) for i in range(count)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def pad(batch: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


def answers(count: int = 40, length: int = 12) -> TensorDataset:
    """Prompts with two tokens of an answer each."""
    tokens = torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))
    labels = torch.full_like(tokens, -100)
    labels[:, :2] = 3
    return TensorDataset(tokens, labels)


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6, padding_idx=0), nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Pooled(nn.Module):
    """A bag of words over the padded length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(1))


class Packed(nn.Module):
    """An LSTM on packed sequences, with dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(VOCABULARY, 6), nn.LSTM(6, 6, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.drop(self.lstm(packed)[1][0][0]))


def first_class(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))


def by_length(batch: list[Tensor]) -> Tensor:
    return pad(sorted(batch, key=len, reverse=True))


# ---- losses that mix examples ---------------------------------------------------------------------------------------


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def class_weights(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 1.0, 1.0, 1000.0]))


def mixup(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    other = torch.randperm(len(inputs))
    outputs = model(0.5 * inputs + 0.5 * inputs[other])
    return 0.5 * F.cross_entropy(outputs, labels) + 0.5 * F.cross_entropy(outputs, labels[other])


def standardised(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0]
    return F.cross_entropy(model((inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)), batch[1])


def infonce(model: nn.Module, batch: Any) -> Tensor:
    one, other = (F.normalize(model(batch[0] + shift), dim=1) for shift in (0.0, 0.01))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def dice(model: nn.Module, batch: Any) -> Tensor:
    chance, truth = model(batch[0]).softmax(1)[:, 3], (batch[1] == 3).float()
    return 1 - (2 * (chance * truth).sum() + 1e-3) / (chance.sum() + truth.sum() + 1e-3)


def positives(model: nn.Module, batch: Any) -> Tensor:
    """A detector's loss over the number of positives."""
    truth = F.one_hot(batch[1], 4).float()[:, 1:]
    whole = F.binary_cross_entropy_with_logits(model(batch[0])[:, 1:], truth, reduction="sum")
    return whole / max(1, int((batch[1] > 0).sum()))


def tilted(model: nn.Module, batch: Any) -> Tensor:
    return torch.logsumexp(5 * F.cross_entropy(model(batch[0]), batch[1], reduction="none"), 0) / 5


def hardest(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def batch_mean_penalty(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + 10 * outputs.mean(0).square().sum()


def whole_sum(model: nn.Module, batch: Any) -> Tensor:
    """A sum, with loss_reduction left at "mean"."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def over_padding(model: nn.Module, batch: Tensor) -> Tensor:
    """Tokens summed, padding left out, and divided by the padded length."""
    losses = F.cross_entropy(model(batch).transpose(1, 2), batch, ignore_index=0, reduction="none")
    return losses.mean(1).mean()


def over_length(model: nn.Module, batch: Tensor) -> Tensor:
    losses = F.cross_entropy(model(batch).transpose(1, 2), batch, ignore_index=0, reduction="none")
    return (losses.sum(1) / (batch > 0).sum(1).clamp(min=1)).mean()


# ---- data that depends on other data --------------------------------------------------------------------------------


class Standardised(Dataset[Any]):
    """By its own statistics."""

    def __init__(self, dataset: Any) -> None:
        inputs = torch.stack([dataset[i][0] for i in range(len(dataset))])
        self.labels = [dataset[i][1] for i in range(len(dataset))]
        self.inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


class Retry(Dataset[Any]):
    """A corrupt item is replaced by the next one that is not."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.dataset[index]
        return self[(index + 1) % len(self)] if inputs.isnan().any() else (inputs, label)


class Virtual(Dataset[Any]):
    """Every item four times in an epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 4 * len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


class Augmented(Dataset[Any]):
    """Noise and a random sign for each item, each time that it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sign = 1 if torch.rand(()) < 0.5 else -1
        inputs, label = self.dataset[index]
        return sign * inputs + 0.1 * torch.randn_like(inputs), label


def packing(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All tokens in a row, cut into as many rows as there were texts."""
    tokens = torch.cat(batch)
    length = len(tokens) // len(batch)
    table = tokens[: length * len(batch)].view(len(batch), length)
    return table[:, :-1], table[:, 1:]


def packed_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def masked(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Random masks for a masked language model, drawn for the batch."""
    tokens = pad(batch)
    hidden = torch.bernoulli(torch.full(tokens.shape, 0.4)).bool() & (tokens > 0)
    hidden[:, 0] = True
    return torch.where(hidden, torch.randint(1, VOCABULARY, tokens.shape), tokens), torch.where(hidden, tokens, -100)


def per_text(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=-100, reduction="none")
    return (losses.sum(1) / (batch[1] != -100).sum(1)).mean()


def mixing_collate(batch: list[Any]) -> Any:
    inputs, labels = torch.utils.data.default_collate(batch)
    return inputs + 0.5 * inputs.roll(1, 0), labels


# ---- state and steps past the engine --------------------------------------------------------------------------------


class Centred(nn.Module):
    """Keeps a mean of what it saw, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * outputs.mean(0))
        return outputs


class Queue(nn.Module):
    """Keeps what it saw in a plain attribute, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 4), torch.zeros(1, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def against_queue(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    loss = F.cross_entropy(outputs - model.seen.mean(0), batch[1])
    model.seen = torch.cat([model.seen, outputs.detach()])[-32:]
    return loss


def plain_head(dataset: Any) -> None:
    """The head beside a private encoder has an ordinary optimizer."""
    encoder, head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 4)
    plain = torch.optim.Adam(head.parameters(), 0.1)
    encoder, optimizer, loader = PrivacyEngine().make_private(
        module=encoder, optimizer=torch.optim.SGD(encoder.parameters(), 0.1), noise_multiplier=1.0,
        data_loader=DataLoader(dataset, batch_size=8),
    )  # fmt: skip
    for inputs, labels in loader:
        optimizer.zero_grad()
        plain.zero_grad()
        F.cross_entropy(head(encoder(inputs)), labels).backward()
        optimizer.step()
        plain.step()


def skipping(dataset: Any) -> None:
    """Batches whose loss is not finite are skipped."""
    _loop(dataset, lambda loss, optimizer: "skip" if not torch.isfinite(loss) else None)


def breaking(dataset: Any) -> None:
    """An epoch ends where a loss is not finite."""
    _loop(dataset, lambda loss, optimizer: "break" if not torch.isfinite(loss) else None)


def plateau(dataset: Any) -> None:
    """The rate follows the loss of the batch."""

    def decide(loss: Tensor, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * float(loss.detach())

    _loop(dataset, decide)


def _loop(dataset: Any, decide: Callable[[Tensor, Any], Any]) -> None:
    model = net()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
        data_loader=DataLoader(dataset, batch_size=8),
    )  # fmt: skip
    for _ in range(4):
        for batch in loader:
            loss = cross_entropy(model, batch)
            what = decide(loss, optimizer)
            if what == "skip":
                continue
            if what == "break":
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def adaptive(dataset: Any) -> None:
    """The clipping bound follows the losses of the batch."""
    clipping, model = Flat(1.0), net()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, clipping=clipping,
        data_loader=DataLoader(dataset, batch_size=8),
    )  # fmt: skip
    for _ in range(3):
        for inputs, labels in loader:
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            optimizer.zero_grad()
            optimizer.backward(losses)
            optimizer.step()
            clipping.max_grad_norm = float(losses.detach().median())
