"""adadp.engine: one call, and what may be said afterwards."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from loop import cross_entropy, data, epoch, mlp, private, released, step, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adadp import Ellipsoid, Flat, Grouped, Local, Paid, PrivacyEngine, Probe, Raw, Released
from adadp.accounting.events import FixedSizeGaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.accounting.filter import RenyiFilter, best_order
from adadp.accounting.guarantee import make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.engine import is_private
from adadp.errors import (
    BudgetExhaustedError,
    ConfigurationError,
    LedgerError,
    NoGuaranteeError,
    PrivacyError,
    TrainingLoopError,
    UnsupportedModuleError,
)
from adadp.mechanism.optimizer import BudgetWarning, PrivateOptimizer
from adadp.sampling.loader import PrivateLoader

DELTA = 1e-5


def charged(engine: PrivacyEngine) -> dict[object, int]:
    return dict(engine._open().composition())


# ---- a loop as it is written for Opacus -----------------------------------------------------


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "adaptive", "ellipsoid", "local"])
def test_a_loop_written_for_opacus_runs(clipping: str) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_loader = DataLoader(data(), batch_size=6, shuffle=True)
    privacy_engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    before = weights(model)
    made = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
        clipping=clipping,
        poisson_sampling=True,
    )
    assert len(made) == 3
    model, optimizer, train_loader = made
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert not torch.equal(before, weights(model))
    assert sum(charged(privacy_engine).values()) == len(train_loader) == 4
    if clipping == "local":
        assert privacy_engine.guarantee(DELTA).epsilon is None
    else:
        assert privacy_engine.get_epsilon(delta=DELTA) > 0


def test_always_three_values_and_the_same_module() -> None:
    for settings in ({}, {"sampling": "fixed"}, {"sampling": "shuffle"}, {"max_physical_batch_size": 2}):
        _, model, optimizer, loader = private(given := mlp(), **settings)
        assert model is given
        assert isinstance(optimizer, PrivateOptimizer)
        assert isinstance(loader, PrivateLoader)
        assert list(model.state_dict()) == list(mlp().state_dict())


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="grad_sample_mode"):
        private(grad_sample_mode="hooks")
    with pytest.raises(TypeError, match="colour"):
        PrivacyEngine(colour="red")
    engine, model = PrivacyEngine(), mlp()
    with pytest.raises(TypeError, match="colour"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=6),
            target_epsilon=3.0,
            target_delta=DELTA,
            steps=3,
            colour="red",
        )
    assert engine.budget is None  # nothing is left of a call that failed
    assert not is_private(model)


# ---- what is refused, before anything is released -----------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffle"])
@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, "loud", None])
def test_noise_multipliers_that_are_none(sigma: object, sampling: str) -> None:
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        private(noise_multiplier=sigma, sampling=sampling)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, "tight"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "adaptive", "ellipsoid", "local"])
def test_bounds_that_are_none(bound: object, clipping: str) -> None:
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        private(max_grad_norm=bound, clipping=clipping)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clipping": "round"}, "not one of"),
        ({"clipping": 3}, "name or a Clipping"),
        ({"clipping": Flat(1.0), "max_grad_norm": 1.0}, "has its own bound"),
        ({"clipping": Grouped({"0.*": Flat(1.0)})}, "no group of the clipping matches parameter 2.weight"),
        ({"sampling": "random"}, "sampling must be one of"),
        ({"loss_reduction": "max"}, "loss_reduction"),
        ({"loss_scale": 0.0}, "loss_scale"),
        ({"loss_scale": math.nan}, "loss_scale"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
        ({"lot": 25}, "must be in 1..24"),
        ({"count": 0}, "empty"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], words: str) -> None:
    model = mlp()
    with pytest.raises(ConfigurationError, match=words):
        private(model, **settings)
    assert not is_private(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_refusal_of_the_ledger_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = PrivacyEngine(seed=3, ledger=path, dataset="d")
    private(engine=first)
    first.close()
    model = mlp()
    with pytest.raises(LedgerError, match="seed has been used"):
        private(model, PrivacyEngine(seed=3, ledger=path, dataset="d"))
    assert not is_private(model)
    assert not any(part._forward_hooks for part in model.modules())
    with pytest.raises(ConfigurationError, match="dataset"):
        private(mlp(), PrivacyEngine(ledger=tmp_path / "new"))


def test_a_module_is_private_once() -> None:
    engine, model, _, _ = private()
    with pytest.raises(ConfigurationError, match="private already"):
        private(model, PrivacyEngine())
    engine.detach(model)
    private(model, engine)


def test_a_clipping_serves_one_run() -> None:
    source = Released()
    private(clipping=Ellipsoid(source=source))
    with pytest.raises(ConfigurationError, match="serves another run"):
        private(clipping=Ellipsoid(source=source))
    with pytest.raises(ConfigurationError, match="stands for two groups"):
        Grouped({"a": (flat := Flat(1.0)), "*": flat})


def test_engine_settings() -> None:
    with pytest.raises(ConfigurationError, match="accountant"):
        PrivacyEngine(accountant="prophet")
    with pytest.raises(ConfigurationError, match="epsilon"):
        PrivacyEngine(budget=(-1.0, 1e-5))


# ---- where the guarantee is none -----------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words", "claimed"),
    [
        ({"clipping": "local"}, "raw gradients", True),
        ({"clipping": lambda: Ellipsoid(source=Raw())}, "raw gradients", True),
        ({"clipping": lambda: Grouped({"0.*": Flat(1.0), "*": Local()})}, "raw gradients", True),
        ({"sampling": "shuffle"}, "shuffled", False),
        ({"poisson_sampling": False}, "shuffled", False),
        ({"expose_raw": True}, "expose_raw", True),
    ],
)
def test_no_number_where_no_proof_covers(settings: dict[str, object], words: str, claimed: bool) -> None:
    settings = {key: value() if callable(value) else value for key, value in settings.items()}
    engine, model, optimizer, loader = private(**settings)
    step(model, optimizer, next(iter(loader)))
    guarantee = engine.guarantee(DELTA)
    assert guarantee.epsilon is None
    assert any(words in reason for reason in guarantee.reasons)
    assert (guarantee.claimed_epsilon is not None) == claimed
    with pytest.raises(NoGuaranteeError, match=words):
        engine.get_epsilon(DELTA)
    assert all(isinstance(event, Uncovered) for event in charged(engine))
    # One such release makes all of the ledger's none.
    _, other, second, more = private(mlp(1), engine)
    step(other, second, next(iter(more)))
    assert engine.guarantee(DELTA).epsilon is None


@pytest.mark.parametrize("settings", [{"clipping": "local"}, {"sampling": "shuffle"}, {"expose_raw": True}])
def test_no_budget_and_no_target_without_a_proof(settings: dict[str, object]) -> None:
    with pytest.raises(NoGuaranteeError, match="none"):
        private(engine=PrivacyEngine(budget=(1.0, DELTA)), **settings)
    model = mlp()
    with pytest.raises(NoGuaranteeError, match="none"):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=6),
            target_epsilon=3.0,
            target_delta=DELTA,
            epochs=1,
            **settings,
        )


def test_raw_counts_are_hidden() -> None:
    _, model, optimizer, loader = private()
    step(model, optimizer, next(iter(loader)))
    with pytest.raises(NoGuaranteeError, match="expose_raw"):
        _ = optimizer.raw_nonfinite


def test_raw_counts_are_shown_after_they_were_charged() -> None:
    engine, model, optimizer, loader = private(expose_raw=True, max_physical_batch_size=2, sampling="fixed")
    seen = []
    for inputs, targets in loader:
        inputs[0, 0] = math.nan
        step(model, optimizer, (inputs, targets))
        seen.append(optimizer.raw_nonfinite)
        if seen[-1]:
            assert sum(charged(engine).values()) > 0
        if len(seen) == 3:
            break
    assert seen == [0, 0, 3]
    assert engine.guarantee(DELTA).epsilon is None


# ---- what is charged -----------------------------------------------------


@pytest.mark.parametrize("physical", [None, 2])
def test_events_are_what_ran(physical: int | None) -> None:
    engine, model, optimizer, loader = private(max_physical_batch_size=physical, noise_multiplier=1.5)
    lots = set()
    for batch in loader:
        step(model, optimizer, batch)
        lots.add(loader.current.lot)
    assert charged(engine) == {PoissonGaussian(1.5, 0.25): len(lots)}
    assert len(lots) == len(loader)
    wanted = make_guarantee([(PoissonGaussian(1.5, 0.25), len(lots))], DELTA, accountant="pld").epsilon
    assert engine.get_epsilon(DELTA) == wanted


def test_an_empty_lot_is_charged_and_releases_noise() -> None:
    engine, model, optimizer, loader = private(count=24, lot=1, noise_multiplier=2.0)
    empty = False
    for _ in range(3):
        for batch in loader:
            before = weights(model)
            step(model, optimizer, batch)
            if not loader.current.real:
                empty = True
                assert not torch.equal(before, weights(model))
    assert empty
    assert sum(charged(engine).values()) == 72


def test_the_placeholder_leaves_no_trace() -> None:
    for clipping in ("flat", "ellipsoid", Local(source=Paid(every=1)), Ellipsoid(source=Paid(every=1))):
        noise = []
        for first in (0.0, 1e6):
            examples = data()
            examples.tensors[0][0] = first  # index 0 is what stands in for an empty lot
            settings = {"clipping": copy.deepcopy(clipping), "data_loader": DataLoader(examples, batch_size=1)}
            _, model, optimizer, loader = private(engine=PrivacyEngine(seed=5), **settings)
            for batch in loader:
                step(model, optimizer, batch)
                if not loader.current.real:
                    break
            assert not loader.current.real
            noise.append(released(model))
        assert torch.equal(*noise)  # the same seed draws the same lots, none of which held index 0 before


def test_fixed_lots_have_replace_one_neighbours_and_twice_the_sensitivity() -> None:
    engine, model, optimizer, loader = private(sampling="fixed", noise_multiplier=4.0)
    assert epoch(model, optimizer, loader) == 4
    guarantee = engine.guarantee(DELTA)
    assert guarantee.neighbours == Neighbours.REPLACE_ONE
    assert charged(engine) == {FixedSizeGaussian(4.0, 24, 6): 4}
    assert guarantee.epsilon > make_guarantee([(PoissonGaussian(4.0, 0.25), 4)], DELTA, accountant="rdp").epsilon
    with pytest.raises(ConfigurationError, match="one relation"):
        private(mlp(), engine)


def test_one_ledger_has_one_relation_also_when_it_is_given() -> None:
    ledger = Ledger(neighbours=Neighbours.REPLACE_ONE)
    with pytest.raises(LedgerError, match="replace-one"):
        private(engine=PrivacyEngine(ledger=ledger))
    private(engine=PrivacyEngine(ledger=ledger), sampling="fixed")


def test_asking_first_settles_nothing(tmp_path: Path) -> None:
    engine = PrivacyEngine(ledger=tmp_path / "ledger", dataset="d")
    assert engine.guarantee(DELTA).epsilon == 0
    _, model, optimizer, loader = private(engine=engine, sampling="fixed", noise_multiplier=3.0)
    epoch(model, optimizer, loader)
    engine.close()
    later = PrivacyEngine(ledger=tmp_path / "ledger", dataset="d")
    assert later.guarantee(DELTA).neighbours == Neighbours.REPLACE_ONE
    assert later.get_epsilon(DELTA) == engine.get_epsilon(DELTA)


def test_ledger_on_disk_adds_up_over_engines(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for seed in (1, 2):
        with PrivacyEngine(seed=seed, ledger=path, dataset="people") as engine:
            _, model, optimizer, loader = private(mlp(), engine, noise_multiplier=2.0)
            epoch(model, optimizer, loader)
    assert dict(Ledger(path).composition()) == {PoissonGaussian(2.0, 0.25): 8}
    with pytest.raises(LedgerError, match="people"):
        private(engine=PrivacyEngine(ledger=path, dataset="others"))


def test_nothing_is_released_after_close() -> None:
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    step(model, optimizer, next(batches))
    engine.close()
    before = weights(model)
    with pytest.raises(LedgerError, match="closed"):
        step(model, optimizer, next(batches))
    assert torch.equal(before, weights(model))
    assert sum(charged(engine).values()) == 1


def test_assumptions_say_what_is_taken_for_granted() -> None:
    engine, model, optimizer, loader = private(loss_reduction="sum", clipping=Ellipsoid(source=_probe()))
    step(model, optimizer, next(iter(loader)))
    text = str(engine.guarantee(DELTA))
    for words in ("scalar loss is a sum over examples", "row i", "settings are public", "synthetic", "cryptographic"):
        assert words in text.lower()
    seeded, model, optimizer, loader = private(engine=PrivacyEngine(seed=1))
    step(model, optimizer, next(iter(loader)))
    assert "secret" in str(seeded.guarantee(DELTA))


def _probe() -> Probe:
    return Probe(lambda count, generator: torch.randn(count, 3, generator=generator), count=8)


# ---- budgets -----------------------------------------------------


def test_a_budget_stops_before_the_step_that_exceeds_it() -> None:
    engine = PrivacyEngine(budget=(2.0, DELTA))
    _, model, optimizer, loader = private(engine=engine, noise_multiplier=2.0, steps=40)
    ran = 0
    with pytest.warns(BudgetWarning, match=r"of 40 planned steps were left out") as caught:  # noqa: PT031
        for _ in range(10):
            for batch in loader:
                before = weights(model)
                step(model, optimizer, batch)
                if loader.stopped:
                    assert torch.equal(before, weights(model))
                else:
                    ran += 1
    assert len([w for w in caught if w.category is BudgetWarning]) == 1
    assert f"{40 - ran} of 40" in str(next(w.message for w in caught if w.category is BudgetWarning))
    assert list(loader) == []
    event = PoissonGaussian(2.0, 0.25)
    assert dict(engine._open().charged()) == {event: ran}
    assert engine.get_epsilon(DELTA) <= 2.0
    # The budget is for all runs of this engine, however they are chosen: a Renyi filter keeps it.
    filtered = RenyiFilter(2.0, DELTA, best_order(event, 2.0, DELTA))
    assert filtered.fits(event, ran)
    assert not filtered.fits(event, ran + 1)


def test_one_plan_is_accounted_for_tightly() -> None:
    """Where a plan is all that a budget is for, it need not go through a filter."""
    event, steps = PoissonGaussian(2.0, 0.25), 8
    assert make_guarantee([(event, steps)], DELTA, accountant="pld").epsilon <= 2.0
    assert not RenyiFilter(2.0, DELTA, best_order(event, 2.0, DELTA)).fits(event, steps)
    engine = PrivacyEngine(budget=(2.0, DELTA))
    _, model, optimizer, loader = private(engine=engine, noise_multiplier=2.0, steps=steps)
    for _ in range(2):
        epoch(model, optimizer, loader)
    assert dict(engine._open().charged()) == {event: steps}
    with pytest.raises(LedgerError, match="plan"):
        private(engine=engine, noise_multiplier=2.0)


def test_models_of_one_engine_share_its_budget() -> None:
    engine = PrivacyEngine(budget=(2.0, DELTA))
    both = [private(mlp(seed), engine, noise_multiplier=2.0)[1:] for seed in (0, 1)]
    with pytest.warns(BudgetWarning):  # noqa: PT031
        for _ in range(4):
            for made in both:
                epoch(*made)
    steps = sum(dict(engine._open().charged()).values())
    event = PoissonGaussian(2.0, 0.25)
    assert engine.get_epsilon(DELTA) <= 2.0
    assert not RenyiFilter(2.0, DELTA, best_order(event, 2.0, DELTA)).fits(event, steps + 1)  # all of it can be used
    assert all(loader.stopped for _, _, loader in both)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_targets_are_met_closely(accountant: str, sampling: str) -> None:
    engine = PrivacyEngine(accountant=accountant)
    model = mlp()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=6),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        sampling=sampling,
    )
    for _ in range(2):
        assert epoch(model, optimizer, loader) == 4
    assert 3.0 * 0.995 <= engine.get_epsilon(DELTA) <= 3.0
    with pytest.warns(BudgetWarning):
        epoch(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) <= 3.0


def test_a_target_holds_what_the_ledger_holds_already() -> None:
    engine = PrivacyEngine()
    _, model, optimizer, loader = private(engine=engine, noise_multiplier=3.0)
    epoch(model, optimizer, loader)
    spent = engine.get_epsilon(DELTA)

    def aim(epsilon: float) -> PrivateOptimizer:
        other = mlp()
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=other,
            optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=6),
            target_epsilon=epsilon,
            target_delta=DELTA,
            steps=4,
        )
        assert epoch(other, optimizer, loader) == 4
        return optimizer

    aim(spent + 1)
    assert (spent + 1) * 0.995 <= engine.get_epsilon(DELTA) <= spent + 1
    aim(spent + 2)  # a later target is not held to an earlier one
    assert (spent + 2) * 0.995 <= engine.get_epsilon(DELTA) <= spent + 2


@pytest.mark.parametrize("settings", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": -3}])
def test_targets_need_a_plan(settings: dict[str, int]) -> None:
    model = mlp()
    with pytest.raises(ConfigurationError, match="epochs"):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=6),
            target_epsilon=3.0,
            target_delta=DELTA,
            **settings,
        )


# ---- seeds and copies -----------------------------------------------------


def run(engine: PrivacyEngine, **settings: object) -> torch.Tensor:
    _, model, optimizer, loader = private(mlp(), engine, **settings)
    epoch(model, optimizer, loader)
    return weights(model)


def test_seeds_repeat_and_their_absence_does_not() -> None:
    assert torch.equal(run(PrivacyEngine(seed=4)), run(PrivacyEngine(seed=4)))
    assert not torch.equal(run(PrivacyEngine(seed=4)), run(PrivacyEngine(seed=5)))
    assert not torch.equal(run(PrivacyEngine()), run(PrivacyEngine()))
    assert run(PrivacyEngine(secure_mode=True)).isfinite().all()
    engine = PrivacyEngine(seed=4)
    assert not torch.equal(run(engine), run(engine))  # one seed is one stream, however many models


def test_the_users_generator_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    _, model, optimizer, loader = private(model, clipping=Ellipsoid(source=_probe()))
    batch = next(iter(loader))
    torch.manual_seed(3)
    loss = cross_entropy(model(batch[0]), batch[1])  # the check of the first call runs in here
    state = torch.get_rng_state()
    loss.backward()
    optimizer.step()  # and the probes in here
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    model(batch[0])
    assert torch.equal(state, torch.get_rng_state())


def test_a_module_and_all_that_watched_it_can_go() -> None:
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    gone = weakref.ref(model)
    del engine, model, optimizer, loader
    gc.collect()
    assert gone() is None


def test_copies_are_ordinary_models(tmp_path: Path) -> None:
    _, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = mlp(3)
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    inputs, targets = data()[:]
    for other in (twin, fresh):
        assert torch.equal(other(inputs), model(inputs))
        other.zero_grad()
        cross_entropy(other(inputs), targets).backward()
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        cross_entropy(plain(inputs), targets).backward()
        assert torch.allclose(released(other), released(plain))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_errors_are_of_one_family() -> None:
    for kind in (ConfigurationError, UnsupportedModuleError, NoGuaranteeError, LedgerError, BudgetExhaustedError):
        assert issubclass(kind, PrivacyError)


def test_a_lot_that_failed_is_not_released_without_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model, optimizer, loader = private()
    batch = next(iter(loader))
    with monkeypatch.context() as broken:

        def fail(*_: object) -> None:
            raise RuntimeError("something in it")

        broken.setattr(optimizer._step.clipping, "bound", fail)
        with pytest.raises(RuntimeError, match="something"):
            step(model, optimizer, batch)
    with pytest.raises(TrainingLoopError, match="could not be worked on"):
        optimizer.step()
    assert not engine._open().composition()
    step(model, optimizer, batch)  # run again, it is a lot like any other
    assert len(engine._open().composition()) == 1


# ---- refused while training -----------------------------------------------------------------------------------------


class _Mixes(nn.Module):
    """Mixes examples from a given call on."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(3, 2), mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.mixes else x)


