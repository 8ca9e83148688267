"""The accountants against each other, against dp-accounting, Opacus and exact arithmetic."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import simpson
from scipy.stats import norm

from adadp.accounting import gaussian, pld, renyi, theorem1
from adadp.accounting.accountants import ACCOUNTANTS, get_accountant
from adadp.accounting.composition import canonical
from adadp.accounting.curves import gdp_mu, privacy_profile, trade_off
from adadp.accounting.events import (
    FixedSizeGaussian,
    Gaussian,
    Neighbours,
    PoissonGaussian,
    RenyiBlock,
    Uncovered,
)
from adadp.errors import AccountingError, ConfigurationError

ADD_REMOVE, REPLACE_ONE = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE
PRV = json.loads((Path(__file__).parent / "references" / "prv.json").read_text())["rows"]


def epsilon(accountant: str, composition: object, delta: float, relation: Neighbours = ADD_REMOVE) -> float:
    return get_accountant(accountant).epsilon(composition, delta, relation).epsilon  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "rdp", "tight"),
    [
        (0.9, 0.01, 1800, 3.449, 3.064),
        (8, 0.01, 1520, 0.179, 0.157),
        (4, 0.01, 5000, 0.712, 0.649),
        (6, 0.04, 400, 0.525, 0.477),
    ],
)
def test_reference_values(sigma: float, rate: float, steps: int, rdp: float, tight: float) -> None:
    composition = [(PoissonGaussian(sigma, rate), steps)]
    assert round(epsilon("rdp", composition, 1e-5), 3) == rdp
    assert round(epsilon("pld", composition, 1e-5), 3) == tight


@pytest.mark.parametrize("row", PRV, ids=lambda row: f"{row['noise_multiplier']}-{row['rate']}-{row['steps']}")
def test_pld_agrees_with_opacus_prv(row: dict[str, float]) -> None:
    """PRV's interval holds the true epsilon, so a valid bound is not below it and a tight one hardly above."""
    composition = [(PoissonGaussian(row["noise_multiplier"], row["rate"]), int(row["steps"]))]
    ours = epsilon("pld", composition, row["delta"])
    assert row["epsilon_low"] <= ours <= row["epsilon_high"] * 1.001


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"), [(1.0, 0.02, 500, 1e-6), (0.7, 0.005, 3000, 1e-5), (3.0, 0.2, 100, 1e-7)]
)
def test_agrees_with_dp_accounting(sigma: float, rate: float, steps: int, delta: float) -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    for name, theirs in (("pld", PLDAccountant()), ("rdp", RdpAccountant())):
        theirs.compose(event, steps)
        ours = epsilon(name, [(PoissonGaussian(sigma, rate), steps)], delta)
        assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)


def test_mixed_compositions_agree_with_dp_accounting() -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    theirs = PLDAccountant()
    for sigma, rate, steps in ((1.0, 0.01, 700), (2.0, 0.05, 100)):
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps)
    theirs.compose(dp_accounting.GaussianDpEvent(4.0), 3)
    ours = epsilon(
        "pld",
        [(PoissonGaussian(1.0, 0.01), 700), (PoissonGaussian(2.0, 0.05), 100), (Gaussian(4.0), 3)],
        1e-5,
    )
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


# -- exact cases ------------------------------------------------------------------------------------------------


def exact_gaussian_delta(mu: float, eps: float) -> mpmath.mpf:
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(eps)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("multiple", [0.0, 0.3, 1.0, 3.0, 6.0])
def test_gaussian_delta_is_exact_and_never_too_small(mu: float, multiple: float) -> None:
    eps = mu * mu / 2 + multiple * mu if multiple else 0.0
    exact = exact_gaussian_delta(mu, eps)
    ours = gaussian.delta(mu, eps)
    assert ours >= exact
    assert ours == pytest.approx(float(exact), rel=1e-7, abs=1e-300)


@pytest.mark.parametrize("mu", [1e-5, 0.02, 0.7, 3.0, 100.0, 3333.0])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12, 1e-40])
def test_gaussian_epsilon_satisfies_delta(mu: float, delta: float) -> None:
    eps = gaussian.epsilon(mu, delta)
    assert exact_gaussian_delta(mu, eps) <= delta
    if eps > 1e-9:
        assert exact_gaussian_delta(mu, eps * (1 - 1e-6)) > delta * (1 - 1e-4)
        assert gaussian.mu_for(eps, delta) == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize(("mu", "steps", "delta"), [(1.0, 10**6, 1e-8), (5.0, 10**5, 1e-6), (0.1, 10**4, 1e-9)])
