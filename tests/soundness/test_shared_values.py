"""Parameters that no layer answers for: whose gradient is whose where shapes, paths or memory change after the trials.

Every case trains in two worlds that differ by one replaced example (`soundness.field.stand`). It may be refused, and it
may be right; a number that is not true is a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from families.compare import assert_same, released_and_expected
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from adadp.errors import PrivacyError
from soundness.field.stand import (
    Bounded,
    End,
    FalseNumber,
    Loop,
    Refused,
    World,
    by_example,
    end,
    in_training_step,
    run,
)

COUNT = LENGTH = SIZE = 16


def losses(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def replaced(one: Tensor, other: Tensor, make: Callable[[], nn.Module], loop: Loop = by_example, **options: Any) -> End:
    """How it ends where the inputs differ in one row. Lots have a fixed size, so that 2 is allowed."""
    targets = torch.zeros(len(one), dtype=torch.long)
    options = {"bounds": (1e-4,), "limit": 2.0, "sampling": "fixed", **options}
    return end(TensorDataset(one, targets), TensorDataset(other, targets), make, losses, loop, **options)


def assert_sound(ended: End) -> None:
    assert isinstance(ended, Bounded | Refused), ended


def one_loud(count: int = COUNT, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs whose first entry says how much an example counts: little, but for one that changes its sign."""
    inputs = torch.randn(count, length, SIZE, generator=torch.Generator().manual_seed(0))
    inputs[:, 0, 0] = 0.001
    others = inputs.clone()
    inputs[3, 0, 0], others[3, 0, 0] = 10.0, -10.0
    return inputs, others


def frozen(layer: nn.Linear) -> nn.Linear:
    return layer.requires_grad_(False)


# ---- rows that are not the examples' although their number is a multiple --------------------------------------------


class Chunked(nn.Module):
    """Works on so many tokens at a time, to save memory (Hugging Face's `chunk_size_feed_forward`, over all tokens)."""

    def __init__(self, size: int = 32, chunk: int = 128) -> None:
        super().__init__()
        self.inner, self.head, self.chunk = nn.Linear(size, 4, bias=False), frozen(nn.Linear(4, 3)), chunk

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.cat([self.inner(part) for part in inputs.flatten(0, 1).split(self.chunk)])
        return self.head(hidden.view(*inputs.shape[:2], -1).mean(1))


def test_tokens_in_chunks_as_long_as_the_lot() -> None:
    """The trial's few examples fit into one chunk. With 128, a chunk of 128 tokens is taken for a row of each."""
    inputs = 0.01 * torch.randn(128, 16, 32, generator=torch.Generator().manual_seed(0))
    others, large = inputs.clone(), torch.eye(16, 32) * 10
    inputs[-1], others[-1] = large, -large
    assert_sound(replaced(inputs, others, Chunked, in_training_step, bounds=(1e-3,)))


def test_more_chunks_than_in_the_trial_are_refused_with_a_way_out() -> None:
    inputs, others = one_loud(length=4)
    ended = replaced(inputs, others, lambda: Chunked(SIZE, chunk=16))
    assert isinstance(ended, Refused), ended
    assert "through_func" in str(ended.error) or "first dimension" in str(ended.error)


