"""Calibration lands under its target, and close."""

import math

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.calibration import calibrate_noise, most
from adadp.accounting.events import FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian
from adadp.errors import ConfigurationError


@pytest.mark.parametrize(
    ("accountant", "rate", "steps", "epsilon", "delta"),
    [
        ("pld", 0.04, 400, 0.5, 1e-5),
        ("pld", 0.01, 1500, 8.0, 1e-6),
        ("rdp", 0.01, 1000, 1.0, 1e-5),
        ("rdp", 0.5, 10, 100.0, 1e-5),
        ("theorem1", 0.01, 1800, 2.0, 1e-5),
        ("pld", 1.0, 100, 1.0, 1e-5),
    ],
)
def test_noise_is_tight(accountant: str, rate: float, steps: int, epsilon: float, delta: float) -> None:
    found = calibrate_noise(lambda s: [(PoissonGaussian(s, rate), steps)], epsilon, delta, accountant=accountant)
    again = get_accountant(accountant).epsilon([(PoissonGaussian(found.noise_multiplier, rate), steps)], delta)
    assert again == found.spent
    assert 0.995 * epsilon <= found.spent.epsilon <= epsilon


def test_a_whole_pipeline_shares_one_budget() -> None:
    others = [(Gaussian(16.0), 1), (PoissonGaussian(8.0, 0.04), 50)]
    found = calibrate_noise(lambda s: [(PoissonGaussian(s, 0.04), 400), *others], 1.0, 1e-5)
    alone = calibrate_noise(lambda s: [(PoissonGaussian(s, 0.04), 400)], 1.0, 1e-5)
    assert 0.995 <= found.spent.epsilon <= 1.0
    assert found.noise_multiplier > alone.noise_multiplier


@pytest.mark.parametrize("epsilon", [1e-12, 1e-9, 1e-6])
def test_next_to_no_epsilon_is_found_soon(epsilon: float) -> None:
    asked = []

    def make(sigma: float) -> list[tuple[Gaussian, int]]:
        asked.append(sigma)
        return [(Gaussian(sigma), 10)]

    found = calibrate_noise(make, epsilon, 1e-5)
    assert found.spent.epsilon <= epsilon
    assert len(asked) < 150
    # A noise 0.5% smaller costs more than that.
    assert get_accountant("pld").epsilon([(Gaussian(0.995 * found.noise_multiplier), 10)], 1e-5).epsilon > epsilon


def test_lots_of_a_fixed_size() -> None:
    found = calibrate_noise(
        lambda s: [(FixedSizeGaussian(s, 10000, 100), 500)],
        2.0,
        1e-5,
        accountant="rdp",
        neighbours=Neighbours.REPLACE_ONE,
    )
    assert 1.99 <= found.spent.epsilon <= 2.0


def test_fixed_releases_that_cost_too_much_are_named() -> None:
    with pytest.raises(ConfigurationError, match="no noise multiplier reaches"):
        calibrate_noise(lambda s: [(PoissonGaussian(s, 0.01), 100), (Gaussian(0.5), 1)], 1.0, 1e-5)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_bad_targets_are_refused(epsilon: float) -> None:
    with pytest.raises(ConfigurationError):
        calibrate_noise(lambda s: [(Gaussian(s), 1)], epsilon, 1e-5)
    with pytest.raises(ConfigurationError):
        most(lambda n: [(Gaussian(1.0), n)], epsilon, 1e-5)


@pytest.mark.parametrize(("accountant", "guess"), [("pld", 1), ("rdp", 1), ("rdp", 10**7), ("theorem1", 500)])
def test_most_steps_are_the_most(accountant: str, guess: int) -> None:
    def steps(count: int) -> list[tuple[PoissonGaussian, int]]:
        return [(PoissonGaussian(4.0, 0.05), count)]

    count = most(steps, 1.0, 1e-5, accountant=accountant, guess=guess)
    spent = get_accountant(accountant)
    assert spent.epsilon(steps(count), 1e-5).epsilon <= 1.0 < spent.epsilon(steps(count + 1), 1e-5).epsilon


def test_largest_lot() -> None:
    def lots(lot: int) -> list[tuple[PoissonGaussian, int]]:
        return [(PoissonGaussian(1.0, lot / 5000), 200)]

    lot = most(lots, 2.0, 1e-5, accountant="rdp", at_most=5000)
    spent = get_accountant("rdp")
    assert spent.epsilon(lots(lot), 1e-5).epsilon <= 2.0 < spent.epsilon(lots(lot + 1), 1e-5).epsilon


def test_most_knows_its_ends() -> None:
    assert most(lambda n: [(Gaussian(0.1), n)], 1.0, 1e-5) == 0
    assert most(lambda n: [(Gaussian(1e5), n)], 1.0, 1e-5, at_most=77) == 77
    assert most(lambda n: [(Gaussian(1e5), n)], 1.0, 1e-5, at_most=0) == 0
