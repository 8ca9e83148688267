"""Local clipping clamps and adds up each layer's gradients while the backward pass runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.clipping import Clipping, Flat, Grouped, Local
from adadp.clipping import early as early_module
from adadp.clipping.early import Clamped, EarlyClamp
from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients import collection
from adadp.gradients.forms.dense import Dense
from adadp.mechanism.observation import Unnoised
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader
from adadp.shapes import Paid, Probe, Raw, Released

CLASSES, COUNT = 3, 12
Made = tuple[nn.Module, PrivateOptimizer, PrivateLoader]


class Residual(nn.Module):
    """A model with sequences, attention, normalisation and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        logits: Tensor = self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return logits


class Tied(nn.Module):
    """One table at both ends, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.middle(self.middle(self.table(ids)).tanh())
        logits: Tensor = self.out(x).mean(1)[:, :CLASSES]
        return logits


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return torch.tanh(self.first(x))

        logits: Tensor = self.second(checkpoint(part, x, use_reentrant=False))
        return logits


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, CLASSES)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vectors": deep, "images": images, "sequences": Residual, "tied": Tied, "checkpointed": Checkpointed,
}  # fmt: skip


def inputs_for(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Residual | Tied):
        return torch.randint(11, (COUNT, 7), generator=generator)
    form = (2, 6, 6) if isinstance(next(model.children()), nn.Conv2d) else (5,)
    return torch.randn(COUNT, *form, generator=generator)


def made(
    model: nn.Module, *, early: bool = True, clipping: Clipping | None = None, inputs: Tensor | None = None, **more: Any
) -> Made:
    inputs = inputs_for(model) if inputs is None else inputs
    loader = DataLoader(TensorDataset(inputs, torch.arange(len(inputs)) % CLASSES), batch_size=len(inputs))
    clipping = Local(2.0, threshold=0.0) if clipping is None else clipping
    _, optimizer, private = PrivacyEngine(seed=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, clipping=clipping, sampling="fixed", **more,
    )  # fmt: skip
    if not early:
        optimizer._step.capture.before_pass = None
    return model, optimizer, private


class Seen:
    """Writes down what comes before the noise; with `quiet`, releases it as it is."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.sums: list[dict[str, Tensor]] = []
        self.stddev: dict[str, Any] = {}

    def noising(self, release: Unnoised) -> dict[str, Tensor] | None:
        self.sums.append({name: value.clone() for name, value in release.sums.items()})
        self.stddev.update(release.stddev)
        return dict(release.sums) if self.quiet else None

    def noised(self, release: Unnoised, noisy: dict[str, Tensor]) -> None: ...

    def stepped(self, lot: int, gradient: dict[str, Tensor]) -> None: ...


def sums_of(optimizer: PrivateOptimizer) -> list[dict[str, Tensor]]:
    """Where the sums of lots to come are put, as they are before their noise."""
    seen = Seen()
    optimizer.observe(seen)
    return seen.sums


def lots(private: PrivateLoader, optimizer: PrivateOptimizer, model: nn.Module, number: int) -> list[dict[str, Tensor]]:
    """The sums of `number` lots as they were before their noise."""
    sums = sums_of(optimizer)
    while len(sums) < number:
        for inputs, targets in private:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return sums


def forms_of_next(private: PrivateLoader, optimizer: PrivateOptimizer, model: nn.Module) -> dict[str, bool]:
    """Which parameters' gradients are clamped when the backward pass of the next lot has ended."""
    inputs, targets = next(iter(private))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    forms = optimizer._step.capture.take(len(inputs))
    return {name: isinstance(form, Clamped) for name, form in forms.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatch", [None, 5])
def test_early_and_late_are_the_same(name: str, microbatch: int | None) -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        model, optimizer, private = made(MODELS[name](), early=early, max_physical_batch_size=microbatch)
        found.append(lots(private, optimizer, model, 4))
        assert all(value.isfinite().all() for value in model.state_dict().values())
    for lot, (one, other) in enumerate(zip(*found, strict=True)):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), (lot, key)
    assert any(bool(value.any()) for value in found[0][-1].values())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_complete_is_clamped_early(name: str) -> None:
    torch.manual_seed(0)
    model, optimizer, private = made(MODELS[name]())
    lots(private, optimizer, model, 2)
    early = forms_of_next(private, optimizer, model)
    late = {name for name, is_early in early.items() if not is_early}
    expected = {"table.weight", "middle.weight", "middle.bias"} if name == "tied" else set()
    assert late == expected
    assert early.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", ["images", "sequences"])
