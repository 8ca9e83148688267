"""A new accountant is one class and one registration: everything finds it by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from adadp import PrivacyEngine
from adadp.accounting.accountants import ACCOUNTANTS, Accountant, Spent, accountant, covering_accountant, get_accountant
from adadp.accounting.budget import Budget
from adadp.accounting.calibration import calibrate_noise, most
from adadp.accounting.composition import Canonical
from adadp.accounting.curves import privacy_profile
from adadp.accounting.events import Event, FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian
from adadp.accounting.guarantee import make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.errors import AccountingError, ConfigurationError

DELTA = 1e-5


class Unsampled(Accountant):
    """Ignores that sampling helps: every lot counts as the whole dataset. A valid bound, and a loose one."""

    def refusal(self, event: Event, neighbours: Neighbours) -> str | None:
        covered = isinstance(event, Gaussian | PoissonGaussian) and neighbours is Neighbours.ADD_REMOVE
        return None if covered else "only Poisson lots, adding or removing one"

    def bound_epsilon(self, releases: Canonical, delta: float, neighbours: Neighbours) -> Spent:
        rho = sum(count / (2 * event.noise_multiplier**2) for event, count in releases)  # type: ignore[union-attr]
        return Spent(rho + 2 * math.sqrt(rho * math.log(1 / delta)), delta, self.name)

    def bound_delta(self, releases: Canonical, epsilon: float, neighbours: Neighbours) -> Spent:
        rho = sum(count / (2 * event.noise_multiplier**2) for event, count in releases)  # type: ignore[union-attr]
        return Spent(epsilon, math.exp(-((max(epsilon - rho, 0.0)) ** 2) / (4 * rho)), self.name)


@pytest.fixture
def mine() -> Iterator[str]:
    accountant("mine")(Unsampled)
    yield "mine"
    del ACCOUNTANTS["mine"]


def private_lots(engine: PrivacyEngine, lots: int, sampling: str = "poisson") -> None:
    data = TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        sampling=sampling,
    )
    criterion = nn.CrossEntropyLoss(reduction="none")
    for _, (x, y) in zip(range(lots), loader, strict=False):
        optimizer.zero_grad()
        criterion(model(x), y).mean().backward()
        optimizer.step()


def test_the_engine_takes_it_by_name(mine: str) -> None:
    engine = PrivacyEngine(accountant=mine)
    private_lots(engine, 3)
    found = engine.guarantee(DELTA)
    assert found.accountant == mine
    wanted = get_accountant(mine).epsilon([(PoissonGaussian(4.0, 0.25), 3)], DELTA).epsilon
    assert found.require() == wanted > make_guarantee([(PoissonGaussian(4.0, 0.25), 3)], DELTA).require()


def test_what_it_does_not_cover_is_accounted_for_by_rdp_and_said(mine: str) -> None:
    engine = PrivacyEngine(accountant=mine)
    private_lots(engine, 2, sampling="fixed")
    found = engine.guarantee(DELTA)
    assert (found.accountant, found.epsilon is not None) == ("rdp", True)
    assert any("only Poisson lots" in note for note in found.notes)


def test_ledger_budget_calibration_and_curves_take_it(mine: str, tmp_path: Path) -> None:
    step = PoissonGaussian(4.0, 0.25)
    allowed = most(lambda count: [(step, count)], 2.0, DELTA, accountant=mine)
    cost = get_accountant(mine).epsilon
    assert cost([(step, allowed)], DELTA).epsilon <= 2.0 < cost([(step, allowed + 1)], DELTA).epsilon
    noise = calibrate_noise(lambda sigma: [(PoissonGaussian(sigma, 0.25), 10)], 2.0, DELTA, accountant=mine)
    assert 1.99 < noise.spent.epsilon <= 2.0
    assert privacy_profile([(step, 3)], [1.0, 2.0], accountant=mine)[0] <= 1
    ledger = Ledger(tmp_path / "own.ledger", dataset="toy")
    with ledger.start({"steps": 10**6}, budget=Budget(2.0, DELTA), accountant=mine) as run:
        run.charge(step, allowed)
    assert Ledger(tmp_path / "own.ledger").guarantee(DELTA, accountant=mine).require() <= 2.0


def test_the_command_takes_it(mine: str) -> None:
    from adadp.cli import app

    run = ["--examples", "100", "--lot", "10", "--noise-multiplier", "4", "--steps", "5", "--delta", "1e-5"]
    done = CliRunner().invoke(app, ["account", *run, "--accountant", mine, "--json"])
    assert json.loads(done.stdout)["accountant"] == mine


def test_a_proof_of_its_own_is_a_guarantee(mine: str) -> None:
    """An accountant may cover what the others do not: then there is a number from it, and none from them."""
    ACCOUNTANTS[mine].refusal = lambda event, neighbours: None  # type: ignore[method-assign]
    event = PoissonGaussian(4.0, 0.25)
    replace_one = Neighbours.REPLACE_ONE
    assert make_guarantee([(event, 1)], DELTA, accountant=mine, neighbours=replace_one).epsilon is not None
    assert make_guarantee([(event, 1)], DELTA, accountant="pld", neighbours=replace_one).epsilon is None


def test_a_name_belongs_to_one_class(mine: str) -> None:
    accountant("mine")(Unsampled)  # a cell of a notebook may run twice
    with pytest.raises(ConfigurationError, match="already"):
        accountant("pld")(Unsampled)
    with pytest.raises(ConfigurationError, match="one of pld, rdp, theorem1"):
        get_accountant("prophet")


@pytest.mark.parametrize("epsilon", [math.nan, -1.0])
def test_a_bound_that_is_no_number_is_refused(mine: str, epsilon: float) -> None:
    broken = ACCOUNTANTS[mine]
    broken.bound_epsilon = lambda releases, delta, neighbours: Spent(epsilon, delta, "mine")  # type: ignore[method-assign]
    with pytest.raises(AccountingError, match="no bound"):
        broken.epsilon([(Gaussian(1.0), 1)], DELTA)


def test_which_accountant_goes_with_a_sampling_is_known_from_what_each_covers() -> None:
    add_remove, replace_one = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE
    poisson, fixed, whole = PoissonGaussian(1.0, 0.1), FixedSizeGaussian(1.0, 100, 10), FixedSizeGaussian(1.0, 10, 10)
    assert covering_accountant([(poisson, 1)], add_remove) == "pld"
    assert covering_accountant([(poisson, 1)], add_remove, "theorem1") == "theorem1"
    assert covering_accountant([(fixed, 1)], replace_one) == "rdp"
    assert covering_accountant([(whole, 1)], replace_one) == "pld"
    with pytest.raises(AccountingError, match="use the rdp accountant"):
        get_accountant("pld").epsilon([(fixed, 1)], DELTA, replace_one)
