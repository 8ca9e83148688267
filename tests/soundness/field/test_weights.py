"""Gradients that reach weights past the engine, and weights that came after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError, PrivacyError, TrainingLoopError
from soundness.field.stand import (
    Bounded,
    End,
    NoNumber,
    Refused,
    World,
    by_example,
    check_unseen,
    compare,
    effects,
    end,
    plain,
    run,
)

# ---- weights that meet data outside of a module's call ------------------------------------------------------------


class Prototypes(nn.Module):
    """A parameter of its own beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.prototypes = nn.Parameter(torch.randn(3, 16) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encoder(inputs) @ self.prototypes.T

    def training_step(self, batch: Any) -> Tensor:
        """Lightning's: only the encoder is called."""
        return functional.cross_entropy(self.encoder(batch[0]) @ self.prototypes.T, batch[1])


class Cosine(nn.Module):
    """A cosine classifier or ArcFace: the last layer's weights are read, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs))

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(functional.linear(self.encoder(batch[0]), self.head.weight), batch[1])


class TiedLogits(nn.Module):
    """Logits from the embedding table, outside of any call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(40, 8), nn.Linear(8, 8)

    def training_step(self, batch: Any) -> Tensor:
        hidden = self.body(self.embed(batch[0]))
        return functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), batch[1].flatten())


class Recommender(nn.Module):
    """LightGCN and its like: an L2 penalty on the rows of the tables that the batch used."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.head = nn.Embedding(30, 8), nn.Embedding(30, 8), nn.Linear(16, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)

    def training_step(self, batch: Any) -> Tensor:
        users, items, wanted = batch
        used = self.users.weight[users].square().sum() + self.items.weight[items].square().sum()
        return functional.binary_cross_entropy_with_logits(self(users, items), wanted) + used / len(users)


def of_features(last: float = 1.0) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(20, 8, generator=generator), torch.randint(3, (20,), generator=generator)
    inputs[-1] *= last
    return TensorDataset(inputs, wanted), TensorDataset(inputs[:-1], wanted[:-1])


def of_words() -> tuple[TensorDataset, TensorDataset]:
    words = torch.randint(40, (20, 12), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, words.roll(-1, 1)), TensorDataset(words[:-1], words[:-1].roll(-1, 1))


def of_purchases() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    users, items = torch.randint(10, (20,), generator=generator), torch.randint(10, (20,), generator=generator)
    users[-1] = items[-1] = 29
    wanted = torch.rand(20, generator=generator).round()
    return TensorDataset(users, items, wanted), TensorDataset(users[:-1], items[:-1], wanted[:-1])


METHODS: dict[str, tuple[type[nn.Module], Callable[[], tuple[TensorDataset, TensorDataset]]]] = {
    "a parameter of the model": (Prototypes, of_features),
    "the weight of a layer": (Cosine, of_features),
    "tied logits": (TiedLogits, of_words),
    "rows of a table": (Recommender, of_purchases),
}


def training_step(model: Any, batch: Any) -> Tensor:
    return model.training_step(batch)


@pytest.mark.parametrize("case", METHODS)
def test_methods_that_read_weights_are_refused(case: str) -> None:
    make, data = METHODS[case]
    ended = end(*data(), make, training_step, bounds=(1.0, 0.01))
    assert isinstance(ended, Refused), ended


def test_forward_by_name_is_refused() -> None:
    """model.forward(x) goes past the hooks."""
    ended = end(
        *of_features(1e4), Prototypes, lambda model, batch: functional.cross_entropy(model.forward(batch[0]), batch[1])
    )
    assert isinstance(ended, Refused), ended


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("make", [Prototypes, Cosine], ids=lambda make: make.__name__)
def test_the_same_models_called_are_right(make: type[nn.Module]) -> None:
    ended = end(*of_features(1e4), make, cross_entropy, bounds=(1.0, 0.01))
    assert isinstance(ended, Bounded), ended


def test_a_gradient_that_the_loop_sets_is_refused() -> None:
    """parameter.grad = ..., computed elsewhere."""

    def loop(world: World) -> None:
        for inputs, wanted in world.loader:
            world.optimizer.zero_grad()
            functional.cross_entropy(world.model(inputs), wanted).backward()
            head = world.model.head.weight
            elsewhere = functional.cross_entropy(functional.linear(inputs.repeat(1, 2), head), wanted)
            head.grad = torch.autograd.grad(elsewhere, head)[0]
            world.optimizer.step()

    ended = end(*of_features(100.0), Cosine, None, loop, bounds=(0.1,))
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


# ---- penalties on the weights -------------------------------------------------------------------------------------


def line() -> nn.Module:
    return nn.Linear(4, 1, bias=False)


def pieces(count: int) -> TensorDataset:
    inputs = torch.zeros(count, 4)
    inputs[:, 1] = 1.0
    return TensorDataset(inputs)


def penalised(model: Any, batch: Any) -> Tensor:
    """Weight decay written into the loss."""
    return model(batch[0]).mean() + 100.0 * model.weight.square().sum()


def without_zero_grad(world: World) -> None:
    for batch in world.loader:
        world.loss(batch).backward()
        world.optimizer.step()


def zero_grad_after_each_lot(world: World) -> None:
    for batch in world.loader:
        world.loss(batch).backward()
        world.optimizer.step()
        if world.loader.current.last:
            world.optimizer.zero_grad()


def in_pieces_of_eight(loop: Callable[[World], None], loss: Any = penalised, **settings: Any) -> End:
    """The ninth example is a piece of its own, and the penalty would count once more."""
    return compare(*(run(pieces(count), line, loss, loop, max_physical_batch_size=8, **settings) for count in (9, 8)))


@pytest.mark.parametrize("loop", [without_zero_grad, zero_grad_after_each_lot], ids=lambda loop: loop.__name__)
def test_a_penalty_that_counts_once_a_piece_is_refused(loop: Callable[[World], None]) -> None:
    ended = in_pieces_of_eight(loop)
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


def test_a_penalty_in_the_loss_is_right_or_refused() -> None:
    """Control: zero_grad before each batch leaves the last piece's penalty only."""

    def scaled(world: World) -> None:
        # What stands in .grad beside the release is the penalty's own gradient, times the lot as they differ in size.
        plain(world)
        world.releases = [
            release - 200.0 * world.model.weight.detach().double().flatten() * world.lot for release in world.releases
        ]

    ended = in_pieces_of_eight(scaled)
    assert isinstance(ended, Bounded | Refused), ended