def test_pld_is_not_below_the_exact_answer(mu: float, steps: int, delta: float) -> None:
    """Unsampled steps have a closed form: the general machinery must come out above it, and near."""
    exact = gaussian.epsilon(mu, delta)
    distribution = pld.distribution(((math.sqrt(steps) / mu, 1.0, steps),), delta, 2 * exact)
    assert distribution is not None
    assert exact * (1 - 1e-9) <= distribution.epsilon(delta) <= exact * 1.02
    assert distribution.delta(exact) >= delta * (1 - 1e-9)


def exact_sampled_delta(rate: float, sigma: float, eps: float) -> float:
    """One Poisson-sampled Gaussian step, both directions, in 50 digits."""
    with mpmath.workdps(50):
        q, s, e = mpmath.mpf(rate), mpmath.mpf(sigma), mpmath.mpf(eps)

        def tail(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.ncdf(-x / s)

        x = s**2 * mpmath.log((mpmath.exp(e) - 1 + q) / q) + mpmath.mpf(1) / 2
        remove = (1 - q) * tail(x) + q * tail(x - 1) - mpmath.exp(e) * tail(x)
        add = mpmath.mpf(0)
        if e < -mpmath.log(1 - q):
            x = s**2 * mpmath.log((mpmath.exp(-e) - 1 + q) / q) + mpmath.mpf(1) / 2
            below = mpmath.ncdf(x / s)
            add = below - mpmath.exp(e) * ((1 - q) * below + q * mpmath.ncdf((x - 1) / s))
        return float(max(remove, add))


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.9])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_one_sampled_step_is_exact(rate: float, sigma: float) -> None:
    composition = [(PoissonGaussian(sigma, rate), 1)]
    eps = epsilon("pld", composition, 1e-5)
    assert exact_sampled_delta(rate, sigma, eps) <= 1e-5
    if eps > 0:
        assert exact_sampled_delta(rate, sigma, eps * 0.998) >= 1e-5


def exact_delta_of_two(first: tuple[float, float], second: tuple[float, float], at: float, remove: bool) -> float:
    """The hockey-stick divergence of two sampled steps: the second in closed form, the first by Simpson's rule."""

    def loss(x: Any, sigma: float, rate: float) -> Any:
        return np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * sigma**2))

    sigma, rate = second
    x = np.linspace(-12 * first[0], 12 * first[0] + 1, 20_001)
    losses = loss(x, *first)
    weights = norm.pdf(x, 0, first[0]) * (np.exp(losses) if remove else 1.0)
    limit = at - (losses if remove else -losses)
    inner = np.exp(limit if remove else -limit) - (1 - rate)
    cut = sigma**2 * np.log(np.maximum(inner, 1e-300) / rate) + 0.5
    if remove:
        mixed = (1 - rate) * norm.sf(cut / sigma) + rate * norm.sf((cut - 1) / sigma)
        value = np.where(inner > 0, mixed - np.exp(limit) * norm.sf(cut / sigma), 1 - np.exp(limit))
    else:
        mixed = (1 - rate) * norm.cdf(cut / sigma) + rate * norm.cdf((cut - 1) / sigma)
        value = np.where(inner > 0, norm.cdf(cut / sigma) - np.exp(limit) * mixed, 0.0)
    return float(simpson(weights * np.maximum(value, 0.0), x=x))


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
@pytest.mark.parametrize(
    ("first", "second"),
    [((0.7, 0.01), (0.7, 0.01)), ((0.5, 0.3), (0.5, 0.3)), ((2.0, 1e-3), (0.8, 0.2)), ((1.0, 0.999), (3.0, 0.5)),
     ((0.4, 0.05), (0.9, 0.3)), ((50.0, 0.9), (50.0, 0.9))],
)  # fmt: skip
def test_two_sampled_steps_are_exact(first: tuple[float, float], second: tuple[float, float], delta: float) -> None:
    value = epsilon("pld", [(PoissonGaussian(*first), 1), (PoissonGaussian(*second), 1)], delta)

    def exact(at: float) -> float:
        return max(exact_delta_of_two(first, second, at, remove) for remove in (True, False))

    assert exact(value) <= delta * (1 + 1e-6)
    assert exact(0.995 * value) > delta


