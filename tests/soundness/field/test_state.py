"""State that outlives a lot: what one lot leaves behind reaches the next past its bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from soundness.field.stand import Bounded, End, NoNumber, Refused, World, check_unseen, compare, plain, run

LOT, BOUND = 8, 0.02
WORDS = torch.randint(20, (40, 6), generator=torch.Generator().manual_seed(1))


class WordModel(nn.Module):
    """PyTorch's word language model: the hidden state goes in and comes out."""

    def __init__(self, batch_first_state: bool) -> None:
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 20)
        self.batch_first_state = batch_first_state

    def forward(self, words: Tensor, state: Any) -> Any:
        if self.batch_first_state:
            state = tuple(value.unsqueeze(0).contiguous() for value in state)
        outputs, state = self.recurrent(self.embed(words), state)
        if self.batch_first_state:
            state = tuple(value[0] for value in state)
        return self.head(outputs), state


def next_words(outputs: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[:, :-1].transpose(1, 2), words[:, 1:])


def handed_on(somebody_else: bool, batch_first_state: bool, carried: bool = True, **settings: Any) -> World:
    """In one of the worlds the first lot's first example is somebody else; all other lots are the same."""

    def loop(world: World) -> None:
        size = world.loader.max_physical_batch_size if settings.get("pad_lots") else LOT
        shape = (size, 8) if batch_first_state else (1, size, 8)
        state = (torch.zeros(shape), torch.zeros(shape))
        for number, (words,) in enumerate(world.loader):
            if number == 0 and somebody_else:
                words = words.clone()
                words[0] = 7
            if not carried:
                shape = (len(words), 8) if batch_first_state else (1, len(words), 8)
                state = (torch.zeros(shape), torch.zeros(shape))
            world.optimizer.zero_grad()
            outputs, state = world.model(words, state)
            state = tuple(value.detach() for value in state)
            next_words(outputs, words).backward()
            world.optimizer.step()

    return run(TensorDataset(WORDS), lambda: WordModel(batch_first_state), loop=loop, lot=LOT, bound=BOUND, **settings)


def ending(*arguments: Any, **settings: Any) -> End:
    """One example of the first lot is replaced: it may do that lot's release 2, and nothing to any other."""
    worlds = [handed_on(somebody_else, *arguments, **settings) for somebody_else in (True, False)]
    return compare(*worlds, limit=lambda lot: 2.0 if lot == 0 else 0.0)


LOTS: dict[str, dict[str, Any]] = {"fixed size": {"sampling": "fixed"}, "padded": {"pad_lots": True}, "Poisson": {}}


@pytest.mark.parametrize("settings", LOTS.values(), ids=LOTS)
@pytest.mark.parametrize("batch_first_state", [False, True], ids=["[1, n, h]", "[n, h]"])
def test_a_hidden_state_that_is_handed_on_is_refused(batch_first_state: bool, settings: dict[str, Any]) -> None:
    ended = ending(batch_first_state, **settings)
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("settings", LOTS.values(), ids=LOTS)
def test_a_hidden_state_that_begins_anew_is_right(settings: dict[str, Any]) -> None:
    ended = ending(True, carried=False, **settings)
    assert isinstance(ended, Bounded), ended


# ---- states inside a model ----------------------------------------------------------------------------------------


class Centred(nn.Module):
    """A running centre in a plain attribute: centre loss, DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.centre = nn.Linear(8, 3), torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.head(inputs)
        found = outputs - self.centre
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return found


class Queue(nn.Module):
    """What it saw stays in a queue, which nothing in the model reads: MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.queue = nn.Linear(8, 3), torch.zeros(0, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.head(inputs)
        self.queue = torch.cat([self.queue, outputs.detach()])[-64:]
        return outputs


class Counted(nn.Module):
    """Statistics in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return self.head(inputs)


def rows() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 8, generator=generator), torch.randint(3, (40,), generator=generator)
    others = inputs.clone()
    inputs[0] *= 100
    others[0] = 0.0
    return TensorDataset(inputs, targets), TensorDataset(others, targets)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("make", [Centred, Counted], ids=lambda make: make.__name__)
def test_statistics_that_a_model_keeps_are_refused(make: type[nn.Module]) -> None:
    ended = compare(*(run(data, make, cross_entropy, lot=LOT) for data in rows()), limit=2.0)
    assert isinstance(ended, Refused), ended


def test_a_queue_that_nothing_reads() -> None:
    """Accepted: no release depends on it. That the queue itself is not private is for whoever saves it."""
    ended = compare(*(run(data, Queue, cross_entropy, lot=LOT) for data in rows()), limit=2.0)
    assert isinstance(ended, Bounded | Refused | NoNumber), ended


def test_a_queue_that_the_loss_reads() -> None:
    """... and where the loop's loss compares with it, that is a scalar that nobody sees."""

    def against_the_queue(model: Any, batch: Any) -> Tensor:
        before = model.queue.clone()
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + (
            10 * (outputs @ before.mean(0)).mean() if len(before) else 0.0
        )

    def whole_lots(**given: Any) -> End:
        worlds = [run(data, Queue, against_the_queue, two_epochs, bound=0.05, **given) for data in rows()]
        return compare(*worlds, limit=2.0)

    check_unseen("loss", whole_lots)


def two_epochs(world: World) -> None:
    for _ in range(2):
        plain(world)