@pytest.mark.parametrize("loop", [plain, without_zero_grad, by_example], ids=lambda loop: loop.__name__)
def test_a_declared_penalty_is_added_once_a_lot(loop: Callable[[World], None]) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0]).squeeze(1)
        return outputs if loop is by_example else outputs.mean()

    def penalty(module: Any) -> Tensor:
        return 100.0 * module.weight.square().sum()

    for count in (9, 8):
        with_it = run(pieces(count), line, loss, loop, max_physical_batch_size=8, penalty=penalty)
        without = run(pieces(count), line, loss, loop, max_physical_batch_size=8)
        assert with_it.error is None, with_it.error
        assert len(with_it.releases) == len(without.releases) == 1
        expected = 200.0 * with_it.model.weight.detach().double().flatten() * count
        torch.testing.assert_close(with_it.releases[0] - without.releases[0], expected, rtol=1e-3, atol=1e-3)


def replaced(model: Any, loss: Any, **given: Any) -> End:
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(33, 8, generator=generator), torch.randint(2, (33,), generator=generator)
    inputs[-1] *= 30
    others = inputs.clone()
    others[-1] = 0.0
    return end(TensorDataset(inputs, wanted), TensorDataset(others, wanted), model, loss, limit=2.0, **given)


def test_a_penalty_that_holds_data_is_refused() -> None:
    """Its weight follows the loss."""

    def adaptive(model: Any, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return loss + 10 * loss.detach() * model.weight.square().sum()

    ended = replaced(lambda: nn.Linear(8, 2), adaptive, bounds=(1.0, 0.05))
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


# ---- a part that is not private -----------------------------------------------------------------------------------


def beside_a_plain_head(front_door: bool, learns: bool = True, **given: Any) -> End:
    """Only the encoder is made private; the head has an optimizer of its own."""
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(33, 8, generator=generator), torch.randint(2, (33,), generator=generator)
    inputs[-1] *= 30

    def loop(world: World) -> None:
        head = nn.Linear(8, 2).requires_grad_(learns)
        other = torch.optim.Adam(head.parameters(), 0.1) if learns else None
        for _ in range(6):
            for features, labels in world.loader:
                world.optimizer.zero_grad()
                losses = functional.cross_entropy(head(world.model(features)), labels, reduction="none")
                if front_door:
                    world.optimizer.backward(losses)
                else:
                    losses.mean().backward()
                world.optimizer.step()
                if other is not None:
                    other.step()
                    other.zero_grad()

    def encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    worlds = [TensorDataset(inputs[:count], wanted[:count]) for count in (33, 32)]
    return end(*worlds, encoder, None, loop, bounds=(0.05,), **given)


def test_a_head_that_learns_beside_a_private_encoder() -> None:
    """Whatever the loop computes from the encoder's outputs is its loss: a scalar, so nobody sees the head."""
    check_unseen("loss", lambda **given: beside_a_plain_head(False, **given))


def test_a_head_that_learns_beside_a_private_encoder_is_seen_by_the_front_door() -> None:
    ended = beside_a_plain_head(True)
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("front_door", [False, True], ids=["scalar", "by example"])
def test_a_frozen_head_is_right(front_door: bool) -> None:
    ended = beside_a_plain_head(front_door, learns=False)
    assert isinstance(ended, Bounded), ended


# ---- weights that came later --------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.a.weight.dtype)
        return self.head(torch.tanh(self.b(torch.tanh(self.a(inputs)))))


class LowRank(nn.Module):
    """LoRA around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def assigned(world: World) -> None:
    """A checkpoint is loaded after make_private, in the way that saves memory."""
    state = {name: torch.full_like(value, 0.5) for name, value in world.model.state_dict().items()}
    world.model.load_state_dict(state, assign=True)


def new_head(world: World) -> None:
    world.model.head = nn.Linear(8, 3)


def all_parameters(world: World) -> None:
    world.optimizer.param_groups[0]["params"] = list(world.model.parameters())


def new_head_in_the_groups(world: World) -> None:
    new_head(world)
    all_parameters(world)


def new_head_in_the_inner_optimizer(world: World) -> None:
    new_head(world)
    world.optimizer.original_optimizer.add_param_group({"params": list(world.model.head.parameters())})


def new_head_added(world: World) -> None:
    new_head(world)
    world.optimizer.add_param_group({"params": list(world.model.head.parameters())})


def tied(world: World) -> None:
    world.model.b.weight = world.model.a.weight


def weight_norm(world: World) -> None:
    nn.utils.parametrizations.weight_norm(world.model.head)


def weight_norm_in_the_groups(world: World) -> None:
    weight_norm(world)
    all_parameters(world)


def old_weight_norm_in_the_groups(world: World) -> None:
    nn.utils.weight_norm(world.model.head)
    all_parameters(world)


def lora_in_the_groups(world: World) -> None:
    world.model.head = LowRank(world.model.head)
    all_parameters(world)


def tampered(before: Callable[[World], None], **options: Any) -> End:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    wanted = torch.randint(3, (16,), generator=torch.Generator().manual_seed(4))
    inputs[-1] *= 100
    worlds = [TensorDataset(inputs[:count], wanted[:count]) for count in (16, 15)]
    return end(*worlds, Net, cross_entropy, bounds=(0.1,), lr=1.0, before=before, **options)


LATER = (
    assigned,
    new_head,
    new_head_in_the_groups,
    new_head_in_the_inner_optimizer,
    new_head_added,
    tied,
    weight_norm,
    weight_norm_in_the_groups,
    old_weight_norm_in_the_groups,
    lora_in_the_groups,
)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("before", LATER, ids=lambda before: before.__name__)
def test_weights_that_came_later_are_refused(before: Callable[[World], None]) -> None:
    ended = tampered(before)
    assert isinstance(ended, Refused), ended


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("before", LATER, ids=lambda before: before.__name__)
def test_the_refusal_says_that_the_module_was_changed(before: Callable[[World], None]) -> None:
    """And not that it could not be tried, with a way out that is none."""
    ended = tampered(before)
    assert isinstance(ended, Refused)
    assert re.search(r"was made private|after make_private|optimizer that make_private", str(ended.error)), ended.error


def untouched(world: World) -> None:
    pass


def loaded(world: World) -> None:
    """A checkpoint is loaded after make_private, as ever: the tensors stay."""
    world.model.load_state_dict({name: value * 0.5 for name, value in world.model.state_dict().items()})


def in_double(world: World) -> None:
    world.model.double()


def frozen(world: World) -> None:
    world.model.a.requires_grad_(False)


@pytest.mark.parametrize("before", [untouched, loaded, in_double, frozen], ids=lambda before: before.__name__)
def test_what_keeps_the_weights_is_right(before: Callable[[World], None]) -> None:
    ended = tampered(before)
    assert isinstance(ended, Bounded), ended


def test_bfloat16_afterwards_is_right_or_refused() -> None:
    """What bfloat16 weights cut off of a release is cut off after the noise."""
    ended = tampered(lambda world: world.model.bfloat16(), rounding=2.0**-7)
    assert isinstance(ended, Bounded | Refused), ended


def test_a_plain_optimizer_beside_the_private_one_moves_nothing() -> None:
    """optimizer = SGD(model.parameters()) in a cell that was run again. The ordinary gradients are not computed."""

    def loop(world: World) -> None:
        again = torch.optim.SGD(world.model.parameters(), lr=1.0)
        world.watch(again)
        for batch in world.loader:
            again.zero_grad()
            world.loss(batch).backward()
            again.step()

    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    wanted = torch.zeros(16, dtype=torch.long)
    worlds = [run(TensorDataset(inputs[:count], wanted[:count]), Net, cross_entropy, loop) for count in (16, 15)]
    if not any(isinstance(world.error, PrivacyError) for world in worlds):
        assert effects(*worlds) == [0.0]


# ---- parts that two private models share --------------------------------------------------------------------------


class Task(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(inputs)))


def two_tasks(shared: bool, sampling: str, inputs: Tensor) -> list[tuple[Any, ...]]:
    encoder = nn.Linear(8, 8)
    nets = Task(encoder), Task(encoder if shared else nn.Linear(8, 8))
    made = []
    for seed, net in enumerate(nets):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        data = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.long))
        engine = PrivacyEngine(seed=seed)
        parts = engine.make_private(
            module=net,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            sampling=sampling,
        )
        made.append((*parts, engine))
    return made


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_two_private_models_do_not_share_parts(sampling: str) -> None:
    """Multi-task learning: one backward pass, or one after the other. Refused before either is begun."""
    with pytest.raises(ConfigurationError):
        two_tasks(True, sampling, torch.randn(32, 8))


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "one backward pass"])
def test_two_private_models_may_be_trained_side_by_side(together: bool) -> None:
    """zip(loader_a, loader_b): one lot of each is out."""
    (one, first, left, engine), (two, second, right, _) = two_tasks(False, "poisson", torch.randn(32, 8))
    for (a, ya), (b, yb) in zip(left, right, strict=False):
        first.zero_grad()
        second.zero_grad()
        if together:
            (functional.cross_entropy(one(a), ya) + functional.cross_entropy(two(b), yb)).backward()
        else:
            functional.cross_entropy(one(a), ya).backward()
            functional.cross_entropy(two(b), yb).backward()
        first.step()
        second.step()
    assert engine.guarantee(1e-5).epsilon is not None
