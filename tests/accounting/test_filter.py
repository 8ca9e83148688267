"""The privacy filter: adaptive choices, fixed price."""

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.accounting.filter import RenyiFilter, best_order
from adadp.errors import AccountingError, BudgetExhaustedError, ConfigurationError


def test_a_plain_plan_through_the_filter_costs_what_rdp_says() -> None:
    event = PoissonGaussian(4.0, 0.05)
    order = best_order(event, 1.0, 1e-5)
    filter_ = RenyiFilter(1.0, 1e-5, order)
    count = 0
    while filter_.fits(event):
        filter_.admit(event)
        count += 1
    cost = get_accountant("rdp").epsilon
    assert cost([(event, count)], 1e-5).epsilon <= 1.0
    assert cost([(event, count + count // 50 + 2)], 1e-5).epsilon > 1.0
    with pytest.raises(BudgetExhaustedError):
        filter_.admit(event)


def test_what_is_refused_is_not_charged() -> None:
    filter_ = RenyiFilter(1.0, 1e-5, 20.0)
    filter_.admit(Gaussian(10.0))
    spent = filter_.spent
    with pytest.raises(BudgetExhaustedError):
        filter_.admit(Gaussian(0.1))
    assert filter_.spent == spent
    filter_.admit(Gaussian(50.0))


def test_its_event_costs_at_most_its_budget() -> None:
    for order in (2.5, 6.0, 40.0):
        event = RenyiFilter(8.0, 1e-5, order).event
        assert 7.99 <= get_accountant("rdp").epsilon([(event, 1)], 1e-5).epsilon <= 8.0


def test_many_small_charges_add_up() -> None:
    filter_ = RenyiFilter(1.0, 1e-5, 20.0)
    for _ in range(1000):
        filter_.admit(Gaussian(1e4), 10)
    assert filter_.spent == pytest.approx(1e4 * 20.0 / 2e8, rel=1e-12)


@pytest.mark.parametrize("count", [-1, 0.5, float("nan"), True, "1"])
def test_only_whole_releases_are_admitted(count: object) -> None:
    filter_ = RenyiFilter(1.0, 1e-5, 20.0)
    for method in (filter_.fits, filter_.admit):
        with pytest.raises(ConfigurationError, match="whole number"):
            method(Gaussian(10.0), count)  # type: ignore[arg-type]
    assert filter_.spent == 0


def test_a_relation_given_by_its_name_is_that_relation() -> None:
    by_name = RenyiFilter(4.0, 1e-5, 8.0, "replace-one")  # type: ignore[arg-type]
    filter_ = RenyiFilter(4.0, 1e-5, 8.0, Neighbours.REPLACE_ONE)
    for each in (by_name, filter_):
        each.admit(Gaussian(10.0))
    assert by_name.spent == filter_.spent == pytest.approx(8.0 / 50.0)


def test_relation_and_coverage() -> None:
    filter_ = RenyiFilter(4.0, 1e-5, 8.0, Neighbours.REPLACE_ONE)
    filter_.admit(FixedSizeGaussian(4.0, 1000, 10))
    with pytest.raises(AccountingError):
        filter_.admit(PoissonGaussian(4.0, 0.01))
    with pytest.raises(AccountingError, match="raw"):
        filter_.admit(Uncovered("raw"))
    with pytest.raises(ConfigurationError):
        filter_.admit(Gaussian(9.0), -1)


@pytest.mark.parametrize(("epsilon", "delta", "order"), [(1, 1e-5, 2), (1, 1e-5, 1), (0, 1e-5, 9), (1, 0, 9)])
def test_budgets_that_leave_nothing_are_refused(epsilon: float, delta: float, order: float) -> None:
    with pytest.raises(ConfigurationError):
        RenyiFilter(epsilon, delta, order)
