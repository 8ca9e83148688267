"""AGD: what a lot releases, and that no more is released than was admitted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Gaussian, PoissonGaussian, RenyiBlock
from adadp.accounting.filter import RenyiFilter
from adadp.accounting.guarantee import make_guarantee
from adadp.algorithms import Task, create
from adadp.algorithms.agd import LineSearch
from adadp.algorithms.search import SearchStep
from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import BudgetWarning

STEPS, DELTA = 30, 1e-5
torch.manual_seed(0)
CENTRES = torch.randn(3, 5)
LABELS = torch.randint(3, (400,))
INPUTS = CENTRES[LABELS] + 0.5 * torch.randn(400, 5)


def made_private(noise_multiplier: float = 2.0, seed: int = 0, steps: int = STEPS, **settings: object):
    torch.manual_seed(0)
    made = create("agd", None, settings)
    model = nn.Linear(5, 3)
    line = made.optimizer(model.parameters())
    assert isinstance(line, LineSearch)
    engine = PrivacyEngine(seed=seed, accountant="rdp")
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=100)
    model, optimizer, lots = made.make_private(
        engine, module=model, optimizer=line, data_loader=loader, noise_multiplier=noise_multiplier,
        task=Task(100, steps, delta=DELTA),
    )  # fmt: skip
    return made, engine, model, optimizer, lots, line


def train(steps: int, **settings: object):
    made, engine, model, optimizer, lots, line = made_private(steps=steps, **settings)

    def until_the_filter_is_full() -> int:
        done = 0
        while not lots.stopped:
            for batch, targets in lots:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), targets).backward()
                made.see(optimizer, model, batch, targets)
                optimizer.step()
                done += not lots.stopped
        return done

    with pytest.warns(BudgetWarning):
        done = until_the_filter_is_full()
    return engine, model, line.search, done


def test_it_learns_and_its_epsilon_is_that_of_the_planned_lots() -> None:
    engine, model, _, done = train(STEPS)
    assert 0 < done <= STEPS
    accuracy = float((model(INPUTS).argmax(1) == LABELS).float().mean())
    assert accuracy > 0.8
    planned = get_accountant("rdp").epsilon([(PoissonGaussian(2.0, 0.25), STEPS)], DELTA).epsilon
    found = engine.guarantee(DELTA)
    assert found.epsilon == pytest.approx(planned, rel=1e-9)
    assert any("filter" in text for text in found.assumptions)
    assert [type(event) for event, _ in engine._open().composition()] == [RenyiBlock]


def test_without_growth_every_planned_lot_runs() -> None:
    *_, search, done = train(12, redraws=0, objective_bound=1e-9, growth=1e-9)
    assert done in (11, 12)
    assert search is not None


def test_growth_ends_training_sooner() -> None:
    # Objectives that are all noise let step 0 win often, and each time the gradient's budget grows.
    *_, search, done = train(60, objective_bound=1e-9, growth=0.5, seed=3)
    assert search._level > 0
    assert done < 60


def test_the_information_of_a_lots_dearest_course_is_that_of_its_event() -> None:
    *_, line = made_private()
    search = line.search
    assert isinstance(search, SearchStep)
    for level in (0, 1, 7):
        search._level = level
        rules = search.rules
        gradient = search._information()
        total = gradient + rules.growth * gradient  # a release and one redraw
        total += (rules.redraws + 1) * search._objective_information()
        assert rules.redraws == 1
        assert total == pytest.approx(1 / search.lot_event().noise_multiplier ** 2, rel=1e-12)


@pytest.mark.parametrize("objective", ["improvement", "loss"])
def test_objectives_are_bounded_and_noised(objective: str) -> None:
    _, _, model, _, lots, line = made_private(objective=objective, objective_bound=0.5, candidates=4, redraws=0)
    search = line.search
    drawn = []
    kept = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    wild = torch.tensor([[0.0, 0, 0], [1e9, math.nan, math.inf], [-1e9, 0, 0], [math.inf, -math.inf, 1e-9]])
    next(iter(lots))
    search._microbatch = replace(lots.current, count=3, real=3)
    for _ in range(4000):
        search._kept, search._looks = kept, 0
        drawn.append(search.objectives(wild))
    values = torch.stack(drawn)
    if objective == "improvement":
        assert values[:, 0].eq(0).all()
        values = values[:, 1:]
    scale = 0.5 * math.sqrt(values.shape[1]) / math.sqrt(search._objective_information())
    assert values.std(0).tolist() == pytest.approx([scale] * values.shape[1], rel=0.06)
    assert values.mean(0).abs().max() < 3 * 0.5 + 5 * scale / math.sqrt(4000)


def test_no_more_looks_than_were_charged_for() -> None:
    *_, line = made_private()
    with pytest.raises(RuntimeError, match="charged"):
        line.search.objectives(torch.zeros(5, 3))
    line.search._redraws = 1
    with pytest.raises(RuntimeError, match="charged"):
        line.search.redraw({})


def test_redraws_average_to_the_noise_of_their_information() -> None:
    *_, line = made_private()
    search = line.search
    zeros = {name: torch.zeros(40_000) for name in ("weight",)}
    search.clipping.parameters = zeros
    search._kept, search._looks = zeros, 1
    before = search._information()
    stddev = search.clipping.stddev(1 / math.sqrt(before))["weight"]
    first = {"weight": stddev * torch.randn(40_000) / search.expected_lot}
    averaged = search.redraw(first)["weight"] * search.expected_lot
    wanted = search.clipping.max_grad_norm / math.sqrt(before * (1 + search.rules.growth))
    assert float(averaged.std()) == pytest.approx(wanted, rel=0.02)
    assert search._information() == pytest.approx(before * (1 + search.rules.growth))


def test_a_filter_for_releases_beside_others() -> None:
    event, beside = PoissonGaussian(3.0, 0.01), [(Gaussian(10.0), 1)]
    filter = RenyiFilter.for_releases(event, 500, DELTA, beside=beside)
    filter.admit(event, 500)
    assert not filter.fits(event)
    found = make_guarantee([*beside, (filter.event, 1)], DELTA, accountant="rdp").epsilon
    assert found == pytest.approx(get_accountant("rdp").epsilon([*beside, (event, 500)], DELTA).epsilon, rel=1e-9)


def test_what_it_cannot_do_is_refused() -> None:
    made = create("agd")
    model = nn.Linear(5, 3)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=100)
    given = {"module": model, "data_loader": loader, "noise_multiplier": 1.0, "task": Task(100, 5, delta=DELTA)}
    with pytest.raises(ConfigurationError, match="its own optimizer"):
        made.make_private(PrivacyEngine(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0), **given)
    line = made.optimizer(model.parameters())
    with pytest.raises(ConfigurationError, match="microbatch"):
        made.make_private(PrivacyEngine(), optimizer=line, max_physical_batch_size=10, **given)
    with pytest.raises(ConfigurationError, match="microbatch"):  # a lot over capacity would come in parts
        made.make_private(PrivacyEngine(), optimizer=line, pad_lots=True, **given)
    with pytest.raises(ConfigurationError, match="candidates"):
        create("agd", None, {"candidates": 1}).make_private(PrivacyEngine(), optimizer=line, **given)
    with pytest.raises(ConfigurationError, match="see its lot"):
        line.step()


def test_its_filter_is_for_poisson_lots_alone() -> None:
    made = create("agd")
    model = nn.Linear(5, 3)
    with pytest.raises(ConfigurationError, match="Poisson"):
        made.make_private(
            PrivacyEngine(accountant="rdp"),
            module=model,
            optimizer=made.optimizer(model.parameters()),
            data_loader=DataLoader(TensorDataset(INPUTS, LABELS), batch_size=100),
            noise_multiplier=2.0,
            task=Task(100, STEPS, delta=DELTA),
            sampling="fixed",
        )