def test_a_refusal_before_anything_was_released_takes_no_number_away(tmp_path: Path) -> None:
    """A ledger is not spoilt by a model that was refused at its first batch: nothing was released."""
    path = tmp_path / "spent.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as engine:
        _, model, optimizer, loader = private(_Mixes(True), engine, lot=20)  # an example alone mixes with nothing
        with pytest.raises(UnsupportedModuleError):
            step(model, optimizer, next(iter(loader)))
        assert engine.guarantee(DELTA).epsilon is None  # this loop's number
    with PrivacyEngine(ledger=path, dataset="d") as engine:
        _, model, optimizer, loader = private(_Mixes(False), engine)
        epoch(model, optimizer, loader)
        assert engine.guarantee(DELTA).epsilon is not None


def test_after_a_lot_of_one_example_the_next_larger_one_is_tried() -> None:
    """An example that is alone in its lot mixes with nothing, so that lot says nothing of the model."""
    for seed in range(100):
        _, model, optimizer, loader = private(_Mixes(True), PrivacyEngine(seed=seed), lot=2)
        lots = iter(loader)
        batch = next(lots)
        if len(batch[1]) == 1:
            break
    while len(batch[1]) <= 1:
        step(model, optimizer, batch)
        batch = next(lots)
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        step(model, optimizer, batch)