@pytest.mark.parametrize("rate", [1e-12, 1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 50.0])
def test_renyi_divergences_are_not_below_the_exact_ones(rate: float, sigma: float) -> None:
    """Where the rate is small, dp-accounting's sums lose all their digits; what they may lose is added."""
    ours = dict(zip(renyi.ORDERS, renyi.divergences(PoissonGaussian(sigma, rate), ADD_REMOVE), strict=True))
    with mpmath.workdps(60):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        for order in (2, 3, 4, 5, 6, 11, 40, 63, 128, 512):
            moment = mpmath.fsum(
                mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp(k * (k - 1) / (2 * s**2))
                for k in range(order + 1)
            )
            exact = mpmath.log(moment) / (order - 1)
            assert ours[order] >= exact
            assert ours[order] <= exact * (1 + 1e-9) + 1e-12
        for order in (1.02, 2.5):  # in between, by the divergence's definition
            center, width = 0.5, 40 * s
            points = sorted({-width, 0, center, 1, order, order + width, width})
            moment = mpmath.quad(
                lambda x, order=order: (1 + q * mpmath.expm1((2 * x - 1) / (2 * s**2))) ** order * mpmath.npdf(x, 0, s),
                points,
            )
            assert ours[order] >= mpmath.log(moment) / (order - 1) - mpmath.mpf(10) ** -18


def test_next_to_nothing_is_not_an_error() -> None:
    for name in ACCOUNTANTS:
        accountant = get_accountant(name)
        assert accountant.delta([(Gaussian(1e9), 1)], 0.0).delta <= (1 if name == "theorem1" else 1e-6)
        assert accountant.delta([(PoissonGaussian(50.0, 1e-12), 1)], 1.0).delta < 1


def test_many_rare_steps_are_not_free() -> None:
    """Included once in a hundred runs, but then in plain sight."""
    composition = [(PoissonGaussian(0.3, 1e-8), 10**6)]
    one_step = exact_sampled_delta(1e-8, 0.3, 3.0)
    for name in ACCOUNTANTS:
        assert get_accountant(name).delta(composition, 3.0).delta >= one_step * 10**5
        assert epsilon(name, composition, 1e-9) > 3


