"""A budget shared by runs that are chosen one after the other."""

import json
import random
import shutil
from pathlib import Path

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.chain import Chain, Record
from adadp.accounting.events import (
    Event,
    FixedSizeGaussian,
    Gaussian,
    Neighbours,
    PoissonGaussian,
    RenyiBlock,
    Uncovered,
)
from adadp.accounting.filter import RenyiFilter
from adadp.accounting.ledger import Budget, Ledger
from adadp.accounting.statement import FIXED_BEFORE_INHERITED, PLANNED_TOGETHER
from adadp.errors import AccountingError, BudgetExhaustedError, LedgerError

STEP, OTHER, PCA = PoissonGaussian(4.0, 0.05), PoissonGaussian(2.0, 0.01), Gaussian(20.0)
BUDGET = Budget(1.0, 1e-5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def order_of(path: Path) -> float:
    (record,) = [each for each in map(json.loads, path.read_text().splitlines()) if each["kind"] == "order"]
    return float(record["order"])


def divergence(counts: dict[Event, int], order: float, budget: Budget = BUDGET) -> float:
    """What a filter of its own would say, which is all that the theorem speaks of."""
    free = RenyiFilter(1e6, budget.delta, order)
    for event, count in counts.items():
        free.admit(event, count)
    return free.spent


def released_until_refused(ledger: Ledger, event: Event = STEP, **plan: object) -> int:
    with ledger.start(plan) as run:
        for done in range(10**6):
            try:
                run.charge(event)
            except BudgetExhaustedError:
                return done
    raise AssertionError("nothing was refused")


# -- the filter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("on_disk", [True, False])
def test_the_filter_admits_no_more_than_the_budget_whatever_is_chosen(path: Path, seed: int, on_disk: bool) -> None:
    choose = random.Random(seed)
    budget = Budget(choose.choice([0.5, 1.0, 4.0]), 1e-5)
    events: list[Event] = [STEP, OTHER, PCA, PoissonGaussian(1.0, 0.2)]
    ledger = Ledger(path if on_disk else None, dataset="digits", budget=budget)
    released: dict[Event, int] = {}
    open_runs = []
    order = None
    for _ in range(150):
        what = choose.random()
        if what < 0.1 or not open_runs:
            plan = choose.choice([{}, {"steps": choose.choice([5, 50, 500])}])
            own = choose.choice([None, None, Budget(0.8, 1e-5), budget])
            # The first run must not be one that has all of it: that is another test.
            own = own if order else None
            open_runs.append(ledger.start(plan, budget=own, accountant="rdp"))
        elif what < 0.2:
            open_runs.pop(choose.randrange(len(open_runs))).close()
        else:
            event, count = choose.choice(events), choose.choice([1, 1, 1, 10, 100])
            try:
                choose.choice(open_runs).charge(event, count)
            except BudgetExhaustedError:
                continue
            released[event] = released.get(event, 0) + count
            order = order or ledger._state.order
            assert order == ledger._state.order is not None
        if released:
            assert order is not None
            filter_ = RenyiFilter(budget.epsilon, budget.delta, order)
            assert divergence(released, order) <= filter_.budget
            assert ledger.guarantee(1e-5).require() <= budget.epsilon
    assert released
    ledger.close()
    if on_disk:
        assert order_of(path) == order
        assert ledger.guarantee(1e-5) == Ledger(path).guarantee(1e-5)
        held = dict(Ledger(path).charged())
        assert held == released


def test_the_budget_is_used_up_and_then_refuses_everybody(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    first = released_until_refused(ledger)
    order = order_of(path)
    limit = RenyiFilter(1.0, 1e-5, order).budget
    assert divergence({STEP: first}, order) <= limit < divergence({STEP: first + 1}, order)
    assert released_until_refused(Ledger(path)) == 0
    with Ledger(path).start({}, budget=Budget(50.0, 1e-5)) as run:  # a budget of its own is no way around it
        with pytest.raises(BudgetExhaustedError, match=r"shared budget .*order"):
            run.charge(STEP)
        run.charge(Gaussian(1e6))  # but what does fit, fits


def test_a_distribution_would_have_admitted_more() -> None:
    """Stopping by PLD is no filter: the shared budget must not let it decide, run after run."""
    cost = get_accountant("pld").epsilon
    ledger, done = Ledger(None, dataset="digits", budget=BUDGET), 0
    for _ in range(200):
        with ledger.start({}) as run:
            try:
                run.charge(STEP, 20)
            except BudgetExhaustedError:
                break
            done += 20
    assert done > 0
    assert cost({STEP: done + 20}, 1e-5).epsilon < 1.0


def test_the_order_is_on_the_disk_before_anything_is_reserved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    first = ledger.start({})
    second = ledger.start({})
    assert not [line for line in path.read_text().splitlines() if '"order"' in line]
    copies: list[Path] = []
    append = Chain.append

    def appended(chain: Chain, body: Record) -> None:
        append(chain, body)
        copy = path.with_name(f"{len(copies)}.jsonl")
        shutil.copy(path, copy)
        shutil.copy(path.with_name(path.name + ".head"), copy.with_name(copy.name + ".head"))
        copies.append(copy)

    monkeypatch.setattr(Chain, "append", appended)
    second.charge(OTHER)
    first.charge(PCA)
    monkeypatch.undo()
    ledger.close()
    kinds = [record["kind"] for record in map(json.loads, path.read_text().splitlines())]
    assert kinds.index("order") < kinds.index("reserve")
    # A crash between the two leaves the order as it was fixed: another first event does not move it.
    between = Ledger(copies[0])
    assert between.composition() == ()
    with between.start({}) as run:
        run.charge(Gaussian(30.0))
    assert order_of(copies[0]) == order_of(path)


def test_the_guarantee_is_the_budget_and_no_odometer(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    assert ledger.guarantee(1e-5).epsilon == 0
    with ledger.start({}) as run:
        run.charge(STEP)
    for accountant in (None, "pld", "rdp", "theorem1"):
        found = Ledger(path).guarantee(1e-5, accountant=accountant)
        assert 0.99 <= found.require() <= 1.0
        assert found.accountant == "rdp"
        assert PLANNED_TOGETHER not in found.assumptions
        assert "1 step on Poisson lots" in found.sampling
        assert "filter" in found.sampling
    # At another delta it is the filter's block that is accounted for.
    order = order_of(path)
    block = RenyiFilter(1.0, 1e-5, order).event
    for delta in (1e-7, 1e-3):
        expected = get_accountant("rdp").epsilon([(block, 1)], delta).epsilon
        assert Ledger(path).guarantee(delta).epsilon == expected
    assert Ledger(path).guarantee(1e-7).require() > 1.0
    # So whoever accounts for the composition alone gets no less.
    assert Ledger(path).composition() == ((block, 1),)


def test_a_plan_under_the_filter_holds_its_room(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    with ledger.start({"steps": 50}) as run:
        run.charge(STEP)
    order = order_of(path)
    more = released_until_refused(ledger)
    limit = RenyiFilter(1.0, 1e-5, order).budget
    assert divergence({STEP: 50 + more}, order) <= limit < divergence({STEP: 51 + more}, order)


def test_uncovered_and_noted(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    with ledger.start({}) as run:
        with pytest.raises(AccountingError, match="raw"):
            run.charge(Uncovered("raw"))
        run.charge(STEP)
        with pytest.raises(AccountingError, match="raw"):
            run.charge(Uncovered("raw"))
        run.note(reasons=["raw"])
    assert ledger.guarantee(1e-5).epsilon is None


def test_lots_of_a_fixed_size_go_through_it_under_their_relation(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", neighbours=None, budget=BUDGET)
    event = FixedSizeGaussian(8.0, 1000, 10)
    with ledger.start({"neighbours": "replace-one"}) as run:
        run.charge(event, 5)
    found = ledger.guarantee(1e-5)
    assert found.neighbours is Neighbours.REPLACE_ONE
    assert found.require() <= 1.0


def test_a_block_above_its_own_order_has_no_price() -> None:
    ledger = Ledger(None, dataset="digits", budget=Budget(8.0, 1e-5))
    with ledger.start({}) as run:
        run.charge(Gaussian(100.0))  # few and cheap: the order is a high one
        order = ledger._state.order
        assert order is not None
        with pytest.raises(AccountingError, match="no finite"):
            run.charge(RenyiBlock(order / 2, 0.1))
        run.charge(RenyiBlock(order, 0.1))


# -- fixed at creation --------------------------------------------------------------------------------------------


def test_it_is_fixed_when_the_ledger_is_made(path: Path) -> None:
    with Ledger(path, dataset="digits", budget=BUDGET).start({}) as run:
        run.charge(STEP)
    assert Ledger(path).budget == BUDGET
    assert Ledger(path, budget=Budget(1.0, 1e-5)).budget == BUDGET
    for other in (Budget(2.0, 1e-5), Budget(0.5, 1e-5), Budget(1.0, 1e-6)):
        with pytest.raises(LedgerError, match=r"fixed when it was made: .epsilon 1, delta 1e-05., not .epsilon"):
            Ledger(path, budget=other)


def test_it_cannot_be_given_later(path: Path) -> None:
    with Ledger(path, dataset="digits").start({}) as run:
        run.charge(STEP)
    with pytest.raises(LedgerError, match=r"none, not .epsilon 1"):
        Ledger(path, budget=BUDGET)
    old = path.with_name("v1.jsonl")
    for name in ("v1.jsonl", "v1.jsonl.head"):
        shutil.copy(Path(__file__).parent / "references" / name, path.with_name(name))
    with pytest.raises(LedgerError, match="fixed when it was made: none"):
        Ledger(old, budget=BUDGET)


def test_a_reservation_without_a_settled_filter_makes_no_sense(path: Path) -> None:
    Ledger(path, dataset="digits", budget=BUDGET).start({}).close()
    ledger = Ledger(path)
    run = ledger.start({})
    with pytest.raises(ValueError, match="settled"):
        ledger._reserve(run.id, STEP, 1)
    with pytest.raises(LedgerError, match="settled"):
        Ledger(path).composition()


# -- one plan -----------------------------------------------------------------------------------------------------


def most_steps(accountant: str) -> int:
    from adadp.accounting.calibration import most

    return most(lambda count: [(STEP, count)], BUDGET.epsilon, BUDGET.delta, accountant=accountant)


def test_a_plan_declared_first_may_have_all_of_it_by_pld(path: Path) -> None:
    steps = most_steps("pld")
    assert steps > most_steps("rdp")  # the filter cannot hold it
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    waiting = ledger.start({})
    with ledger.start({"steps": steps}, budget=BUDGET) as run:
        run.charge(STEP)
        kinds = [record["kind"] for record in map(json.loads, path.read_text().splitlines())]
        assert kinds.index("one-plan") < kinds.index("reserve")
        run.charge(STEP, steps // 2)
        # Nothing else may be released: no other run, no other event, no step more.
        for refused in (lambda: waiting.charge(STEP), lambda: waiting.charge(Gaussian(1e6)), lambda: run.charge(PCA)):
            with pytest.raises(BudgetExhaustedError, match="belongs to the plan of run-2"):
                refused()
        with pytest.raises(BudgetExhaustedError):
            run.charge(PoissonGaussian(400.0, 0.05))
        with pytest.raises(LedgerError, match=r"belongs to the plan of run-2.*Resume that run"):
            ledger.start({})
        waiting.close()
    for each in (ledger, Ledger(path)):
        assert dict(each.composition()) == {STEP: steps}  # as planned
        assert 0.99 < each.guarantee(1e-5).require() <= 1.0
        assert each.guarantee(1e-5).accountant == "pld"
        with pytest.raises(LedgerError, match="belongs to the plan"):
            each.start({"steps": steps}, budget=BUDGET)
    with Ledger(path).start({"steps": steps}, budget=BUDGET, resume="run-2") as resumed:
        resumed.charge(STEP, steps - steps // 2 - 1)
        with pytest.raises(BudgetExhaustedError):
            resumed.charge(STEP)
    assert dict(Ledger(path).charged()) == {STEP: steps}
    with pytest.raises(LedgerError, match="other runs"):
        Ledger(path).inherit(spending_of({STEP: 1}))


def spending_of(counts: dict[Event, int], dataset: str = "digits") -> dict[str, object]:
    other = Ledger(None, dataset=dataset)
    with other.start({}) as run:
        for event, count in counts.items():
            run.charge(event, count)
    return other.spending()


@pytest.mark.parametrize(
    "case",
    ["fits", "no budget", "smaller budget", "larger budget", "no plan", "released before", "inherited", "too long"],
)
def test_otherwise_the_filter_decides(path: Path, case: str) -> None:
    steps = most_steps("pld")
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    if case == "released before":
        with ledger.start({}) as run:
            run.charge(Gaussian(1e6))
    if case == "inherited":
        ledger.inherit(spending_of({Gaussian(1e6): 1}))
    plan = {} if case == "no plan" else {"steps": {"fits": 50, "too long": 2 * steps}.get(case, steps)}
    own = {"no budget": None, "smaller budget": Budget(0.9, 1e-5), "larger budget": Budget(9.0, 1e-5)}.get(case, BUDGET)
    done = 0
    with ledger.start(plan, budget=own) as run:
        try:
            for done in range(steps):  # noqa: B007
                run.charge(STEP)
        except BudgetExhaustedError:
            pass
        else:
            assert case == "fits"
    order = order_of(path)
    assert divergence({STEP: done}, order) <= RenyiFilter(1.0, 1e-5, order).budget
    with ledger.start({}) as another:  # and another run may come
        another.charge(Gaussian(1e5))


# -- inheriting ---------------------------------------------------------------------------------------------------


def test_what_is_inherited_goes_through_the_filter(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    ledger.inherit(spending_of({STEP: 40}))
    order = order_of(path)
    assert 0.99 < ledger.guarantee(1e-5).require() <= 1.0
    assert FIXED_BEFORE_INHERITED in ledger.guarantee(1e-5).assumptions
    more = released_until_refused(ledger)
    limit = RenyiFilter(1.0, 1e-5, order).budget
    assert divergence({STEP: 40 + more}, order) <= limit < divergence({STEP: 41 + more}, order)
    size = path.stat().st_size
    with pytest.raises(BudgetExhaustedError, match="does not hold what these weights cost"):
        ledger.inherit(spending_of({STEP: 5}))
    with pytest.raises(LedgerError, match="no proof covers"):
        ledger.inherit(spending_of({Uncovered("raw"): 1}))
    assert path.stat().st_size == size
    ledger.inherit(spending_of({Gaussian(0.1): 5}, "letters"))  # other people's data


def test_growing_copies_of_one_run_are_charged_for_their_growth(path: Path) -> None:
    source = Ledger(None, dataset="digits")
    run = source.start({})
    ledger = Ledger(path, dataset="digits", budget=BUDGET)
    run.charge(STEP, 100)
    for _ in range(3):
        run.charge(STEP, 10)
        ledger.inherit(run.spending())
    assert dict(ledger.charged()) == {STEP: 130}
    run.charge(STEP, 5000)
    with pytest.raises(BudgetExhaustedError):
        ledger.inherit(run.spending())


def test_a_budget_too_small_for_any_order_admits_nothing(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", budget=Budget(1e-4, 1e-300))
    with ledger.start({}) as run, pytest.raises(BudgetExhaustedError):
        run.charge(STEP)
    assert ledger.composition() == ()
