"""adadp.checks: what lets one example reach another is refused, and its right twin is not."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from checks.trials import Run, normal
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.checks.schedule import stage
from adadp.errors import PrivacyError, TrainingLoopError, UnsupportedModuleError


class Net(nn.Module):
    """A linear layer with a function before it."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.before = nn.Linear(6, 3), before

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.before(x))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


# ---- when -----------------------------------------------------------------------------------


def test_the_schedule_is_public() -> None:
    due = [lot for lot in range(3000) if lot == 0 or stage(lot) > stage(lot - 1)]
    assert due == [0, 1, 10, 100, 1000]
    planned = [lot for lot in range(1, 81) if stage(lot, 80) > stage(lot - 1, 80)]
    assert planned == [1, 10, 79]


def test_between_trials_nothing_runs() -> None:
    calls = []
    run = Run(Net(lambda x: calls.append(0) or x))
    for lot in (*range(12), 99, 100, 101):
        calls.clear()
        run(normal(8, 6), lot=lot)
        assert (len(calls) == 1) == (lot not in (0, 1, 10, 100))
        assert len(calls) <= (12 if lot else 20)  # the first one learns where the examples are, too


def test_mixing_that_starts_later_is_found_at_the_next_trial() -> None:
    model = Net()
    run = Run(model)
    for lot in range(11):
        run(normal(8, 6), lot=lot)
    model.before = centred
    run(normal(8, 6), lot=99)
    assert run.trial.due(100)
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        run(normal(8, 6), lot=101)  # lot 100 may have been empty
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        run(normal(8, 6), lot=102)


def test_each_mode_is_tried() -> None:
    class Moody(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.f(centred(x) if self.training else x)

    run = Run(Moody().eval())
    for lot in range(5):
        run(normal(8, 6), lot=lot)
    assert not run.trial.due(4)
    run.model.train()
    assert run.trial.due(4)
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        run(normal(8, 6), lot=4)


# ---- unlike examples ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x * (1 + F.relu(x[:, 0].max() - 5)),  # only where there is a large one
        lambda x: x + (x.sum(1) < -9).any() * 1.0,  # only where there is a small one
        lambda x: x.sort(0).values,
        lambda x: x[x[:, 0].argsort()],
    ],
)
def test_what_only_unlike_examples_show(mix: Callable[[Tensor], Tensor]) -> None:
    inputs = normal(16, 6) / 10
    inputs[9], inputs[12] = 7.0, -7.0
    with pytest.raises(UnsupportedModuleError):
        Run(Net(mix))(inputs)


def test_sorting_that_changes_no_output_is_seen_in_the_gradients() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            order = lengths.argsort(stable=True)
            return self.b(self.a(x[order])[order.argsort()])

    lengths = torch.tensor([5, 5, 5, 5, 3, 4, 3, 9])
    with pytest.raises(UnsupportedModuleError):
        Run(Sorted())(normal(8, 6), lengths)


def test_mixing_in_the_backward_pass_alone() -> None:
    class Rolled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.roll(1, 0)

    model = nn.Sequential(nn.Linear(6, 6), Net(Rolled.apply))
    with pytest.raises(UnsupportedModuleError, match="0 does not see examples"):
        Run(model)(normal(8, 6))


def test_labels_of_other_numbers_of_tokens() -> None:
    """A loss inside the model: a mean over tokens is nobody's own, a mean over examples is."""

    class Inside(nn.Module):
        def __init__(self, over_tokens: bool) -> None:
            super().__init__()
            self.e, self.f, self.over_tokens = nn.Embedding(9, 4), nn.Linear(4, 9), over_tokens

        def forward(
            self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
        ) -> dict[str, Tensor]:
            logits = self.f(self.e(ids))
            if labels is None:
                return {"logits": logits}
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            counted = (labels >= 0).sum(1).clamp_min(1)
            own = (each.sum(1) / counted).mean()
            return {"loss": each.sum() / (labels >= 0).sum() if self.over_tokens else own, "logits": logits}

    ids = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    Run(Inside(False))(ids, labels=labels)
    Run(Inside(True))(ids)
    with pytest.raises(UnsupportedModuleError, match=r"Inside computes a loss .*adadp.losses"):
        Run(Inside(True))(ids, labels=labels)  # all have five: what they could have is tried
    with pytest.raises(UnsupportedModuleError, match="num_items_in_batch"):
        Run(Inside(False))(ids, labels=labels, num_items_in_batch=40)


