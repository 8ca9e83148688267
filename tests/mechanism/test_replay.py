"""Steps that a GPU replays. Tested here is what needs none: padding, and the state that a recording carries on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients.reference import spectrum_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import (
    Adaptive,
    Automatic,
    Clipping,
    Diagonal,
    Ellipsoid,
    Flat,
    Kronecker,
    Local,
    PrivacyEngine,
    Probe,
    TrainingStep,
)
from adadp.accounting.events import PoissonGaussian
from adadp.algorithms.dpopt import OptimisedNoise
from adadp.clipping import Grouped, PerLayer
from adadp.clipping.base import count_lot
from adadp.errors import PrivacyError
from adadp.gradients.forms.factors import LowRank
from adadp.mechanism.kept_state import CannotBeReplayedError, KeptState, _walk
from adadp.randomness import Randomness
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import State
from adadp.sampling.schemes import FixedSize, Poisson
from adadp.shapes import Paid, Released, Source
from adadp.shapes.spectrum import rounded_up

CLIPPINGS: dict[str, Callable[[], Clipping]] = {
    "flat": lambda: Flat(0.5),
    "automatic": lambda: Automatic(0.5),
    "adaptive": lambda: Adaptive(0.5),
    "per layer": lambda: PerLayer(0.5),
    "grouped": lambda: Grouped({"0.*": Flat(0.1), "*": Local(0.5)}),
    "diagonal, probes": lambda: Ellipsoid(0.5, shape=Diagonal(), source=_probe()),
    "Kronecker, probes": lambda: Ellipsoid(0.5, shape=Kronecker(), source=_probe()),
    "Kronecker, released": lambda: Ellipsoid(0.5, shape=Kronecker(), source=Released(every=4)),
    "diagonal, paid": lambda: Ellipsoid(0.5, shape=Diagonal(), source=Paid(every=4)),
    "local": lambda: Local(0.5, threshold=0.0),
    "optimised noise": lambda: OptimisedNoise(0.5, source=_probe(), floor=0.1, threshold=0.0),
}


def _probe() -> Probe:
    return Probe(lambda count, generator: torch.randn(count, 5, generator=generator), count=16, every=4)


def trained(make: Callable[[], Clipping], pad_lots: bool, *, noise: float = 1e-7, spoil: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(60, 5)
    if spoil:
        inputs[0] = math.inf  # the example that fills lots up
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    _, optimizer, loader = PrivacyEngine(seed=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), clipping=make(),
        data_loader=DataLoader(TensorDataset(inputs, torch.arange(60) % 3), batch_size=4), noise_multiplier=noise,
        pad_lots=pad_lots,
    )  # fmt: skip
    step = TrainingStep(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y))
    for batch in loader:
        step(*batch)
    assert step.replays == 0
    assert "cpu" in str(step.why_not)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_what_fills_a_lot_up_counts_for_nothing(name: str, spoil: bool) -> None:
    plain, padded = (trained(CLIPPINGS[name], padded, spoil=spoil) for padded in (False, True))
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_lot_over_capacity_is_split_and_complete() -> None:
    examples = torch.arange(400.0)
    loader = PrivateLoader(
        DataLoader(TensorDataset(examples), batch_size=4), Poisson(400, 4), Randomness(0), None, pad_lots=True
    )
    size = loader.max_physical_batch_size
    assert size == 16  # 4 + 4 * sqrt(4), in eights
    lots = [Poisson(400, 4).draw(number, Randomness(0)).tolist() for number in range(100)]
    given: dict[int, list[float]] = {}
    for (batch,) in loader:
        assert loader.current is not None
        assert len(batch) == loader.current.count == size
        given.setdefault(loader.current.lot, []).extend(batch[: loader.current.real].tolist())
        loader.current.of.added += 1
        loader.current.of.state = State.RELEASED if loader.current.last else State.OPENED
    assert [given[number] for number in sorted(given)] == [[float(i) for i in lot] for lot in lots]
    assert any(not lot for lot in lots)  # an empty one too
    loader.max_physical_batch_size = 3
    total = 0
    for (batch,) in loader:
        assert len(batch) == 3
        total += loader.current.real  # type: ignore[union-attr, operator]
        loader.current.of.added += 1  # type: ignore[union-attr]
        if loader.current.last:  # type: ignore[union-attr]
            loader.current.of.state = State.RELEASED  # type: ignore[union-attr]
    assert total > 300


def test_capacity_is_public() -> None:
    assert FixedSize(100, 10).capacity == 10
    assert Poisson(100, 100).capacity == 100
    assert Poisson(60_000, 600).capacity == 704
    source = Randomness(5)
    larger = sum(len(Poisson(60_000, 600).draw(number, source)) > 704 for number in range(3000))
    assert larger <= 3


class Recorded:
    """A run whose clipping's state is looked at as a recording looks at it."""

    def __init__(self, make: Callable[[], Clipping]) -> None:
        torch.manual_seed(0)
        self.clipping = make()
        model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
        engine = PrivacyEngine(seed=3)
        _, self.optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), clipping=self.clipping,
            data_loader=DataLoader(TensorDataset(torch.randn(60, 5), torch.arange(60) % 3), batch_size=4),
            noise_multiplier=1.0, pad_lots=True,
        )  # fmt: skip
        self.step = TrainingStep(self.optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y))
        # Lots on which modules are tried are made ordinarily: left out here, as their numbers are not the subject.
        self.optimizer._trial.due = lambda lot: False  # type: ignore[method-assign]
        self.optimizer._step.capture.on_first_call = None
        self.batches = (batch for _ in range(3) for batch in loader)
        self._again: Any = None  # a batch on which the last step failed: it is still out

    def go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._again = self._again or next(self.batches)
            self.step(*self._again)
            self._again = None


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_steady_lot_changes_tensors_and_counters_alone(name: str) -> None:
    run = Recorded(CLIPPINGS[name])
    run.go(2)
    steady, settled = 0, False
    for _ in range(20):
        before, due = KeptState(run.clipping.objects()), run.clipping.steady()
        run.go()
        settled, complete = due, due and settled
        if complete:
            steady += 1
            values = {path: tensor.clone() for path, tensor in KeptState(run.clipping.objects()).tensors.items()}
            before.follow(KeptState(run.clipping.objects()))
            before.restore()
            count_lot(run.clipping)
            now = KeptState(run.clipping.objects()).tensors
            assert now.keys() == before.tensors.keys()
            for path, tensor in now.items():
                assert tensor is before.tensors[path]
                torch.testing.assert_close(tensor, values[path])
    assert steady >= 5


