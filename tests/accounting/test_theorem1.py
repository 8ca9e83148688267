"""Theorem 1 against its formula in 60-digit arithmetic."""

import math

import mpmath
import pytest

from adadp.accounting import theorem1
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import PoissonGaussian


def exact_divergences(rate: float, sigma: float, orders: list[int]) -> list[mpmath.mpf]:
    """The printed formula, letter by letter, with digits to spare for the cancellation in B(l)."""
    with mpmath.workdps(60 + 200):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        powers = [mpmath.exp((i - 1) * i / (2 * s**2)) for i in range(65)]

        def moment(length: int) -> mpmath.mpf:
            return mpmath.fsum((-1) ** i * mpmath.binomial(length, i) * powers[i] for i in range(length + 1))

        moments = {length: moment(length) for length in range(2, 65, 2)}
        e = mpmath.exp(1 / s**2)
        values = []
        for order in orders:
            total = 1 + q**2 * mpmath.binomial(order, 2) * min(4 * (e - 1), 2 * e)
            for j in range(3, order + 1):
                root = mpmath.sqrt(moments[2 * math.ceil(j / 2)] * moments[2 * math.floor(j / 2)])
                total += 4 * q**j * mpmath.binomial(order, j) * root
            values.append(mpmath.log(total) / (order - 1))
        return values


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.9, 1.2, 2.0, 4.0, 8.0, 50.0])
@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.01, 0.3, 1.0])
def test_every_order_is_exact_and_not_below(rate: float, sigma: float) -> None:
    orders = [2, 3, 4, 7, 16, 33, 63, 64]
    for order, exact in zip(orders, exact_divergences(rate, sigma, orders), strict=True):
        ours = theorem1.renyi_divergence(rate, sigma, order)
        assert ours == pytest.approx(float(exact), rel=1e-12)
        assert ours >= float(exact) * (1 - 1e-14)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "expected", "order"),
    [(0.9, 0.01, 1800, 6.921, 4), (8, 0.01, 1520, 0.482, 49), (4, 0.01, 5000, 1.806, 14), (6, 0.04, 400, 1.362, 18)],
)
def test_reference_values(sigma: float, rate: float, steps: int, expected: float, order: int) -> None:
    spent = get_accountant("theorem1").epsilon([(PoissonGaussian(sigma, rate), steps)], 1e-5)
    assert round(spent.epsilon, 3) == expected
    assert spent.order == order
    assert "sigma / 2" in spent.notes[0]


def test_the_papers_worked_example_is_the_poisson_bound_with_the_classic_conversion() -> None:
    """(4.0, alpha=6) in the paper does not follow from its Theorem 1; this is where it comes from."""
    sigma, rate, steps, order = 0.9, 0.01, 1800, 6
    moment = sum(
        math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp(k * (k - 1) / (2 * sigma**2))
        for k in range(order + 1)
    )
    epsilon = (steps * math.log(moment) + math.log(1e5)) / (order - 1)
    assert round(epsilon, 3) == 4.015


@pytest.mark.parametrize("sigma", [1e-3, 0.05, 1e5, 1e6, 1e9])
def test_extreme_noise_gives_a_bound_and_no_overflow(sigma: float) -> None:
    values = theorem1.renyi_divergences(0.01, sigma)
    assert all(value >= 0 and not math.isnan(value) for value in values)


def test_noise_beyond_any_number_is_infinitely_bad() -> None:
    assert theorem1.log_moments(1e-12)[64] == math.inf
