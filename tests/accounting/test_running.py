"""Epsilon at every step: never below the exact one of what was charged, less than 1% above it, and quick."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.accounting.accountants import get_accountant
from adadp.accounting.composition import canonical
from adadp.accounting.events import Event, Gaussian, Neighbours, PoissonGaussian
from adadp.accounting.running import IN_A_LOOP, NOTE, RunningEpsilon

ADD = Neighbours.ADD_REMOVE
PLD = get_accountant("pld")
EARLIER: list[tuple[Event, int]] = [(Gaussian(8.0), 1), (PoissonGaussian(3.0, 0.02), 200)]


@pytest.mark.parametrize(
    ("sigma", "rate", "delta", "earlier"),
    [
        (1.0, 0.01, 1e-5, []),
        (0.7, 0.05, 1e-6, EARLIER),
        (4.0, 0.3, 1e-5, []),
        (2.0, 0.001, 1e-7, []),
    ],
)
def test_it_is_never_below_the_exact_one_and_less_than_1_percent_above(
    sigma: float, rate: float, delta: float, earlier: list[tuple[Event, int]]
) -> None:
    running, step = RunningEpsilon(), PoissonGaussian(sigma, rate)
    found, last = 0.0, 0.0
    looked_at = {1, 2, 3, 32, 33, 34, 35, 64, 90, 250}
    for number in range(1, 251):
        spent = running.epsilon(PLD, canonical([(step, number), *earlier]), delta, ADD)
        found = spent.epsilon
        assert number == 1 or spent.notes == (NOTE,)
        assert found >= last or number == 2, "it does not fall"
        last = found
        if number in looked_at:
            exact = PLD.epsilon([(step, number), *earlier], delta).epsilon
            assert exact <= found <= 1.01 * exact, number
    assert running.epsilon(PLD, canonical([(step, 250), *earlier]), delta, ADD).epsilon == exact, "asked twice"
    assert found > exact


def test_what_is_no_loop_is_exact() -> None:
    running, step, other = RunningEpsilon(), PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)

    def asked(*releases: tuple[Event, int], delta: float = 1e-5, name: str = "pld") -> bool:
        accountant = get_accountant(name)
        spent = running.epsilon(accountant, canonical(releases), delta, ADD)
        exact = accountant.epsilon(releases, delta).epsilon
        assert spent.epsilon >= exact
        return spent.epsilon == exact

    assert asked((step, 10))
    assert asked((step, 11 + IN_A_LOOP))
    assert asked((step, 12), (other, 4)), "fewer of one kind"
    assert not asked((step, 13), (other, 4))
    assert asked((step, 14), (other, 4), delta=1e-6), "another delta"
    assert asked((step, 14), (other, 5)), "two kinds at once"
    assert asked((step, 15), (other, 5), name="rdp")
    assert asked((Gaussian(3.0), 1)), "something else"
    assert asked((Gaussian(3.0), 2))


def test_many_steps_between_two_answers() -> None:
    """Anchors are moved, and replaced beyond the horizon."""
    running, step = RunningEpsilon(), PoissonGaussian(1.0, 0.01)
    for number in (900, 950, 1100, 1101, 1290, *range(1400, 5200, 190)):
        found = running.epsilon(PLD, canonical([(step, number)]), 1e-5, ADD).epsilon
    exact = PLD.epsilon([(step, number)], 1e-5).epsilon
    assert exact < found <= 1.01 * exact


def test_an_engine_prints_it_at_every_step() -> None:
    examples = TensorDataset(torch.randn(1000, 4), torch.randint(0, 2, (1000,)))
    model = torch.nn.Linear(4, 2)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(examples, batch_size=10), noise_multiplier=1.0,
    )  # fmt: skip
    asked, seconds = [], 0.0
    for inputs, labels in loader:
        optimizer.zero_grad()
        optimizer.backward(torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
        optimizer.step()
        start = time.perf_counter()
        asked.append(engine.get_epsilon(1e-5))
        if len(asked) > 20:
            seconds += time.perf_counter() - start
    assert asked == sorted(asked)
    start = time.perf_counter()
    exact = get_accountant("pld").epsilon([(PoissonGaussian(1.0, 0.01), len(asked) + 1)], 1e-5).epsilon
    alone = time.perf_counter() - start
    assert seconds / (len(asked) - 20) < alone / 10, "a fraction of composing anew"
    assert asked[-1] < exact * 1.01
    found = engine.guarantee(1e-5)
    assert found.epsilon == get_accountant("pld").epsilon([(PoissonGaussian(1.0, 0.01), len(asked))], 1e-5).epsilon
    assert NOTE not in found.notes