def test_a_refresh_cannot_be_replayed() -> None:
    run = Recorded(CLIPPINGS["Kronecker, probes"])
    run.go(4)
    before = KeptState(run.clipping.objects())
    assert not run.clipping.steady()
    run.go()
    with pytest.raises(CannotBeReplayedError):
        before.follow(KeptState(run.clipping.objects()))


def test_each_lot_is_charged_once_and_never_released_twice() -> None:
    run = Recorded(CLIPPINGS["flat"])
    batch = next(run.batches)
    step = run.optimizer._step
    step.charge(run.optimizer._loader.current.of)  # type: ignore[union-attr]
    run.step(*batch)  # as after a recording that failed
    run.go()
    charged: list[object] = []
    step._charge = charged.append  # type: ignore[assignment]
    run.go(3)
    assert len(charged) == 3
    assert all(isinstance(event, PoissonGaussian) for event in charged)


def test_what_stands_in_the_way_is_said() -> None:
    assert "cpu" in str(Recorded(CLIPPINGS["flat"]).step.why_not)


# ---- recordings, on a tape that a CPU can play ----------------------------------------------------------------------


class Tape:
    """Stands in for a CUDA graph. What is recorded is computed at once; a replay computes nothing, and is counted."""

    played = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.played += 1


@pytest.fixture
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr("adadp.mechanism.recording.recording_into", lambda *_: nullcontext())
    monkeypatch.setattr("adadp.mechanism.replay.keeper", Tape)
    monkeypatch.setattr("adadp.mechanism.replay._obstacle", lambda _: None)
    monkeypatch.setattr(TrainingStep, "_rehearse", TrainingStep._ordinarily)
    monkeypatch.setattr("adadp.shapes.spectrum._kept", lambda spread, _: rounded_up(spread))


def recorded(name: str, most: int = 12) -> Recorded:
    """A run that has just replayed a step."""
    run = Recorded(CLIPPINGS[name])
    for _ in range(most):
        run.go()
        if run.step.replays:
            return run
    raise AssertionError(f"nothing was replayed: {run.step.why_not}")


def by_hand(run: Recorded) -> None:
    x, y = next(run.batches)
    run.optimizer.zero_grad()
    nn.functional.cross_entropy(run.optimizer._step.capture.module(x), y).backward()
    run.optimizer.step()


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize("name", ["Kronecker, probes", "Kronecker, released", "diagonal, paid", "local"])
def test_replayed_lots_are_counted_so_that_refreshes_come_when_they_are_due(name: str) -> None:
    run = Recorded(CLIPPINGS[name])
    source = next(part for part in run.clipping.objects() if isinstance(part, Source))
    for lot in range(14):
        run.go()
        assert source.step == lot
    assert run.step.replays >= 4
    if "probes" in name:
        assert run.step.replays >= 9  # lots with a refresh too, but for one after which bounds must be wider
    elif name != "local":
        assert run.step.replays <= 10  # every fourth lot is an ordinary one


