"""What a collate function and a padded length tell one example about the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from soundness.field.stand import (
    Bounded,
    End,
    NoNumber,
    Refused,
    World,
    by_example,
    check_unseen,
    end,
    in_training_step,
    plain,
)

COUNT = 48
pad_sequence = nn.utils.rnn.pad_sequence


class Sequences(Dataset[Tensor]):
    """Token sequences of these lengths."""

    def __init__(self, lengths: list[int], words: int = 1) -> None:
        self.lengths, self.words = lengths, words

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(self.lengths[index]) % self.words + 1


ONE_LONG, ALL_SHORT = Sequences([6] * COUNT + [120]), Sequences([6] * COUNT)


def padded(batch: list[Tensor]) -> Tensor:
    """pad_sequence: as long as the longest of the batch."""
    return pad_sequence(batch, batch_first=True)


def padded_to_a_length(batch: list[Tensor]) -> Tensor:
    """As long as anything may be, which is known beforehand."""
    return functional.pad(pad_sequence(batch, batch_first=True), (0, 120 - max(map(len, batch))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).transpose(1, 2), tokens, ignore_index=0, reduction="none")


def over_the_padded_length(model: nn.Module, tokens: Tensor) -> Tensor:
    return token_losses(model, tokens).mean(1)


def over_the_own_length(model: nn.Module, tokens: Tensor) -> Tensor:
    return token_losses(model, tokens).sum(1) / (tokens > 0).sum(1).clamp(min=1)


def modelled(losses: Callable[..., Tensor], loop: Callable[[World], None], **given: Any) -> End:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch if isinstance(batch, Tensor) else batch[0])
        return found.mean() if loop is plain else found

    given.setdefault("bounds", (0.1, 1.0))
    return end(ONE_LONG, ALL_SHORT, LanguageModel, loss, loop, loader={"collate_fn": padded}, **given)


@pytest.mark.parametrize("loop", [plain, by_example], ids=lambda loop: loop.__name__)
def test_losses_over_the_padded_length_in_the_loop(loop: Callable[[World], None]) -> None:
    check_unseen("loss", lambda **given: modelled(over_the_padded_length, loop, **given))


def test_losses_over_the_padded_length_in_a_training_step_are_refused() -> None:
    """Collate, model and loss are tried together, on sequences of unlike lengths."""
    ended = modelled(over_the_padded_length, in_training_step)
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("loop", [plain, by_example, in_training_step], ids=lambda loop: loop.__name__)
def test_losses_over_the_own_length_are_right(loop: Callable[[World], None]) -> None:
    ended = modelled(over_the_own_length, loop)
    assert isinstance(ended, Bounded), ended


# ---- models that see the padding ----------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8, padding_idx=0), nn.Linear(8, 3)


class BagOfWords(Words):
    """A mean of embeddings over the padded length."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1))


class LastState(Words):
    """A GRU's state after the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[1][0])


class Attention(Words):
    """Attention without a mask, and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.head(self.attention(hidden, hidden, hidden)[0].mean(1))


class MaskedBagOfWords(Words):
    """A mean over the example's own words."""

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens > 0).unsqueeze(2)
        return self.head((self.embed(tokens) * real).sum(1) / real.sum(1).clamp(min=1))


class MaskedAttention(Attention):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden, padding = self.embed(tokens), tokens == 0
        seen = self.attention(hidden, hidden, hidden, key_padding_mask=padding)[0]
        return self.head(seen.masked_fill(padding.unsqueeze(2), 0.0).sum(1) / (~padding).sum(1, keepdim=True))


class StateAtTheEnd(LastState):
    """The state at each sequence's own end."""

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.recurrent(self.embed(tokens))[0]
        ends = (tokens > 0).sum(1).clamp(min=1) - 1
        return self.head(states[torch.arange(len(tokens)), ends])


def labelled(model: nn.Module, tokens: Any) -> Tensor:
    return functional.cross_entropy(model(tokens), torch.zeros(len(tokens), dtype=torch.long))


def labelled_by_example(model: nn.Module, tokens: Any) -> Tensor:
    return functional.cross_entropy(model(tokens), torch.zeros(len(tokens), dtype=torch.long), reduction="none")