@pytest.mark.parametrize(
    "mix",
    [lambda x: x * torch.arange(1.0, len(x) + 1)[:, None], lambda x: x + torch.linspace(0, 1, len(x))[:, None]],
)
def test_the_place_of_an_example_is_the_others_business(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedModuleError, match="where among them it is"):
        Run(nn.Sequential(Net(), Applied(mix)))(normal(8, 6))


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ---- axes ---------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, inner_first: bool) -> None:
        super().__init__()
        self.a, self.r, self.f = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=inner_first), nn.Linear(4, 3)
        self.inner_first = inner_first

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        if self.inner_first:
            return self.f(self.r(hidden)[0][:, -1])
        return self.f(self.r(hidden.transpose(0, 1))[0][-1])


@pytest.mark.parametrize(("n", "steps"), [(16, 16), (4, 4), (5, 4), (4, 5), (16, 12)])
def test_two_layouts_in_one_model(n: int, steps: int) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"a does not see examples in the order"):
        Run(Recurrent(False), batch_first=False)(normal(n, steps, 4))
    Run(Recurrent(False))(normal(n, steps, 4))  # recurrent layers know their own layout
    Run(Recurrent(True))(normal(n, steps, 4))


@pytest.mark.parametrize(("n", "steps"), [(16, 16), (5, 4), (4, 5)])
def test_one_layer_read_along_the_wrong_axis(n: int, steps: int) -> None:
    class Mean(nn.Module):
        def __init__(self, over: int) -> None:
            super().__init__()
            self.a, self.over = nn.Linear(4, 3), over

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).mean(self.over)

    with pytest.raises(PrivacyError):
        Run(Mean(1), batch_first=False)(normal(n, steps, 4))
    Run(Mean(0), batch_first=False)(normal(steps, n, 4), count=n)


# ---- containers ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor


Named = namedtuple("Named", "x")


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Reader(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor], mix: bool) -> None:
        super().__init__()
        self.f, self.read, self.mix = nn.Linear(6, 3), read, mix

    def forward(self, batch: Any) -> Tensor:
        x = self.read(batch)
        return self.f(centred(x) if self.mix else x)


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda x: list(x), torch.stack),
    "dataclass": (Batch, lambda b: b.x),
    "named tuple": (Named, lambda b: b.x),
    "nested": (lambda x: {"a": [Batch(x)], "b": (None, 3)}, lambda b: b["a"][0].x),
    "packed": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True),
        lambda p: nn.utils.rnn.pad_packed_sequence(p, batch_first=True)[0][:, 0],
    ),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_are_taken_apart(kind: str) -> None:
    wrap, read = CONTAINERS[kind]
    Run(Reader(read, mix=False))(wrap(normal(8, 6)), count=8)
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        Run(Reader(read, mix=True))(wrap(normal(8, 6)), count=8)


def test_batch_encodings_of_transformers() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding
    Run(Reader(lambda b: b["x"], mix=False))(encoding({"x": normal(8, 6)}), count=8)
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        Run(Reader(lambda b: b["x"], mix=True))(encoding({"x": normal(8, 6)}), count=8)


def test_gradients_through_what_cannot_be_taken_apart_are_refused() -> None:
    run = Run(Reader(lambda b: b.x, mix=False))
    run(Opaque(normal(8, 6)), count=8)  # it may run: for a look at its outputs, say
    with pytest.raises(UnsupportedModuleError, match=r"Reader was given a Opaque.*dataclasses of tensors"):
        run.gradients(run(Opaque(normal(8, 6)), count=8).sum())
    run.gradients(run(Batch(normal(8, 6)), count=8).sum())


def test_a_batch_that_is_not_the_lot_may_be_looked_at() -> None:
    run = Run(Net())
    run(normal(8, 6))
    run.model(normal(31, 6))  # validation, without no_grad
    loss = run.model(normal(8, 6)).sum()
    assert run.gradients(loss)


# ---- state --------------------------------------------------------------------------------------


class Centre(Net):
    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(x)
        out = z - self.centre
        self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0)
        return out


class Queue(Net):
    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(x)
        self.queue = torch.cat([self.queue, z.detach()])[-64:]
        return z


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bank, self.place = torch.zeros(64, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(x)
        self.bank[self.place : self.place + len(z)] = z.detach()
        self.place = (self.place + len(z)) % 48
        return z


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean(0))
        return self.f(x)


