"""Mixing that a few rows, one trial or one draw do not show: among many examples, between trials, and by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checks.trials import Run, normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError, NoGuaranteeError, PrivacyError, UnsupportedModuleError
from adadp.mechanism.replay import TrainingStep

LOT = 48


class Net(nn.Module):
    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.before, self.f = before, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.f(self.before(x))
        return out


def crowded(x: Tensor) -> Tensor:
    """Two experts with room for a quarter of the batch each; who comes later is left out."""
    expert = (x[:, 0] > 0).long()
    rank = nn.functional.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])
    return x * (rank <= max(16, len(x) // 4))


def in_blocks(x: Tensor) -> Tensor:
    """Blocks of sixteen rows share a mean; what is left over does not."""
    whole = len(x) // 16 * 16
    if not whole:
        return x
    blocks = x[:whole].view(-1, 16, x.shape[1])
    return torch.cat([(blocks - blocks.mean(1, keepdim=True)).view(whole, -1), x[whole:]])


def if_many(x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) > 8 else x


@pytest.mark.parametrize("mixing", [crowded, in_blocks, if_many])
def test_modules_that_mix_many_examples_are_refused(mixing: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PrivacyError, match="mixes examples"):
        Run(Net(mixing))(normal(LOT, 6))


def private(
    model: nn.Module, *, count: int = 240, lot: int = LOT, **settings: Any
) -> tuple[PrivacyEngine, Any, Any, nn.Module]:
    torch.manual_seed(0)
    engine = PrivacyEngine(seed=1)
    data = TensorDataset(torch.randn(count, 6), torch.arange(count) % 3)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=lot), noise_multiplier=1.0, sampling="fixed", **settings,
    )  # fmt: skip
    return engine, optimizer, loader, module


def hardest(losses: Tensor, number: int = 16) -> Tensor:
    """All but the sixteen hardest examples count for nothing."""
    if len(losses) <= number:
        return losses
    return losses * (losses >= losses.detach().topk(number).values[-1])


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("largest", [None, 40])
def test_losses_over_the_hardest_examples_are_refused(scalar: bool, largest: int | None) -> None:
    engine, optimizer, loader, model = private(Net(), max_physical_batch_size=largest)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        losses = hardest(nn.functional.cross_entropy(model(x), y, reduction="none"))
        return losses.mean() if scalar else losses

    step = TrainingStep(optimizer, loss)
    with pytest.raises(PrivacyError, match="mixes examples"):
        step(*next(iter(loader)))
    with pytest.raises(NoGuaranteeError):
        engine.get_epsilon(1e-5)


class Later(Net):
    """Mixes from its fiftieth call in training on, trials not counted (they put attributes back)."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x - x.mean(0) if self.calls > 50 else x)


@pytest.mark.parametrize("begins", [5, 50])
def test_mixing_that_a_counter_switches_on_is_found_at_the_last_planned_lot(begins: int) -> None:
    engine, optimizer, loader, model = private(Later(), count=96, lot=16, steps=60)
    model.calls = 50 - begins
    done = 0

    def train() -> None:
        nonlocal done
        while done < 60:
            for x, y in loader:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                done += 1

    with pytest.raises(PrivacyError, match="mixes examples"):
        train()
    assert done == (10 if begins == 5 else 59)
    with pytest.raises(NoGuaranteeError):
        engine.get_epsilon(1e-5)


@pytest.mark.parametrize("place", ["module", "loss"])
def test_mixing_by_chance_is_found(place: str) -> None:
    def sometimes(x: Tensor) -> Tensor:
        return x - x.mean(0) if np.random.rand() < 0.3 else x

    _, optimizer, loader, model = private(Net(sometimes if place == "module" else lambda x: x))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        return nn.functional.cross_entropy(sometimes(logits) if place == "loss" else logits, y, reduction="none")

    step = TrainingStep(optimizer, loss)
    with pytest.raises(PrivacyError, match=r"mixes examples|mixed before it"):
        step(*next(iter(loader)))


@pytest.mark.parametrize("by_step", [False, True])
def test_a_right_model_that_draws_by_example_is_no_mixing(by_step: bool) -> None:
    """Each example is dropped or not by a number of its own, as stochastic depth does."""

    def dropped(x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(len(x), 1) < 0.7)

    _, optimizer, loader, model = private(Net(dropped))
    x, y = next(iter(loader))
    if by_step:
        TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))(x, y)
    else:
        model(x)