def test_small_ones_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a GPU, where they are worked on side by side when the backward pass has ended."""
    found = []
    for together in (False, True):
        if together:
            for module in (early_module, collection):
                monkeypatch.setattr(module, "is_small", lambda form: type(form) is Dense and form.shape.numel() < 30)
        torch.manual_seed(0)
        model, optimizer, private = made(MODELS[name]())
        found.append(lots(private, optimizer, model, 4))
    assert not all(forms_of_next(private, optimizer, model).values())
    for one, other in zip(*found, strict=True):
        for key in one:
            # The first lot is clipped flat, by bounds that are taken in two ways (3e-5 apart).
            torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.func")
def test_modules_that_torch_func_differentiates() -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        model, optimizer, private = made(deep(), early=early, through_func=["2"])
        found.append(lots(private, optimizer, model, 3))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert not any(forms_of_next(private, optimizer, model).values())  # the last one was told to wait


def test_what_layers_keep_is_let_go_during_the_pass() -> None:
    """When the lowest layer's gradient arrives, nothing of the others is left."""
    model, optimizer, private = made(deep())
    lots(private, optimizer, model, 2)
    capture = optimizer._step.capture
    inputs, targets = next(iter(private))
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(record._parts is not None for record in capture.staged))

    hidden = model[1](model[0](inputs))
    hidden.register_hook(look)
    nn.functional.cross_entropy(model[4](model[3](model[2](hidden))), targets).backward()
    assert seen == [0]