@pytest.mark.parametrize("kind", [Centre, Queue, InPlace, Listed])
def test_what_is_kept_of_examples(kind: type[nn.Module]) -> None:
    run = Run(kind())
    with pytest.raises(UnsupportedModuleError, match=f"{kind.__name__} keeps something of the examples"):
        run(normal(8, 6))
    assert torch.equal(getattr(run.model, "centre", torch.zeros(3)), torch.zeros(3))  # as it was
    assert len(getattr(run.model, "seen", [])) == len(getattr(run.model, "queue", [])) == 0


class Counter(Net):
    """Counts its calls, caches a table and shows what it did last: none of it reaches a later lot."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.table, self.shown, self.memo = 0, None, None, {}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(x.shape[1]).float()
        self.memo[x.shape[1]] = self.table
        noise = torch.rand(x.shape, generator=self.generator)
        z = self.f(x + self.table * 0.1 + noise) / (1 + 0.01 * self.calls)
        self.shown = z.detach()
        return z


def test_counters_and_tables_are_not_state() -> None:
    model = Counter()
    run = Run(model)
    run(normal(8, 6))
    assert model.calls == 1
    run(normal(8, 6), lot=1)
    assert model.calls == 2


def test_what_was_returned_does_not_come_back() -> None:
    class Recalls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r = nn.LSTM(6, 3, batch_first=True)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
            return self.r(x, state)

    fresh = (torch.zeros(1, 8, 3), torch.zeros(1, 8, 3))
    run = Run(Recalls())
    for lot in range(4):
        _, state = run(normal(8, 5, 6), fresh, lot=lot)
    run.model(normal(8, 5, 6), state)  # within its own lot a state may go on
    with pytest.raises(TrainingLoopError, match="Recalls is given what it returned for an earlier lot"):
        run(normal(8, 5, 6), tuple(s.detach() for s in state), lot=4)


# ---- precision, models ----------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_not_mixing(autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 3))
    inputs = normal(16, 64)
    if not autocast:
        model, inputs = model.bfloat16(), inputs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixing = nn.Sequential(deepcopy(model), Outer())
        Run(model)(inputs)
        with pytest.raises(UnsupportedModuleError):
            Run(mixing)(inputs)


class Outer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


def test_models_that_were_falsely_refused() -> None:
    class Folded(nn.Module):
        """Tokens in one dimension with the examples at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.e, self.f = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids: Tensor) -> Tensor:
            return self.f(self.e(ids)).view(-1, 9)

    class Expert(nn.Module):
        """Runs a part only where it is needed: other modules run for other examples."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            large = x.sum(1, keepdim=True) > 0
            out = torch.where(large, self.a(x), 0.0)
            return out + torch.where(large, 0.0, self.b(x)) if not bool(large.all()) else out

    class Distribution(Net):
        def forward(self, x: Tensor) -> Any:
            return torch.distributions.Normal(self.f(x), 1.0)

    Run(Folded())(torch.randint(9, (8, 5)))
    Run(Expert())(normal(8, 6))
    Run(Distribution())(normal(8, 6))
    Run(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(6, 2)))(normal(8, 6))


def test_parts_of_a_model_may_be_called_one_by_one() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(6, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})
    run = Run(model)
    run.out(0, 8)
    hidden = model["encoder"](normal(8, 6))
    run.gradients(model["head"](model["norm"](hidden)).sum())


def test_the_trial_leaves_no_gradient_and_no_random_number_behind() -> None:
    import random

    import numpy as np

    prompt = nn.Parameter(torch.ones(6))
    model = Net(lambda x: x + prompt)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    Run(model)(normal(8, 6))
    assert prompt.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_a_switch_that_is_turned_is_tried_at_once() -> None:
    """Mixing that is switched on after a warm-up, between two trials of the schedule."""

    class Switched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixes = False

        def forward(self, x: Tensor) -> Tensor:
            return self.f(centred(x) if self.mixes else x)

    run = Run(Switched())
    for lot in range(5):
        run(normal(8, 6), lot=lot)
    run.model.mixes = True
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        run(normal(8, 6), lot=5)


def test_a_loss_that_is_gone_does_not_answer_for_another() -> None:
    """Functions are told apart by where they lie, and a new one may lie where an old one lay."""
    run = Run(nn.Linear(6, 3))
    inputs, wanted = normal(12, 6), torch.arange(12) % 3
    refused = 0
    for _ in range(20):
        run.trial.of_loss(lambda x, y: F.cross_entropy(run.model(x), y), (inputs, wanted), run.out(1, 12))
        try:
            run.trial.of_loss(
                lambda x, y: F.cross_entropy(run.model(x - x.mean(0)), y), (inputs, wanted), run.out(1, 12)
            )
        except PrivacyError:
            refused += 1
    assert refused == 20
