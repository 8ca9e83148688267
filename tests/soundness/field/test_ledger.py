"""Spending follows weights, and what a number rests on follows the number."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, Ledger, PrivacyEngine, Public
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import PoissonGaussian
from adadp.errors import LedgerError, PrivacyError
from soundness.field.stand import DELTA, World, check_unseen, compare, names, run
from soundness.field.test_randomness import in_child

ROWS, LOT = 60, 10


def data(rows: int = ROWS) -> TensorDataset:
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def private(engine: PrivacyEngine, rows: int = ROWS, **settings: Any) -> tuple[Any, Any, Any]:
    model = nn.Linear(6, 2)
    settings.setdefault("noise_multiplier", 1.0)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(data(rows), batch_size=LOT),
        **settings,
    )


def train(model: Any, optimizer: Any, loader: Any, epochs: int = 1, by_example: bool = False) -> int:
    steps = 0
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            if by_example:
                optimizer.backward(functional.cross_entropy(model(inputs), targets, reduction="none"))
            else:
                functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
    return steps


def of_steps(count: int) -> float:
    return get_accountant("pld").epsilon([(PoissonGaussian(1.0, LOT / ROWS), count)], DELTA).epsilon


# ---- resuming -----------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """torch.save and torch.load as they are by default: nothing but tensors and plain values comes back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def first_session(epochs: int = 3) -> tuple[dict[str, Any], int]:
    model, optimizer, loader = private(PrivacyEngine())
    steps = train(model, optimizer, loader, epochs)
    return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), steps


def test_a_run_that_is_resumed_costs_what_both_cost() -> None:
    """The commonest checkpoint there is: {"model": ..., "optimizer": ...}."""
    checkpoint, before = first_session()
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    after = train(model, optimizer, loader)
    guarantee = engine.guarantee(DELTA)
    assert guarantee.epsilon is None or guarantee.epsilon >= of_steps(before + after) * (1 - 1e-6)


def test_a_resumed_run_costs_no_more_than_both() -> None:
    checkpoint, before = first_session()
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    for _ in range(2):  # the same spending is joined, not added
        optimizer.load_state_dict(checkpoint["optimizer"])
    after = train(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) == pytest.approx(of_steps(before + after), rel=1e-3)


def test_going_back_to_an_earlier_checkpoint_of_the_same_run_costs_nothing_more() -> None:
    """The best of several epochs is loaded again at the end."""
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    steps = train(model, optimizer, loader)
    best = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps += train(model, optimizer, loader)
    model.load_state_dict(best["model"])
    optimizer.load_state_dict(best["optimizer"])
    assert engine.get_epsilon(DELTA) == pytest.approx(of_steps(steps), rel=1e-3)


def test_what_was_resumed_is_saved_on() -> None:
    """A third session knows of the first."""
    checkpoint, steps = first_session()
    for _ in range(2):
        engine = PrivacyEngine()
        model, optimizer, loader = private(engine)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        steps += train(model, optimizer, loader)
        checkpoint = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert engine.get_epsilon(DELTA) == pytest.approx(of_steps(steps), rel=1e-3)


def test_the_state_still_fits_a_plain_optimizer() -> None:
    """Leaving privacy behind is the user's to decide: torch.optim takes the state."""
    checkpoint, _ = first_session(1)
    plain = torch.optim.Adam(nn.Linear(6, 2).parameters())
    plain.load_state_dict(checkpoint["optimizer"])
    assert plain.state


def test_the_wrapped_optimizers_own_state_is_taken() -> None:
    """A checkpoint from before make_private, or of a schedule's warm-up without data."""
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    optimizer.load_state_dict(torch.optim.Adam(nn.Linear(6, 2).parameters(), lr=0.5).state_dict())
    train(model, optimizer, loader)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert engine.guarantee(DELTA).epsilon is not None