class Bursts(torch.autograd.Function):
    """The identity; examples whose first value is above 50 send back what is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor) -> Tensor:
        ctx.save_for_backward(marks)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (marks,) = ctx.saved_tensors
        return torch.where(marks.view(-1, 1), math.inf, gradient), None


class Bursting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        marks = x[:, 0] > 50
        below = torch.tanh(self.second(torch.tanh(self.first(torch.where(marks.view(-1, 1), 0.5, x)))))
        logits: Tensor = self.third(Bursts.apply(below, marks))
        return logits


def test_an_example_that_is_not_finite_adds_nothing_from_there_on() -> None:
    """Its gradient is finite in the layer above: it adds no more than the box there, and nobody else notices it."""
    inputs = inputs_for(deep())
    found: list[dict[str, Tensor]] = []
    for given in (inputs, torch.cat([inputs, torch.full((1, 5), 99.0)])):
        torch.manual_seed(0)
        model, optimizer, private = made(Bursting(), inputs=given, loss_reduction="sum")
        clipping = optimizer._step.clipping
        assert isinstance(clipping, Local)
        for name, parameter in model.named_parameters():  # a box that is the same for both
            clipping.shape.learn(name, {"square": torch.full_like(parameter, 0.01)})
        clipping.local = True
        batch = next(iter(private))[0]
        order = batch.sum(1).argsort()
        outputs = model(batch[order])
        nn.functional.cross_entropy(outputs, torch.zeros(len(batch), dtype=torch.long), reduction="sum").backward()
        assert private.current is not None
        optimizer._step.add(private.current)
        found.append(dict(private.current.of.sums))
    without, with_it = found
    for name, bound in clipping.bounds.items():
        added = with_it[name] - without[name]
        assert without[name].any()
        assert (added.abs() <= bound * (1 + 1e-5)).all(), name
        # Above the burst it adds what is finite, below nothing at all.
        assert bool((added.abs() > 1e-3).any()) == name.startswith("third"), name


def test_an_example_is_left_out_once_it_was_not_finite() -> None:
    """In whatever the same backward pass brings later, though it is finite there; other passes do not know of it."""
    clipping = Local(1.0)
    clipping.local = True
    clipping.bounds = {"above": torch.tensor([1.0, 1.0]), "below": torch.tensor([1.0])}
    stand_in = SimpleNamespace(clipping=clipping, scale=lambda microbatch: 1.0)
    early = EarlyClamp(stand_in, SimpleNamespace(planned=3), torch.tensor([True, True, False]))
    above, below = Dense(torch.tensor([[0.5, math.nan], [0.25, 0.5], [9.0, 9.0]])), Dense(torch.full((3, 1), 0.5))
    sums = [early(name, form).clamped_sum(clipping.bounds[name], 1.0, torch.ones(3)) for name, form in
            (("above", above), ("below", below))]  # fmt: skip
    assert sums[0].tolist() == [0.25, 0.5]
    assert sums[1].tolist() == [0.5]
    early._finite[0] = early._finite.pop(-1)
    again = early("below", below).clamped_sum(clipping.bounds["below"], 1.0, torch.ones(3))
    assert again.tolist() == [1.0]


def box(**more: Any) -> tuple[nn.Module, PrivateOptimizer, Tensor, Tensor]:
    """A model whose box is on, and a lot of it."""
    torch.manual_seed(0)
    model, optimizer, private = made(deep(), **more)
    lots(private, optimizer, model, 2)
    inputs, targets = next(iter(private))
    optimizer.zero_grad()
    return model, optimizer, inputs, targets


def test_a_second_backward_pass_is_refused() -> None:
    model, optimizer, inputs, targets = box()
    for _ in range(2):
        nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TrainingLoopError, match="call backward\\(\\) once"):
        optimizer.step()
    assert not optimizer._step.capture.recorded


def test_a_graph_that_is_gone_through_twice_is_refused() -> None:
    model, optimizer, inputs, targets = box()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(TrainingLoopError, match="call backward\\(\\) once"):
        optimizer.step()


def test_two_forward_passes_in_one_loss_are_one_gradient() -> None:
    sums = []
    for early in (True, False):
        model, optimizer, inputs, targets = box(early=early)
        sums.append(sums_of(optimizer))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss + nn.functional.cross_entropy(model(-inputs), targets)).backward()
        optimizer.step()
    (one,), (other,) = sums
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_output_that_is_not_used_changes_nothing() -> None:
    sums = []
    for extra in (False, True):
        model, optimizer, inputs, targets = box()
        sums.append(sums_of(optimizer))
        if extra:
            model(inputs)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    (one,), (other,) = sums
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_taken_for_another_purpose_leave_nothing_behind() -> None:
    sums = []
    for extra in (False, True):
        model, optimizer, inputs, targets = box()
        sums.append(sums_of(optimizer))
        given = inputs.clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(given), targets)
        if extra:
            (gradient,) = torch.autograd.grad(loss, given, retain_graph=True)
            assert gradient.isfinite().all()
        loss.backward()
        optimizer.step()
    (one,), (other,) = sums
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bounds_that_change_after_the_backward_pass_are_refused() -> None:
    for change in ("replaced", "in place"):
        model, optimizer, inputs, targets = box()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        clipping = optimizer._step.clipping
        assert isinstance(clipping, Local)
        for name, bound in list(clipping.bounds.items()):
            if change == "replaced":
                clipping.bounds[name] = bound / 8
            else:
                bound.div_(8)
        with pytest.raises(TrainingLoopError, match="bounds were changed"):
            optimizer.step()


def test_settings_are_those_of_the_forward_pass() -> None:
    """Noise and box are made of the same bounds, whatever is set between."""
    model, optimizer, inputs, targets = box()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    clipping = optimizer._step.clipping
    assert isinstance(clipping, Local)
    bounds = dict(clipping.bounds)
    clipping.beta = 1e-3
    observer = Seen()
    optimizer.observe(observer)
    optimizer.step()
    seen = observer.stddev
    coordinates = sum(bound.numel() for bound in bounds.values())
    for name, bound in bounds.items():
        assert torch.equal(seen[name], bound * math.sqrt(coordinates)), name


def test_a_lot_that_is_left_out_is_not_mixed_up_with_the_next() -> None:
    torch.manual_seed(0)
    model, optimizer, private = made(deep())
    lots(private, optimizer, model, 2)
    inputs, targets = next(iter(private))
    late = nn.functional.cross_entropy(model(inputs), targets)
    inputs, targets = next(iter(private))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    late.backward()
    with pytest.raises(TrainingLoopError, match="earlier lot"):
        optimizer.step()


def test_who_must_see_gradients_sees_them() -> None:
    """Statistics that are paid for, counts, other clippings and subclasses get the gradients themselves."""

    class Curious(Local):
        def _bounded(self, gradients: Any) -> Any:
            assert not any(isinstance(form, Clamped) for form in gradients.forms.values())
            return super()._bounded(gradients)

    def see(self: Released, shape: Any, gradients: Any) -> None:
        assert not any(isinstance(form, Clamped) for form in gradients.forms.values())

    watching = type("Watching", (Released,), {"see": see})
    clippings: list[tuple[Clipping, dict[str, Any]]] = [
        (Local(2.0, threshold=0.0, source=Paid(every=2)), {}),
        (Local(2.0, threshold=0.0), {"expose_raw": True}),
        (Grouped({"0.*": Local(2.0, threshold=0.0), "*": Flat(1.0)}), {}),
        (Curious(2.0, threshold=0.0), {}),
        (Local(2.0, threshold=0.0, source=watching()), {}),
    ]
    for clipping, more in clippings:
        torch.manual_seed(0)
        model, optimizer, private = made(deep(), clipping=clipping, **more)
        lots(private, optimizer, model, 4)
        assert not any(forms_of_next(private, optimizer, model).values())


@pytest.mark.parametrize("kind", ["released", "probe"])
def test_shapes_that_cost_nothing(kind: str) -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        probe = Probe(lambda n, g: torch.randn(n, 5, generator=g), count=8, every=2)
        source = Released() if kind == "released" else probe
        model, optimizer, private = made(deep(), early=early, clipping=Local(2.0, threshold=0.0, source=source))
        found.append(lots(private, optimizer, model, 5))
        if early:
            assert all(forms_of_next(private, optimizer, model).values())
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_layers_may_be_frozen_between_lots() -> None:
    torch.manual_seed(0)
    model, optimizer, private = made(deep())
    lots(private, optimizer, model, 2)
    model[2].requires_grad_(False)
    sums = lots(private, optimizer, model, 1)
    assert set(sums[0]) == {"0.weight", "0.bias", "4.weight", "4.bias"}


# ---- attacks: what a training loop may do beside -----------------------------------------------------------------


class Waits(nn.Module):
    """Goes through torch.func; on request it waits in the backward pass, which runs it again for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.wait = nn.Parameter(torch.ones(5)), False
        self.there, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.wait:
            self.there.set()
            self.go.wait(10)
        return x * self.weight