class Unpadded(nn.Module):
    """Works on real tokens only; frames of zeros are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(SIZE, 4, bias=False), frozen(nn.Linear(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        real = inputs.abs().sum(-1) > 0
        hidden = inputs.new_zeros(*inputs.shape[:2], 4)
        hidden[real] = self.inner(inputs[real])
        return self.head(hidden.mean(1))


def test_real_tokens_alone() -> None:
    """Lengths are multiples of the lot, as bucketed ones often are: tokens are dealt out anew where one is short."""
    count, lot = 64, 8
    lots: list[list[int]] = []

    def noting(world: World) -> None:
        for batch in world.loader:
            lots.append(batch[2].tolist())
            world.optimizer.backward(world.loss(batch))
            world.optimizer.step()

    pattern = torch.tensor([-2.0] * 8 + [15 / 8] * 8).view(1, 16, 1)
    inputs = pattern + 0.001 * torch.randn(count, 16, SIZE, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(count, dtype=torch.long)
    data = TensorDataset(inputs, targets, torch.arange(count))
    assert run(data, Unpadded, losses, noting, lot=lot, sampling="fixed").error is None
    late = next(place for place in lots[2] if place not in lots[0] + lots[1])  # in no lot with a trial
    short = inputs.clone()
    short[late, 8:] = 0.0
    assert_sound(replaced(inputs, short, Unpadded, lot=lot, bounds=(1e-3,)))


class ReZero(nn.Module):
    """A branch on [T * n, d], time first, scaled by a gate that begins at zero: until then it has no gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE) if kind == "scale" else torch.eye(SIZE))
        self.gate, self.head = nn.Parameter(torch.zeros(())), frozen(nn.Linear(SIZE, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        steps = inputs.transpose(0, 1).flatten(0, 1)
        made = steps * self.weight if self.weight.ndim == 1 else functional.linear(steps, self.weight)
        return self.head((inputs + self.gate * made.unflatten(0, (-1, len(inputs))).transpose(0, 1)).mean(1))


@pytest.mark.parametrize("kind", ["scale", "linear"])
def test_time_first_behind_a_gate_of_zero(kind: str) -> None:
    """A warm-up begins with a rate of 0 (transformers), so the gate is zero in both of the first trials."""

    def warmed_up(world: World) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda lot: 100.0 * (lot == 1))
        for _ in range(5):
            by_example(world)
            schedule.step()

    inputs = 0.001 * torch.randn(COUNT, LENGTH, SIZE, generator=torch.Generator().manual_seed(0))
    others = inputs.clone()
    inputs[3], others[3] = 5.0, -5.0
    assert_sound(replaced(inputs, others, lambda: ReZero(kind), warmed_up, lr=1.0))


# ---- places that no trial has seen, or that are others now ----------------------------------------------------------


class Positions(nn.Module):
    """Positions that come in late: with `since`, from that step on; else when they are no longer frozen.

    kind: "layer" for a table, "bare" for a slope, "shifted" for a slope before another product of the same module.
    """

    def __init__(self, kind: str, since: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, SIZE) if kind == "layer" else None
        self.slope = None if kind == "layer" else nn.Parameter(torch.ones(SIZE))
        self.scale = nn.Parameter(torch.ones(SIZE)) if kind == "shifted" else None
        self.head, self.since, self.steps = nn.Linear(SIZE, 3), since, 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, places = inputs, torch.arange(inputs.shape[1])
        if self.steps >= self.since:
            hidden = hidden + (self.table(places) if self.slope is None else self.slope * places.float().view(-1, 1))
        if self.scale is not None:
            hidden = hidden * self.scale
        return self.head((hidden * inputs[:, :1, :1]).mean(1))


KINDS = ["layer", "bare", "shifted"]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_positions_as_examples_on_a_path_taken_later(kind: str) -> None:
    def counting(world: World) -> None:
        for _ in range(5):
            by_example(world)
            world.model.steps += 1

    assert_sound(replaced(*one_loud(), lambda: Positions(kind, since=2), counting))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_positions_as_examples_no_longer_frozen(kind: str) -> None:
    name = "table" if kind == "layer" else "slope"

    def unfreezing(world: World) -> None:
        for epoch in range(5):
            if epoch == 2:
                world.model.requires_grad_(True)
            by_example(world)

    def freeze(world: World) -> None:
        getattr(world.model, name).requires_grad_(False)

    assert_sound(replaced(*one_loud(), lambda: Positions(kind), unfreezing, before=freeze))


class Waves(nn.Module):
    """Sinusoids in a buffer, with a strength that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.arange(float(LENGTH)).view(-1, 1).repeat(1, SIZE))
        self.strength, self.scale = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(SIZE))
        self.head = nn.Linear(SIZE, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.waves[: inputs.shape[1]] * self.strength
        return self.head((hidden * self.scale * inputs[:, :1, :1]).mean(1))


def test_buffers_that_were_moved() -> None:
    """To another type (or device) and back, to be saved: what was known for a buffer by its memory is no more."""

    def moving(world: World) -> None:
        for epoch in range(4):
            if epoch == 2:
                world.model.double()
                world.model.float()
            by_example(world)

    assert_sound(replaced(*one_loud(), Waves, moving))


# ---- what the module keeps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_statistics_written_past_the_version_of_a_buffer(way: str) -> None:
    """As implementations of vector quantisation do: `self.mean.data.mul_(0.9).add_(...)`."""

    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(SIZE))
            self.head = nn.Linear(SIZE, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            now = inputs.detach().mean((0, 1))
            if way == "data":
                self.mean.data.mul_(0.9).add_(now, alpha=0.1)
            else:
                self.mean.numpy()[:] = now.numpy()
            return self.head(inputs.mean(1))

    def kept(world: World) -> None:
        by_example(world)
        for value in world.model.mean.tolist():
            world.also(value)

    inputs, others = one_loud()
    others[3] = 1e3
    assert_sound(replaced(inputs, others, Statistics, kept))


# ---- gradients that are lost, or another function's -----------------------------------------------------------------


class Rows:
    """A task of `families.compare`: random inputs [n, T, d], a loss of the outputs alone."""

    def batch(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, 5, 6, generator=generator)
        return {"inputs": inputs, "labels": torch.zeros(count, dtype=torch.long)}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["inputs"]).square().flatten(1).mean(1)


class Bare(nn.Module):
    """A linear layer, then `use(self, hidden)`."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], *shape: int, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.own = nn.Linear(6, 6), nn.Parameter(torch.randn(shape))
        for name, part in parts.items():
            setattr(self, name, part)
        self._use = use

    def forward(self, inputs: Tensor) -> Tensor:
        return self._use(self, self.inner(inputs))


def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """The parameter is written into a fresh tensor that holds no data, and this is used."""

    def use(module: Any, hidden: Tensor) -> Tensor:
        bias = torch.zeros(5, 6)
        write(bias, module.own)
        return (hidden + bias).tanh()

    return use


def masked(module: Any, hidden: Tensor) -> Tensor:
    return hidden + functional.embedding((hidden.detach()[..., 0] > 0).long(), module.own, padding_idx=-1)


RIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "set rows of zeros": (written(lambda bias, own: bias.__setitem__(slice(1, 3), own)), (2, 6)),
    "copy into zeros": (written(lambda bias, own: bias[1:3].copy_(own)), (2, 6)),
    "add to zeros in place": (written(lambda bias, own: bias.add_(own)), (6,)),
    "index_put": (written(lambda bias, own: bias.index_put_((torch.tensor([1, 2]),), own)), (2, 6)),
    "scatter": (written(lambda bias, own: bias.scatter_(0, torch.tensor([[0] * 6, [3] * 6]), own)), (2, 6)),
    "vector @ examples": (lambda m, h: (m.own @ h.transpose(1, 2)).tanh().mean(1, keepdim=True), (6,)),
    "examples @ vector": (lambda m, h: (h * (h @ m.own).softmax(1).unsqueeze(-1)).sum(1), (6,)),
    "masked_fill": (lambda m, h: h.masked_fill(h > 0, m.own.sum()), (1,)),
    "examples as the parameter's type": (lambda m, h: (h.type_as(m.own) * m.own).tanh(), (6,)),
    "ids from the end": (lambda m, h: h + m.own[(h.detach()[..., 0] > 0).long() - 1], (4, 6)),
    "padding counted from the end": (masked, (2, 6)),
    # Through torch.func, which runs each example alone.
    "the first example's values": (lambda m, h: h + (m.own * h[0] - (m.own * h[0]).detach()), (6,)),
    "examples last": (lambda m, h: (m.own * h.mean((1, 2))).T, (3, 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_those_of_a_loop(name: str) -> None:
    use, shape = RIGHT[name]
    assert_same(*released_and_expected(Bare(use, *shape), Rows()), 1e-4)


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vmap": lambda m, h: torch.vmap(lambda one: (one * m.own).tanh())(h),
    "checkpoint of a function": lambda m, h: checkpoint(lambda one: (one * m.own).tanh(), h, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_hides_an_operation_from_the_engine_is_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="cannot be tried out"):
        released_and_expected(Bare(REFUSED[name], 6), Rows())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_that_is_called_with_other_weights(trained: bool) -> None:
    """`functional_call` puts weights into the layer's places; they must be used, and trained, or refused."""

    def use(module: Any, hidden: Tensor) -> Tensor:
        return functional_call(module.base, {"weight": module.base.weight + module.own}, (hidden,))

    with suppress(PrivacyError):
        assert_same(*released_and_expected(Bare(use, 3, 6, base=nn.Linear(6, 3).requires_grad_(trained)), Rows()))


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_that_goes_on_to_the_examples_is_not_cut_off() -> None:
    """What is zero in all trials may lead back to them: straight-through estimators, as in quantisation."""

    def use(module: Any, hidden: Tensor) -> Tensor:
        largest = hidden.amax((0, 1))
        return hidden + module.own * (largest - largest.detach())

    with suppress(PrivacyError):
        assert_same(*released_and_expected(Bare(use, 6), Rows()))


# ---- refused, or right ----------------------------------------------------------------------------------------------


HELD: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "all examples' maximum": (lambda m, h: h + m.own * h.amax((0, 1)), (6,)),
    "a number of the batch": (lambda m, h: h + (m.own - m.own.detach()) * float(h.max()), (6,)),
    "sorted examples": (lambda m, h: (h[h[:, 0, 0].argsort()] * m.own)[h[:, 0, 0].argsort().argsort()], (6,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD)
def test_what_depends_on_the_whole_lot_is_refused(name: str) -> None:
    use, shape = HELD[name]
    with pytest.raises(PrivacyError, match=r"mixes examples|without a row for each|order of the batch"):
        released_and_expected(Bare(use, *shape), Rows())


def test_two_halves_of_a_lot_are_refused() -> None:
    def halves(model: nn.Module, batch: Any) -> Tensor:
        outputs = torch.cat([model(part) for part in batch[0].chunk(2)])
        return functional.cross_entropy(outputs, batch[1], reduction="none")

    inputs, others = one_loud()
    targets = torch.zeros(COUNT, dtype=torch.long)
    one, other = TensorDataset(inputs, targets), TensorDataset(others, targets)
    assert isinstance(end(one, other, Waves, halves, by_example, limit=2.0, sampling="fixed"), Refused)


class Mixture(nn.Module):
    """A class token, positions, products, a table and a norm of bare parameters, one of them used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, SIZE)), nn.Parameter(torch.randn(SIZE))
        self.weight, self.rows = nn.Parameter(torch.randn(SIZE, SIZE)), nn.Parameter(torch.randn(4, SIZE))
        self.places, self.inner, self.head = nn.Embedding(LENGTH, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.places(torch.arange(inputs.shape[1]))
        hidden = torch.cat([self.token.expand(len(inputs), -1, -1), hidden], 1)
        hidden = functional.linear(self.inner(hidden) * self.scale, self.weight)
        hidden = hidden + self.rows[torch.zeros(hidden.shape[:2], dtype=torch.long)]
        return self.head(functional.layer_norm(hidden, (SIZE,), self.scale, self.scale).tanh().mean(1))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "ellipsoid"])
def test_as_many_positions_as_examples_from_the_first_lot_on(clipping: str) -> None:
    inputs, others = one_loud()
    others[3] = 50.0
    ended = replaced(inputs, others, Mixture, clipping=clipping, max_grad_norm=0.01, bounds=(0.01,))
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("options", [{"lot": 1}, {"lot": 3}, {"lot": 10, "max_physical_batch_size": 3}])
def test_lots_of_one_example_and_of_more(options: dict[str, Any]) -> None:
    def often(world: World) -> None:
        for _ in range(3):
            by_example(world)

    inputs, _ = one_loud(24)
    data = TensorDataset(inputs, torch.arange(24) % 3)
    world = run(data, Mixture, losses, often, **options)
    assert world.error is None
    assert world.guarantee is not None
    assert world.guarantee.epsilon is not None


def test_a_scale_that_the_loop_uses_is_seen_where_there_is_a_loss_for_each_example() -> None:
    """As many classes as examples, and embeddings of classes that the loop holds: rows that are none of theirs."""
    classes = torch.randn(COUNT, SIZE, generator=torch.Generator().manual_seed(1))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(SIZE, SIZE), nn.Parameter(torch.ones(SIZE))

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(inputs.mean(1)), self.scale * 1

    def similar(model: nn.Module, batch: Any) -> Tensor:
        hidden, scale = model(batch[0])
        return functional.cross_entropy(hidden @ (scale * classes).T, batch[1], reduction="none")

    inputs, others = one_loud()
    targets = torch.arange(COUNT)
    one, other = TensorDataset(inputs, targets), TensorDataset(others, targets)
    for loop in (by_example, in_training_step):
        ended = end(one, other, Encoder, similar, loop, bounds=(1e-4,), limit=2.0, sampling="fixed")
        assert not isinstance(ended, FalseNumber), ended