def test_weights_alone_carry_nothing_and_the_guarantee_says_so() -> None:
    checkpoint, _ = first_session(1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    model.load_state_dict(checkpoint["model"])
    train(model, optimizer, loader)
    guarantee = engine.guarantee(DELTA)
    about_the_start = re.compile(
        r"weights\b.*\b(start|began|initial|before|loaded|earlier)|"
        r"\b(start|began|initial|before|loaded|earlier).*\bweights"
    )
    assert guarantee.epsilon is None or any(about_the_start.search(text) for text in guarantee.assumptions)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def warm_started(targets: Tensor, inputs: Tensor) -> nn.Module:
    """Fifty steps without privacy on the same rows, 'to get started'."""
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(50):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


def show_the_weights(world: World) -> None:
    """What the run starts from is in what it ends with."""
    world.also(1e6 * float(sum(parameter.square().sum() for parameter in world.model.parameters())))


def test_weights_that_were_trained_before_without_privacy() -> None:
    inputs, targets = data().tensors
    inputs = inputs.clone()
    inputs[-1] *= 10

    def case(**given: Any) -> Any:
        worlds = [
            run(
                TensorDataset(inputs[:count], targets[:count]),
                lambda count=count: warm_started(targets[:count], inputs[:count]),
                cross_entropy,
                before=show_the_weights,
                **given,
            )
            for count in (ROWS, ROWS - 1)
        ]
        return compare(*worlds)

    check_unseen("weights", case)


def test_fresh_and_pretrained_weights_are_not_suspected() -> None:
    """What was only initialised, or loaded from a file of public weights, is as ordinary as can be."""
    state = nn.Linear(6, 2).state_dict()

    def loaded() -> nn.Module:
        model = nn.Linear(6, 2)
        nn.init.zeros_(model.bias)
        model.load_state_dict(state)
        return model

    for make in (lambda: nn.Linear(6, 2), loaded):
        world = run(data(), make, cross_entropy)
        assert world.error is None, world.error
        assert not names("weights", world.engine.guarantee(DELTA).untried)


# ---- one ledger ---------------------------------------------------------------------------------------------------


def say(engine: PrivacyEngine) -> str:
    return str(engine.guarantee(DELTA))


def test_assumptions_of_every_run_are_in_every_guarantee(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    shaped = Ellipsoid(1.0, source=Public([torch.randn(8, 6)], count=8, loss=lambda outputs, _: outputs.sum()))
    with PrivacyEngine(ledger=path, dataset="d", seed=0) as first:
        train(*private(first, clipping=shaped))
        said = first.guarantee(DELTA).assumptions
    about_seed = next(text for text in said if "seed" in text)
    about_shapes = next(text for text in said if "public" in text and "shape" in text)
    with PrivacyEngine(ledger=path, dataset="d") as second:
        train(*private(second))
        assert about_seed in second.guarantee(DELTA).assumptions
        assert about_shapes in second.guarantee(DELTA).assumptions
    opened = PrivacyEngine(ledger=path, dataset="d").guarantee(DELTA)
    assert {about_seed, about_shapes, *said} <= set(opened.assumptions)
    assert about_seed in str(opened) or about_seed[1:] in str(opened)


def test_what_was_untried_is_in_every_guarantee(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PrivacyEngine(ledger=path, dataset="d") as first:
            train(*private(first))
    with PrivacyEngine(ledger=path, dataset="d") as second:
        train(*private(second), by_example=True)
        assert names("loss", second.guarantee(DELTA).untried)
    with PrivacyEngine(ledger=path, dataset="d", strict=True) as strict:
        assert strict.guarantee(DELTA).epsilon is None


def test_reasons_of_every_run_are_in_every_guarantee(tmp_path: Path) -> None:
    """A loop that looked ahead yesterday has no number today either."""
    path = tmp_path / "ledger.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as first:
        made = private(first)
        train(*made)
        with pytest.raises(PrivacyError):
            list(made[2])
        reasons = first.guarantee(DELTA).reasons
        assert reasons
    with PrivacyEngine(ledger=path, dataset="d") as second:
        train(*private(second))
        assert set(reasons) <= set(second.guarantee(DELTA).reasons)


@pytest.mark.parametrize("settings", [{"sampling": "shuffle"}, {"expose_raw": True}], ids=["shuffle", "expose_raw"])
def test_releases_without_a_proof_stay_so(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as first:
        train(*private(first, **settings))
    with PrivacyEngine(ledger=path, dataset="d") as second:
        train(*private(second))
        assert second.guarantee(DELTA).epsilon is None


def test_one_ledger_serves_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    def work() -> float:
        with PrivacyEngine(ledger=Ledger(path, dataset="d", wait=0.5)) as engine:
            train(*private(engine))
            return engine.get_epsilon(DELTA)

    with PrivacyEngine(ledger=path, dataset="d") as here:
        train(*private(here))
        assert isinstance(in_child(work), PrivacyError)
        spent = here.get_epsilon(DELTA)
    assert in_child(work) > spent


def test_a_ledger_of_another_dataset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with PrivacyEngine(ledger=path, dataset="d") as first:
        train(*private(first))
    with pytest.raises(LedgerError):
        train(*private(PrivacyEngine(ledger=path, dataset="another")))


def test_a_declared_name_stands_for_the_data_whatever_its_size(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for rows in (ROWS, 10 * ROWS):
        with PrivacyEngine(ledger=path, dataset="d") as engine:
            train(*private(engine, rows))
            found = engine.get_epsilon(DELTA)
    assert found > of_steps(ROWS // LOT)


def test_one_engine_adds_up_what_it_made_private() -> None:
    engine = PrivacyEngine()
    train(*private(engine))
    train(*private(engine, 2 * ROWS))
    guarantee = engine.guarantee(DELTA)
    assert guarantee.epsilon is not None
    assert guarantee.epsilon > of_steps(ROWS // LOT)
    assert guarantee.sampling.count("Poisson") == 2


def test_a_budget_is_kept_over_several_models() -> None:
    engine = PrivacyEngine(budget=(3.0, DELTA))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            train(*private(engine))
    assert 0 < engine.get_epsilon(DELTA) <= 3.0


def test_engines_without_a_ledger_speak_for_themselves() -> None:
    found = []
    for _ in range(2):
        engine = PrivacyEngine()
        train(*private(engine))
        found.append(engine.get_epsilon(DELTA))
    assert found == pytest.approx([of_steps(ROWS // LOT)] * 2, rel=1e-3)