@pytest.mark.filterwarnings("ignore:.*torch.func")
def test_a_pass_in_another_thread_hides_nothing() -> None:
    """While one thread's backward pass makes gradients, another may run the model: what it does is watched too."""
    torch.manual_seed(0)
    first = Waits()
    model, optimizer, private = made(nn.Sequential(first, nn.Linear(5, CLASSES)))
    lots(private, optimizer, model, 2)
    inputs, targets = next(iter(private))
    optimizer.zero_grad()
    early = nn.functional.cross_entropy(model[1](model[0](inputs)), targets)
    first.wait = True
    worker = threading.Thread(target=early.backward)
    worker.start()
    first.there.wait(5)  # nobody comes where gradients wait for the step
    first.wait = False
    other = nn.functional.cross_entropy(model(1000 * inputs), targets)
    first.go.set()
    worker.join()
    other.backward()
    assert all(parameter.grad is None for parameter in model.parameters())  # summed over examples, clipped by nobody


class Doubles(nn.Module):
    """Repeats its examples where one of them is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        logits: Tensor = self.second(torch.cat([hidden, hidden]) if bool((x > 50).any()) else hidden)
        return logits[: len(x)]


def test_a_lot_is_not_released_without_gradients_that_could_not_be_made() -> None:
    """If it were, one example could take away all the others' gradients."""
    torch.manual_seed(0)
    model, optimizer, private = made(Doubles())
    lots(private, optimizer, model, 2)
    inputs, targets = next(iter(private))
    inputs[3] = 99.0
    with suppress(UnsupportedModuleError):
        nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises((UnsupportedModuleError, TrainingLoopError)):
        optimizer.step()