@pytest.mark.parametrize("sigma", [1.0, 4.0, 10.0, 50.0])
@pytest.mark.parametrize("lot", [10, 500, 900])
def test_fixed_size_is_not_below_the_exact_bound(sigma: float, lot: int) -> None:
    """Wang et al.'s bound with its refinement 2 e^{(j-1) eps(j)}, moments in exact arithmetic, at sigma / 2."""
    event = FixedSizeGaussian(sigma, 1000, lot)
    ours = dict(zip(renyi.ORDERS, renyi.divergences(event, REPLACE_ONE), strict=True))
    rate, half = lot / 1000, sigma / 2
    moments, inverse = theorem1.log_moments(half), 1 / half**2
    for order in (2, 3, 5, 17, 40, 63):
        total = rate**2 * math.comb(order, 2) * min(4 * mpmath.expm1(inverse), 2 * mpmath.exp(inverse))
        for j in range(3, order + 1):
            root = 4 * mpmath.exp(0.5 * (moments[2 * ((j + 1) // 2)] + moments[2 * (j // 2)]))
            total += rate**j * math.comb(order, j) * min(root, 2 * mpmath.exp(j * (j - 1) / 2 * inverse))
        exact = float(mpmath.log1p(total)) / (order - 1)
        assert ours[order] >= exact * (1 - 1e-12)


def test_replace_one_doubles_the_sensitivity() -> None:
    for name in ACCOUNTANTS:
        assert epsilon(name, {Gaussian(4.0): 3}, 1e-5, REPLACE_ONE) == epsilon(name, {Gaussian(2.0): 3}, 1e-5)
    whole = FixedSizeGaussian(4.0, 50, 50)
    assert epsilon("pld", {whole: 3}, 1e-5, REPLACE_ONE) == epsilon("pld", {Gaussian(2.0): 3}, 1e-5)


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (PoissonGaussian(1.0, 0.1), REPLACE_ONE),
        (FixedSizeGaussian(1.0, 100, 10), ADD_REMOVE),
        (Uncovered("bounds from raw gradients"), ADD_REMOVE),
        (Uncovered("lot reading", PoissonGaussian(1.0, 0.1)), ADD_REMOVE),
    ],
)
def test_what_no_proof_covers_is_refused(name: str, event: object, relation: Neighbours) -> None:
    composition = [(Gaussian(1.0), 1), (event, 1)]
    with pytest.raises(AccountingError):
        get_accountant(name).epsilon(composition, 1e-5, relation)  # type: ignore[arg-type]
    with pytest.raises(AccountingError):
        get_accountant(name).delta(composition, 1.0, relation)  # type: ignore[arg-type]


def test_pld_and_theorem1_refuse_what_only_rdp_covers() -> None:
    with pytest.raises(AccountingError, match="rdp"):
        get_accountant("pld").epsilon({FixedSizeGaussian(1.0, 100, 10): 1}, 1e-5, REPLACE_ONE)
    for name in ("pld", "theorem1"):
        with pytest.raises(AccountingError, match="filter"):
            get_accountant(name).epsilon({RenyiBlock(8.0, 1.0): 1}, 1e-5)
    assert epsilon("rdp", {RenyiBlock(8.37, 1.0): 1}, 1e-5) < math.inf


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan, math.inf])
def test_bad_deltas_are_refused(name: str, delta: float) -> None:
    with pytest.raises(ConfigurationError):
        epsilon(name, {Gaussian(1.0): 1}, delta)


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_a_relation_may_be_given_by_its_name_and_no_other(name: str) -> None:
    renyi.divergences.cache_clear()
    by_name = epsilon(name, {Gaussian(1.0): 1}, 1e-5, "replace-one")  # type: ignore[arg-type]
    assert by_name == epsilon(name, {Gaussian(1.0): 1}, 1e-5, REPLACE_ONE)
    assert by_name > 2 * epsilon(name, {Gaussian(1.0): 1}, 1e-5)
    with pytest.raises(AccountingError):
        epsilon(name, {PoissonGaussian(1.0, 0.1): 1}, 1e-5, "replace-one")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="replace-one"):
        epsilon(name, {Gaussian(1.0): 1}, 1e-5, "replace")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_an_epsilon_beyond_all_measure_has_a_delta(name: str) -> None:
    spent = get_accountant(name).delta({PoissonGaussian(1.0, 0.01): 1}, 1e308)
    assert 0 < spent.delta < 1e-12


@pytest.mark.parametrize("count", [-1, 1.5, True, "3"])
def test_bad_counts_are_refused(count: object) -> None:
    with pytest.raises(ConfigurationError):
        canonical([(Gaussian(1.0), count)])  # type: ignore[list-item]


# -- structure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_nothing_released_costs_nothing(name: str) -> None:
    assert epsilon(name, [], 1e-5) == 0
    assert epsilon(name, [(Gaussian(1.0), 0)], 1e-5) == 0
    assert get_accountant(name).delta([], 0.0).delta == 0


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_order_does_not_matter(name: str) -> None:
    releases = [(PoissonGaussian(1.0, 0.01), 300), (Gaussian(5.0), 2), (PoissonGaussian(1.0, 0.02), 100)]
    releases += [(PoissonGaussian(1.0, 0.01), 200)]
    values = {epsilon(name, list(order), 1e-5) for order in itertools.permutations(releases)}
    assert len(values) == 1


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_delta_and_epsilon_are_inverse(name: str) -> None:
    composition = [(PoissonGaussian(1.0, 0.01), 1000), (Gaussian(10.0), 1)]
    accountant = get_accountant(name)
    for delta in (1e-3, 1e-6):
        eps = accountant.epsilon(composition, delta).epsilon
        assert accountant.delta(composition, eps).delta == pytest.approx(delta, rel=0.02)


SETTINGS = st.tuples(
    st.floats(0.4, 20), st.floats(1e-5, 1.0), st.integers(1, 3000), st.floats(1e-9, 1e-2), st.booleans()
)