@pytest.mark.parametrize("front_door", [False, True], ids=["scalar", "by example"])
@pytest.mark.parametrize("make", [BagOfWords, LastState, Attention], ids=lambda make: make.__name__)
def test_models_that_see_the_padding_are_refused(make: type[nn.Module], front_door: bool) -> None:
    loss, loop = (labelled_by_example, by_example) if front_door else (labelled, plain)
    ended = end(ONE_LONG, ALL_SHORT, make, loss, loop, bounds=(0.1,), loader={"collate_fn": padded})
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("make", [MaskedBagOfWords, StateAtTheEnd, MaskedAttention], ids=lambda make: make.__name__)
def test_models_that_mask_the_padding_are_right(make: type[nn.Module]) -> None:
    ended = end(ONE_LONG, ALL_SHORT, make, labelled, bounds=(0.1, 1.0), loader={"collate_fn": padded})
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("make", [BagOfWords, LastState, Attention], ids=lambda make: make.__name__)
def test_the_padding_may_be_seen_where_all_are_padded_alike(make: type[nn.Module]) -> None:
    """The way out: max_length."""
    ended = end(ONE_LONG, ALL_SHORT, make, labelled, bounds=(0.1,), loader={"collate_fn": padded_to_a_length})
    assert isinstance(ended, Bounded), ended


# ---- collates that mix --------------------------------------------------------------------------------------------


def line() -> nn.Module:
    return nn.Linear(8, 4)


def rows(last: float = 1.0) -> Tensor:
    inputs = torch.randn(COUNT + 1, 8, generator=torch.Generator().manual_seed(0))
    inputs[-1] *= last
    return inputs


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def collated(collate: Callable[..., Any], inputs: Tensor, bounds: tuple[float, ...] = (0.1,), **given: Any) -> End:
    targets = torch.zeros(len(inputs), dtype=torch.long)
    worlds = [TensorDataset(inputs[:count], targets[:count]) for count in (COUNT + 1, COUNT)]
    return end(*worlds, line, cross_entropy, bounds=bounds, loader={"collate_fn": collate}, **given)


def packed(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The batchify of PyTorch's word language model: cat, then view(len(batch), -1)."""
    tokens = torch.cat(batch)
    length = len(tokens) // len(batch)
    table = tokens[: length * len(batch)].view(len(batch), length)
    return table[:, :-1], table[:, 1:]


def test_a_collate_that_packs_is_refused() -> None:
    lengths = [5 + (i * 7) % 11 for i in range(COUNT)]

    def next_words(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    ended = end(
        Sequences([400, *lengths], words=7),
        Sequences(lengths, words=7),
        LanguageModel,
        next_words,
        bounds=(0.1,),
        loader={"collate_fn": packed},
    )
    assert isinstance(ended, Refused | NoNumber), ended


def mixing(batch: list[tuple[Tensor, Tensor]]) -> Any:
    """mixup in the collate function, as timm and torchvision's references do it."""
    inputs, targets = default_collate(batch)
    return inputs + 0.5 * inputs.roll(1, 0), targets


def standardising(batch: list[tuple[Tensor, Tensor]]) -> Any:
    inputs, targets = default_collate(batch)
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6), targets


@pytest.mark.parametrize("collate", [mixing, standardising], ids=lambda collate: collate.__name__)
def test_a_collate_that_mixes_is_refused(collate: Callable[..., Any]) -> None:
    ended = collated(collate, rows(100.0))
    assert isinstance(ended, Refused | NoNumber), ended


def dropping(batch: list[tuple[Tensor, Tensor]]) -> Any:
    """Corrupt examples are filtered out."""
    return default_collate([pair for pair in batch if pair[0].sum() > -5])


def giving_none(batch: list[tuple[Tensor, Tensor]]) -> None:
    """... and where none is left there is no batch."""


def test_a_collate_that_drops_examples_is_refused() -> None:
    ended = collated(dropping, rows() * 2)
    assert isinstance(ended, Refused), ended


def test_a_collate_that_gives_nothing_is_refused() -> None:
    ended = collated(giving_none, rows())
    assert isinstance(ended, Refused), ended


def named(batch: list[tuple[Tensor, Tensor]]) -> Any:
    inputs, targets = default_collate(batch)
    return {0: inputs, 1: targets}


def scaled(batch: list[tuple[Tensor, Tensor]]) -> Any:
    """A public number: nothing of the batch."""
    inputs, targets = default_collate(batch)
    return inputs / 255, targets


def augmented(batch: list[tuple[Tensor, Tensor]]) -> Any:
    """Each example is augmented by itself, at random: what differs between two calls is no mixing."""
    inputs, targets = default_collate(batch)
    return inputs * torch.bernoulli(torch.full((len(inputs), 1), 0.5)) * 2, targets


@pytest.mark.parametrize("collate", [named, scaled], ids=lambda collate: collate.__name__)
def test_collates_that_are_right(collate: Callable[..., Any]) -> None:
    ended = collated(collate, rows(100.0), bounds=(0.1, 1.0))
    assert isinstance(ended, Bounded), ended


def test_a_collate_that_draws_is_not_refused() -> None:
    from soundness.field.stand import run

    inputs = rows(100.0)
    data = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.long))
    world = run(data, line, cross_entropy, lot=12, loader={"collate_fn": augmented})
    assert world.error is None, world.error
    assert world.guarantee is not None
    assert world.guarantee.epsilon is not None
