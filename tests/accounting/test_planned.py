"""A number of steps that was planned is charged, made or not."""

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
from adadp.accounting.ledger import Budget, Ledger
from adadp.accounting.planned import as_planned, dearest
from adadp.errors import BudgetExhaustedError

STEP, DEAR, WIDE = PoissonGaussian(4.0, 0.05), PoissonGaussian(2.0, 0.05), PoissonGaussian(4.0, 0.1)
PCA = Gaussian(16.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("made", [1, 7, 100, 130])
def test_ending_early_is_charged_as_planned(path: Path, on_disk: bool, made: int) -> None:
    ledger = Ledger(path if on_disk else None, dataset="digits")
    full = max(made, 100)
    with ledger.start({"steps": 100}) as run:
        assert ledger.composition() == ()  # nothing was released: a plan alone costs nothing
        run.charge(PCA)
        assert dict(ledger.composition()) == {PCA: 1}
        for step in range(1, made + 1):
            run.charge(STEP)
            assert dict(ledger.composition()) == {PCA: 1, STEP: max(step, 100)}
    for each in (ledger, Ledger(path) if on_disk else ledger):
        assert dict(each.composition()) == {PCA: 1, STEP: full}
        assert dict(each.charged()) == {PCA: 1, STEP: made}
        assert each.spending()["runs"][0]["events"][-1][1] == full
        text = f"{made} of 100 planned steps were made: charged as planned"
        assert any(text in note for note in each.guarantee(1e-5).notes) == (made < 100)
        whole = get_accountant("pld").epsilon({PCA: 1, STEP: full}, 1e-5).epsilon
        assert each.guarantee(1e-5).epsilon == whole


@pytest.mark.parametrize("plan", [{}, {"steps": None}, {"steps": True}, {"steps": "100"}, {"steps": 0}])
def test_without_a_number_only_what_was_made_is_charged(plan: dict[str, object]) -> None:
    ledger = Ledger()
    with ledger.start(plan) as run:
        run.charge(STEP, 3)
    assert dict(ledger.composition()) == {STEP: 3}
    assert ledger.notes == ()


def test_a_filter_block_and_preprocessing_are_no_steps() -> None:
    ledger = Ledger()
    with ledger.start({"steps": 100}) as run:
        run.charge(RenyiBlock(8.0, 0.1))
        run.charge(PCA)
    assert dict(ledger.composition()) == {RenyiBlock(8.0, 0.1): 1, PCA: 1}


def test_after_any_crash_what_is_on_the_disk_covers_the_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of both files after every record, and between a record and its head, as a kill would leave them."""
    copies: list[tuple[Path, int]] = []
    released = 0
    append = Chain.append

    def appended(chain: Chain, body: Record) -> None:
        head = path.with_name(path.name + ".head")
        before = head.read_bytes() if head.exists() else b""
        append(chain, body)
        for state, content in (("torn", before), ("whole", head.read_bytes())):
            copy = path.with_name(f"{len(copies)}-{state}.jsonl")
            shutil.copy(path, copy)
            copy.with_name(copy.name + ".head").write_bytes(content)
            copies.append((copy, released))

    monkeypatch.setattr(Chain, "append", appended)
    ledger = Ledger(path, dataset="digits")
    with ledger.start({"steps": 50}) as run:
        for _ in range(20):
            run.charge(STEP)
            released += 1
    with ledger.start({"steps": 50}, resume=run.id) as again:
        for _ in range(10):
            again.charge(STEP)
            released += 1
    monkeypatch.undo()
    assert len(copies) > 10
    for copy, made in copies:
        counted = dict(Ledger(copy).composition()).get(STEP, 0)
        assert counted in ((0, 50) if made == 0 else (50,)), copy


def test_a_resumed_plan_is_charged_once(path: Path) -> None:
    ledger, plan = Ledger(path, dataset="digits"), {"steps": 100}
    with ledger.start(plan) as first:
        first.charge(STEP, 40)
    with ledger.start(plan, resume=first.id) as second:
        assert dict(ledger.composition()) == {STEP: 100}
        second.charge(STEP, 10)
        assert dict(ledger.composition()) == {STEP: 100}
    # Nothing was made in the third, and the fourth goes on from it.
    ledger.start(plan, resume=second.id).close()
    assert dict(ledger.composition()) == {STEP: 100}
    with ledger.start(plan, resume="run-3") as fourth:
        fourth.charge(STEP, 5)
    assert dict(Ledger(path).composition()) == {STEP: 100}
    assert any("55 of 100 planned steps" in note for note in Ledger(path).notes)
    # Somebody else goes on from the first as well: another 60 on top.
    with ledger.start(plan, resume=first.id) as fork:
        fork.charge(STEP)
    assert dict(Ledger(path).composition()) == {STEP: 160}
    # And the same plan anew is another 100.
    with ledger.start(plan) as anew:
        anew.charge(STEP)
    assert dict(Ledger(path).composition()) == {STEP: 260}


def test_the_rest_counts_as_the_dearest_kind_seen() -> None:
    ledger = Ledger()
    with ledger.start({"steps": 10}) as run:
        run.charge(STEP, 3)
        assert dict(ledger.composition()) == {STEP: 10}
        run.charge(DEAR, 2)
        assert dict(ledger.composition()) == {STEP: 3, DEAR: 7}
        run.charge(STEP)  # cheap again, but what is to come may be dear
        assert dict(ledger.composition()) == {STEP: 4, DEAR: 6}
        run.charge(WIDE)  # neither dearer nor cheaper than DEAR: a kind that costs at least as much as both
        assert dict(ledger.composition()) == {STEP: 4, DEAR: 2, WIDE: 1, PoissonGaussian(2.0, 0.1): 3}


@pytest.mark.parametrize(
    "kinds",
    [[STEP, DEAR, WIDE], [PoissonGaussian(1.0, 0.001), PoissonGaussian(8.0, 1.0)], [STEP],
     [FixedSizeGaussian(4.0, 1000, 10), FixedSizeGaussian(6.0, 1000, 50), FixedSizeGaussian(5.0, 100, 4)]],
)  # fmt: skip
def test_the_dearest_costs_no_less_than_any(kinds: list[Event]) -> None:
    relation = Neighbours.REPLACE_ONE if isinstance(kinds[0], FixedSizeGaussian) else Neighbours.ADD_REMOVE
    cost = get_accountant("rdp").epsilon
    most = cost({dearest(kinds): 50}, 1e-5, relation).epsilon
    assert all(cost({kind: 50}, 1e-5, relation).epsilon <= most for kind in kinds)


def test_what_no_proof_covers_stays_uncovered() -> None:
    raw = Uncovered("raw")
    assert dearest([STEP, raw, DEAR]) is raw
    assert as_planned({STEP: 1, raw: 1}, 5) == {STEP: 1, raw: 4}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_budget_holds_the_whole_plan_or_cuts_it_before_the_first_step(path: Path, accountant: str) -> None:
    cost = get_accountant(accountant).epsilon
    budget = Budget(1.0, 1e-5)
    ledger = Ledger(path, dataset="digits")
    with ledger.start({"steps": 5000}, budget=budget, accountant=accountant) as run:
        run.charge(STEP)
    # One step was made and all that the budget holds is charged, so nothing is left for another run.
    held = dict(Ledger(path).composition())
    assert 1 < held[STEP] < 5000
    assert cost(held, 1e-5).epsilon <= 1.0 < cost({STEP: held[STEP] + 1}, 1e-5).epsilon
    with Ledger(path).start({}, budget=budget, accountant=accountant) as other, pytest.raises(BudgetExhaustedError):
        other.charge(STEP)


def test_runs_side_by_side_leave_room_for_each_others_plans() -> None:
    cost = get_accountant("rdp").epsilon
    budget = Budget(cost({STEP: 150}, 1e-5).epsilon * (1 + 1e-9), 1e-5)
    ledger = Ledger()
    first = ledger.start({"steps": 100}, budget=budget, accountant="rdp")
    second = ledger.start({"steps": 100}, budget=budget, accountant="rdp")
    first.charge(STEP)
    for _ in range(50):
        second.charge(STEP)
    with pytest.raises(BudgetExhaustedError, match="50 of 100 planned steps were left out"):
        second.charge(STEP)
    first.charge(STEP, 99)
    with pytest.raises(BudgetExhaustedError):
        first.charge(PCA)
    ledger.close()
    assert dict(ledger.composition()) == {STEP: 150}


def test_an_unplanned_run_leaves_room_for_a_plan_that_has_begun() -> None:
    cost = get_accountant("rdp").epsilon
    budget = Budget(cost({STEP: 150}, 1e-5).epsilon * (1 + 1e-9), 1e-5)
    ledger = Ledger()
    other = ledger.start({}, budget=budget, accountant="rdp")
    other.charge(STEP, 20)  # and reserves all the rest
    planned = ledger.start({"steps": 100}, budget=budget, accountant="rdp")
    planned.charge(STEP)
    other.charge(STEP, 30)
    with pytest.raises(BudgetExhaustedError):
        other.charge(STEP)
    planned.charge(STEP, 99)
    assert dict(ledger.composition()) == {STEP: 150}


def test_dearer_steps_under_a_budget_shorten_the_plan_and_keep_to_it() -> None:
    cost = get_accountant("rdp").epsilon
    budget = Budget(cost({STEP: 100}, 1e-5).epsilon * (1 + 1e-9), 1e-5)
    ledger = Ledger()
    made = 0
    with ledger.start({"steps": 100}, budget=budget, accountant="rdp") as run:
        run.charge(STEP, 10)
        try:
            for made in range(100):  # noqa: B007
                run.charge(DEAR)
                assert cost(ledger.composition(), 1e-5).epsilon <= budget.epsilon
        except BudgetExhaustedError:
            pass
    assert 5 < made < 90
    assert cost(ledger.composition(), 1e-5).epsilon <= budget.epsilon