def test_a_refusal_after_releases_ends_the_run_without_a_number(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as engine:
        _, model, optimizer, loader = private(_Mixes(False), engine, lot=12)
        batches = iter(loader)
        step(model, optimizer, next(batches))
        model.mixes = True
        batch = next(batches)
        with pytest.raises(UnsupportedModuleError):
            step(model, optimizer, batch)
    found = PrivacyEngine(ledger=path, dataset="d").guarantee(DELTA)
    assert found.epsilon is None
    assert any("refused while training" in reason for reason in found.reasons)


def test_a_loop_that_goes_on_after_it_was_refused_has_no_number(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as engine:
        _, model, optimizer, loader = private(engine=engine)
        batches = iter(loader)
        batch = next(batches)
        with pytest.raises(TrainingLoopError):
            next(batches)
        step(model, optimizer, batch)
    assert PrivacyEngine(ledger=path, dataset="d").guarantee(DELTA).epsilon is None


# ---- spending follows weights within a process ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["detached", "copied"])
def test_a_model_that_was_private_before_brings_what_it_cost(way: str) -> None:
    first, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    second = PrivacyEngine()
    if way == "copied":
        model = copy.deepcopy(model)
    else:
        first.detach(model)
    _, model, optimizer, loader = private(model, second)
    epoch(model, optimizer, loader)
    assert sum(charged(second).values()) == 8  # four lots each
    assert second.get_epsilon(DELTA) > first.get_epsilon(DELTA)


def test_state_of_an_optimizer_brings_what_it_cost_once() -> None:
    first, model, optimizer, loader = private(optimizer=torch.optim.Adam)
    epoch(model, optimizer, loader)
    saved, weights_then = optimizer.state_dict(), model.state_dict()
    second, model, optimizer, loader = private(optimizer=torch.optim.Adam)
    model.load_state_dict(weights_then)
    for _ in range(2):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
    epoch(model, optimizer, loader)
    assert sum(charged(second).values()) == 8
    assert second.get_epsilon(DELTA) > first.get_epsilon(DELTA)


def test_a_model_whose_cost_cannot_be_joined_is_left_as_it_was() -> None:
    """Its earlier run protects against another kind of neighbour: refused, and nothing goes on watching it."""
    first, model, optimizer, loader = private(sampling="fixed")
    epoch(model, optimizer, loader)
    first.detach(model)
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(LedgerError):
        private(model, PrivacyEngine())
    assert len(model._forward_pre_hooks) == hooks
    assert not is_private(model)