@pytest.mark.parametrize("name", ["rdp", "theorem1"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(SETTINGS, st.floats(1.01, 3.0))
def test_monotone_in_every_argument(name: str, values: tuple[float, float, int, float, bool], factor: float) -> None:
    check_monotone(name, values, factor)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(SETTINGS, st.floats(1.05, 3.0))
def test_pld_is_monotone_in_every_argument(values: tuple[float, float, int, float, bool], factor: float) -> None:
    check_monotone("pld", values, factor)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.floats(1.05, 3.0))
def test_pld_is_monotone_in_many_places(values: tuple[float, float, int, float, bool], factor: float) -> None:
    check_monotone("pld", values, factor)


def check_monotone(name: str, values: tuple[float, float, int, float, bool], factor: float) -> None:
    """More noise and a larger delta never cost more; a larger rate, more steps and one release more never less.

    `pld` answers up to 1e-3 of itself: what it refines to depends on the question.
    """
    sigma, rate, steps, delta, other = values
    # dp-accounting bounds orders below 2 loosely, and not equally loosely everywhere.
    slack = 1 + 1e-9 if name == "theorem1" else 1.001

    def cost(sigma: float, rate: float, steps: int, delta: float, gaussians: int) -> float:
        composition = [(PoissonGaussian(sigma, rate), steps), (Gaussian(3.0), gaussians)]
        return epsilon(name, composition, delta)

    base = cost(sigma, rate, steps, delta, int(other))
    assert cost(sigma * factor, rate, steps, delta, int(other)) <= base * slack
    assert cost(sigma, rate / factor, steps, delta, int(other)) <= base * slack
    assert cost(sigma, rate, max(1, int(steps / factor)), delta, int(other)) <= base * slack
    assert cost(sigma, rate, steps, min(0.9, delta * factor), int(other)) <= base * slack
    assert cost(sigma, rate, steps, delta, int(other) + 1) * slack >= base


@settings(max_examples=8, deadline=None, derandomize=True)
@given(SETTINGS)
def test_pld_is_never_above_rdp_nor_rdp_above_theorem1(values: tuple[float, float, int, float, bool]) -> None:
    sigma, rate, steps, delta, other = values
    composition = [(PoissonGaussian(sigma, rate), steps), (Gaussian(4.0), int(other))]
    tight, middle, loose = (epsilon(name, composition, delta) for name in ("pld", "rdp", "theorem1"))
    assert tight <= middle <= loose * (1 + 1e-9)


def test_a_delta_too_small_for_a_distribution_gets_the_rdp_bound_and_says_so() -> None:
    composition = [(PoissonGaussian(1.0, 0.01), 10**5)]
    spent = get_accountant("pld").epsilon(composition, 1e-20)
    assert spent.accountant == "rdp"
    assert "rdp bound" in spent.notes[0]
    assert spent.epsilon == epsilon("rdp", composition, 1e-20)


# -- curves -----------------------------------------------------------------------------------------------------


def test_profile_falls_and_trade_off_is_a_bound() -> None:
    composition = [(PoissonGaussian(1.0, 0.01), 1000)]
    epsilons = [0.1 * index for index in range(40)]
    deltas = privacy_profile(composition, epsilons)
    assert all(later <= earlier for earlier, later in itertools.pairwise(deltas))
    for eps, delta in list(zip(epsilons, deltas, strict=True))[::10]:
        assert delta == pytest.approx(get_accountant("pld").delta(composition, eps).delta, rel=0.02, abs=1e-9)


def test_trade_off_of_a_gaussian_is_the_gaussian_trade_off() -> None:
    from scipy.stats import norm

    mu = 1.3
    epsilons = [0.01 * index for index in range(1200)]
    deltas = privacy_profile([(Gaussian(1 / mu), 1)], epsilons)
    rates = [0.01, 0.1, 0.3, 0.5, 0.9]
    for rate, missed in zip(rates, trade_off(epsilons, deltas, rates), strict=True):
        exact = norm.cdf(norm.ppf(1 - rate) - mu)
        assert missed <= exact + 1e-9
        assert missed == pytest.approx(exact, abs=1e-3)
    assert gdp_mu(epsilon("pld", [(Gaussian(1 / mu), 1)], 1e-5), 1e-5) == pytest.approx(mu, rel=1e-6)