def learnt(state: KeptState) -> dict[Any, Tensor]:
    """Every number that is kept, by where it is; the weights themselves are not the clipping's."""
    kept = _walk(state._kept, (), deep=True)
    return {path: value for path, value in kept if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)}


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", ["Kronecker, probes", "diagonal, probes", "local"])
def test_a_recording_takes_over_what_a_refresh_made(
    name: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(name)
    before = run.step._recording
    assert before is not None
    read = {path: (tensor, tensor.clone()) for path, tensor in learnt(before._state).items()}
    made: list[dict[Any, Tensor]] = []
    take_over = KeptState.take_over

    def watch(self: KeptState, now: KeptState) -> bool:
        made.append({path: tensor.clone() for path, tensor in learnt(now).items()})
        return take_over(self, now)

    monkeypatch.setattr(KeptState, "take_over", watch)
    for _ in range(5):  # a refresh is among them
        by_hand(run) if elsewhere else run.go()
    counted = next(part for part in run.clipping.objects() if isinstance(part, Source)).step
    replays = run.step.replays
    run.go()
    assert run.step.replays > replays
    assert run.step._recording is before
    assert run.step.why_not is None
    assert next(part for part in run.clipping.objects() if isinstance(part, Source)).step == counted + 1
    if made:  # all that the recording reads is in its old place, with the new numbers
        now = learnt(KeptState(run.clipping.objects()))
        assert now.keys() == read.keys() == made[-1].keys()
        for path, tensor in now.items():
            assert tensor is read[path][0]
            assert torch.equal(tensor, made[-1][path])
        assert any(not torch.equal(tensor, old) for tensor, old in read.values())
    assert made or (name == "local" and not elsewhere)


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize("kind", ["cannot be taken over", "changed settings"])
def test_a_refresh_that_a_recording_cannot_use_is_followed_by_an_ordinary_lot(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("Kronecker, probes")
    source, step, charged, begun = run.clipping.source, run.optimizer._step, [], []  # type: ignore[attr-defined]
    while run.clipping.steady():
        run.go()
    step._charge = charged.append  # type: ignore[assignment]
    begin = run.clipping.begin
    monkeypatch.setattr(run.clipping, "begin", lambda *given: (begun.append(1), begin(*given)))
    lots, replays, recording = source.step, run.step.replays, run.step._recording
    if kind == "changed settings":
        run.clipping.max_grad_norm = 0.25  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(KeptState, "take_over", lambda *_: False)
    run.go()
    assert (run.step.replays, source.step, len(charged), len(begun)) == (replays, lots + 1, 1, 1)
    assert run.optimizer._loader.current.of.state is State.RELEASED  # type: ignore[union-attr]
    run.go(3)
    assert run.step.why_not is None
    assert run.step.replays > replays
    assert run.step._recording is not recording
    assert source.step == lots + 4


@pytest.mark.usefixtures("_taped")
def test_a_refresh_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded("Kronecker, probes")
    while run.clipping.steady():
        run.go()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer._step, "gradients_of", fail)
        with pytest.raises(MemoryError):
            run.go()
    assert run.optimizer._step._ready_for is None
    assert not run.optimizer._loader.current.of.sums  # type: ignore[union-attr]
    replays = run.step.replays
    run.go(6)
    assert run.step.replays > replays


@pytest.mark.usefixtures("_taped")
def test_nothing_is_replayed_of_a_shape_that_is_not_complete() -> None:
    """What Released learns after a lot has no powers before the next one needs them."""
    run = recorded("Kronecker, released")
    before = run.step._recording
    for _ in range(5):
        by_hand(run)
    run.go()
    assert run.step.replays == 1
    for _ in range(6):
        run.go()
    assert run.step.replays > 1
    assert run.step._recording is not before
    assert run.step.why_not is None


def test_a_rounded_spread_is_a_bound() -> None:
    for spread in (1.0, 1.0001, 2.0, 3.0, 1e-3, 1e200, math.inf):
        assert spread <= rounded_up(spread) <= 2 * spread
    assert math.isnan(rounded_up(math.nan))


def _wider(shape: Kronecker) -> None:
    key = next(key for key, (left, _) in shape._powers.items() if isinstance(left, LowRank))
    left, right = shape._powers[key]
    assert isinstance(left, LowRank)
    shape._powers[key] = (replace(left, spread=4 * left.spread), right)


def _other_rank(shape: Kronecker) -> None:
    name = next(iter(shape._rows))
    shape._rows[name] = spectrum_of(torch.eye(len(shape._rows[name].values) + 1), 0.1, None)


def _swapped(shape: Kronecker) -> None:
    """What is copied first would be read again."""
    one, other = (copy.copy(shape._rows[name]) for name in ("0.bias", "2.bias"))
    one.skew, other.skew = other.skew, one.skew
    shape._rows |= {"0.bias": one, "2.bias": other}


def _parted(shape: Kronecker) -> None:
    """What was one tensor in two places is two: a value for the one would become the other's too."""
    own = shape._rows["0.weight"] = copy.copy(shape._rows["0.weight"])
    assert own.basis is shape._powers["0.weight", -0.25][0].basis  # type: ignore[attr-defined]
    own.basis = own.basis + 1


def _less(shape: Kronecker) -> None:
    shape._powers.popitem()


@pytest.mark.parametrize("change", [_wider, _other_rank, _swapped, _parted, _less])
def test_what_is_more_than_numbers_is_not_taken_over(change: Callable[[Kronecker], None]) -> None:
    run = Recorded(CLIPPINGS["Kronecker, probes"])
    run.go(2)
    before = KeptState(run.clipping.objects())
    kept = {path: tensor.clone() for path, tensor in learnt(before).items()}
    change(run.clipping.shape)  # type: ignore[attr-defined]
    now = KeptState(run.clipping.objects())
    assert not before.kept_in(now)
    assert not before.take_over(now)
    assert now.kept_in(KeptState(run.clipping.objects()))
    assert all(torch.equal(tensor, kept[path]) for path, tensor in learnt(before).items())


@pytest.mark.usefixtures("_taped")
def test_a_lot_whose_recording_fails_at_the_end_is_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorded(CLIPPINGS["flat"])
    step, charged, randomness = run.optimizer._step, [], run.optimizer._step._randomness
    step._charge = charged.append  # type: ignore[assignment]
    run.go(2)

    def refuse(*_: Any) -> None:
        raise CannotBeReplayedError("on purpose")

    monkeypatch.setattr(KeptState, "follow", refuse)
    generator = randomness.generator(torch.device("cpu"))
    with pytest.warns(UserWarning, match="on purpose"):
        run.go()
    assert run.step.replays == 0
    assert len(charged) == 3
    assert run.optimizer._loader.current.of.state is State.RELEASED  # type: ignore[union-attr]
    assert randomness.generator(torch.device("cpu")) is not generator
    run.go(2)
    assert len(charged) == 5


@pytest.mark.usefixtures("_taped")
def test_an_interrupted_recording_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorded(CLIPPINGS["local"])
    while not (run.step._ordinary >= 2 and run.clipping.steady()):
        run.go()
    before = KeptState(run.clipping.objects())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptState, "follow", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.go()
    assert before.kept_in(KeptState(run.clipping.objects()))
    assert all(p.grad is None for p in run.optimizer._parameters.values())
    assert not run.optimizer._step.capture.recorded
    assert not run.optimizer._loader.current.of.sums  # type: ignore[union-attr]
    run.go()
    assert run.step.replays == 1


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize(
    "change",
    [
        lambda run: setattr(run.clipping, "max_grad_norm", 0.25),
        lambda run: setattr(run.optimizer._step, "noise_multiplier", 2.0),
        lambda run: run.optimizer._step.capture.module[1].eval(),
    ],
)
def test_what_the_user_changes_is_recorded_anew(change: Callable[[Recorded], None]) -> None:
    run = recorded("flat")
    before = run.step._recording
    run.go()
    assert run.step._recording is before
    change(run)
    run.go()
    assert run.step._recording is not before
    assert run.step.replays == 3


@pytest.mark.usefixtures("_taped")
@pytest.mark.parametrize("kind", ["nothing", "array", "object"])
def test_a_batch_that_a_replay_would_not_see_is_refused(kind: str) -> None:
    run = Recorded(CLIPPINGS["flat"])
    model, held = run.optimizer._step.capture.module, {}

    class Batch:
        pass

    def loss(*_: Any) -> Tensor:
        return nn.functional.cross_entropy(model(held["x"]), held["y"])

    step = TrainingStep(run.optimizer, loss)
    del run.optimizer._trial.due  # as it is

    def go() -> None:
        held["x"], held["y"] = next(run.batches)
        step(*{"nothing": (), "array": (held["x"].numpy(),), "object": (Batch(),)}[kind])

    with pytest.raises(PrivacyError):
        go()
    assert step.replays == 0


@pytest.mark.usefixtures("_taped")
def test_weights_that_the_loop_changes_between_replays_are_said() -> None:
    run = recorded("flat")
    run.go()
    assert "weights" not in run.optimizer._trial.untried
    with torch.no_grad():
        run.optimizer._parameters["0.weight"].add_(1.0)
    replays = run.step.replays
    run.go()
    assert run.step.replays == replays + 1
    assert any("weights or buffers were changed" in text for text in run.optimizer._ledger.untried)