class Fewer(Net):
    """Counts its calls in training, trials and all."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        Fewer.calls.append(len(x))
        return super().forward(x)


def test_between_lots_0_and_the_recording_nothing_is_tried() -> None:
    """What waits for a recording is tried with it, on all rows: two runs. Without one it is tried on the next lot."""
    _, optimizer, loader, model = private(Fewer(), count=20 * LOT)
    step = TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    step.why_not = None  # as on a GPU
    step._replayable = lambda microbatch: False  # type: ignore[method-assign]
    step._rehearse = step._ordinarily  # type: ignore[method-assign]
    batches = iter(loader)
    calls = []
    for _ in range(9):
        Fewer.calls = []
        step(*next(batches))
        calls.append(len(Fewer.calls))
    assert calls[0] > 5
    assert calls[1:8] == [1] * 7
    assert calls[8] > 5
    x, y = next(batches)
    Fewer.calls = []
    optimizer._trial.before_recording(step.loss, (x, y), optimizer._current())
    assert Fewer.calls == [LOT, LOT]
    model.before = if_many
    with pytest.raises(PrivacyError, match="mixes examples"):
        optimizer._trial.before_recording(step.loss, (x, y), optimizer._current())


# ---- made rows and public ones ----------------------------------------------------------------


class Looking(Net):
    """Notes all that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        Looking.given.append(x.detach().clone())
        return super().forward(x)

    given: ClassVar[list[Tensor]] = []


@pytest.mark.parametrize("by_step", [False, True])
def test_a_refusal_comes_of_made_rows_first(by_step: bool) -> None:
    Looking.given = []
    _, optimizer, loader, model = private(Looking(lambda x: x - x.mean(0)))
    loader.dataset.tensors = loader.dataset.tensors[0] + 1000, loader.dataset.tensors[1]
    x, y = next(iter(loader))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    with pytest.raises(PrivacyError, match="mixes examples"):
        TrainingStep(optimizer, loss)(x, y) if by_step else model(x)
    assert Looking.given
    assert max(float(given.abs().max()) for given in Looking.given) < 100


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("mixes", [False, True])
def test_public_examples_serve_in_the_place_of_private_ones(by_step: bool, mixes: bool) -> None:
    Looking.given = []
    public = [(torch.randn(6), i % 3) for i in range(20)]
    before = (lambda x: x - x.mean(0)) if mixes else (lambda x: x)
    _, optimizer, loader, model = private(Looking(before), public_examples=public)
    loader.dataset.tensors = loader.dataset.tensors[0] + 1000, loader.dataset.tensors[1]
    x, y = next(iter(loader))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    def work() -> None:
        if by_step:
            TrainingStep(optimizer, loss)(x, y)
        else:
            model(x)

    if mixes:
        with pytest.raises(PrivacyError, match="mixes examples"):
            work()
    else:
        work()
    private_rows = [given for given in Looking.given if float(given.abs().max()) > 100]
    assert len(private_rows) == (0 if mixes else 1)  # the training step itself
    assert len(Looking.given) > 2


def test_private_rows_serve_where_public_ones_cannot_be_run() -> None:
    public = [(torch.randn(5), i % 3) for i in range(20)]  # of another width
    _, _, loader, model = private(Net(lambda x: x - x.mean(0)), public_examples=public)
    with pytest.raises(PrivacyError, match="mixes examples"):
        model(next(iter(loader))[0])


@pytest.mark.parametrize("wrong", [3, [(torch.randn(6), 0)]])
def test_public_examples_are_items(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="public_examples"):
        private(Net(), public_examples=wrong)


def test_what_is_said_of_private_rows_names_the_module_alone() -> None:
    """An error of the user's own that a trial meets may hold values: it is not shown."""

    def fails(x: Tensor) -> Tensor:
        if len(x) != LOT:
            raise ValueError(f"no rows like {float(x[0, 0])}")
        return x

    with pytest.raises(PrivacyError) as caught:
        Run(Net(fails))(normal(LOT, 6))
    assert "ValueError" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert str(caught.value).startswith("Net cannot be tried out on a few examples")


class Remembers(Net):
    """Keeps a sum of what it saw in a buffer, which is saved with the weights; or a table, made when first run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(0 if how == "a table" else 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen += x.detach().sum(0)
        elif self.how == "anew":
            self.seen = self.seen + x.detach().sum(0)
        elif not len(self.seen):
            self.seen = torch.ones(x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("how", ["in place", "anew"])
def test_buffers_that_follow_the_data_are_refused(how: str, by_step: bool) -> None:
    engine, optimizer, loader, model = private(Remembers(how))
    x, y = next(iter(loader))
    with pytest.raises(UnsupportedModuleError, match="the buffer seen changes when the model runs"):
        TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))(
            x, y
        ) if by_step else model(x)
    assert not by_step or torch.equal(model.seen, torch.zeros(6))
    assert engine.guarantee(1e-5).epsilon is None or engine.guarantee(1e-5).sampling == "nothing"


def test_a_table_in_a_buffer_is_none_of_the_data() -> None:
    _, optimizer, loader, model = private(Remembers("a table"))
    step = TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    for x, y in loader:
        step(x, y)