def test_gradients_for_another_purpose_may_be_of_other_examples() -> None:
    model, optimizer, inputs, targets = box()
    some = inputs[:4].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(some), targets[:4]), some)
    assert gradient.any()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def probes() -> Local:
    probe = Probe(lambda n, g: torch.randn(n, 5, generator=g), count=8, every=1)
    return Local(2.0, threshold=0.0, source=probe)


def with_modes(how: str, early: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, optimizer, private = made(deep(), early=early, clipping=probes())
    sums = lots(private, optimizer, model, 2)
    quiet = Seen(quiet=True)
    quiet.sums = sums
    optimizer.observe(quiet)
    inputs, targets = next(iter(private))
    optimizer.zero_grad()
    if how == "checkpoint":
        outputs = checkpoint(model, inputs, use_reentrant=False)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
    optimizer.backward(nn.functional.cross_entropy(outputs.float(), targets, reduction="none"))
    optimizer.step()
    assert isinstance(optimizer._step.clipping, Local)
    return sums, optimizer._step.clipping.bounds


@pytest.mark.parametrize("how", ["checkpoint", "autocast"])
def test_probes_do_not_depend_on_how_the_model_is_run(how: str) -> None:
    (sums, bounds), (others, other_bounds) = with_modes(how, True), with_modes(how, False)
    for name, bound in bounds.items():
        assert torch.equal(bound, other_bounds[name]), name
        assert torch.equal(sums[-1][name], others[-1][name]), name


def test_sources_begin_a_lot_without_a_graph() -> None:
    seen = []

    class Asks(Released):
        def before_lot(self, *args: Any) -> None:
            seen.append(torch.is_grad_enabled())
            super().before_lot(*args)

    torch.manual_seed(0)
    model, optimizer, private = made(deep(), clipping=Local(2.0, threshold=0.0, source=Asks()))
    lots(private, optimizer, model, 4)
    assert seen == [False] * 4


def test_a_source_that_squares_and_does_not_say_so() -> None:
    class Quiet(Raw):
        looks = False

    found = []
    for early in (True, False):
        torch.manual_seed(0)
        model, optimizer, private = made(deep(), early=early, clipping=Local(2.0, threshold=0.0, source=Quiet()))
        found.append(lots(private, optimizer, model, 4))
    for one, other in zip(*found, strict=True):
        for name in one:  # squares come out of the clamping pass, or are taken by themselves
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_a_lot_that_could_not_begin_begins_again() -> None:
    class Fails(Released):
        fail = False

        def before_lot(self, *args: Any) -> None:
            super().before_lot(*args)
            if self.fail:
                raise RuntimeError("no room")

    torch.manual_seed(0)
    source = Fails()
    model, optimizer, private = made(deep(), clipping=Local(2.0, threshold=0.0, source=source))
    lots(private, optimizer, model, 2)
    clipping = optimizer._step.clipping
    assert isinstance(clipping, Local)
    before = dict(clipping.bounds)
    inputs, targets = next(iter(private))
    optimizer.zero_grad()
    source.fail = True
    with pytest.raises(RuntimeError, match="no room"):
        nn.functional.cross_entropy(model(inputs), targets).backward()
    source.fail = False
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert not any(torch.equal(before[name], bound) for name, bound in clipping.bounds.items() if bound.any())


def test_a_layer_that_is_unfrozen_after_a_first_look_is_trained() -> None:
    model, optimizer, inputs, targets = box()
    model[2].requires_grad_(False)
    model(inputs)
    model[2].requires_grad_(True)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert model[2].weight.grad is not None


def test_a_layer_that_is_frozen_before_the_step_stays_as_it_is() -> None:
    model, optimizer, inputs, targets = box()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    model[2].requires_grad_(False)
    loss.backward()
    before = model[2].weight.clone()
    optimizer.step()
    assert torch.equal(model[2].weight, before)


def test_a_look_at_another_lot_leaves_this_one() -> None:
    torch.manual_seed(0)
    model, optimizer, private = made(deep(), max_physical_batch_size=6)
    lots(private, optimizer, model, 2)
    sums, batches = sums_of(optimizer), iter(private)
    inputs, targets = next(batches)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    model(next(iter(private))[0])
    with pytest.raises(TrainingLoopError, match="another iteration"):
        next(batches)
    assert not sums
