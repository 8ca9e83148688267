"""What runs rest on, and why some have no guarantee: kept by the ledger, printed by every guarantee."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from adadp.accounting.events import Gaussian, PoissonGaussian
from adadp.accounting.guarantee import make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.accounting.statement import PLANNED_TOGETHER
from adadp.errors import ConfigurationError, LedgerError

STEP = PoissonGaussian(4.0, 0.05)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_remarks_of_every_run_are_kept_and_printed(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    with ledger.start({}, assumptions=["N is public", "rows are people"], untried=["the loss"]) as run:
        run.charge(STEP)
        run.note(assumptions=["rows are people", "the seed is secret"], notes=["a slow disk"])
    with ledger.start({}, assumptions=["N is public"], untried=["collate"]) as run:
        run.charge(STEP)
    for each in (ledger, Ledger(path)):
        assert each.assumptions == ("N is public", "rows are people", "the seed is secret")
        assert each.untried == ("the loss", "collate")
        assert each.notes == ("a slow disk",)
        assert each.reasons == ()
        found = each.guarantee(1e-5, assumptions=("told here",))
        assert found.epsilon is not None
        assert found.untried == each.untried
        for text in (*each.assumptions, *each.untried, *each.notes, "told here"):
            assert all(text.lower() in shown.lower() for shown in (str(found), found.to_markdown(), found.to_json()))


def test_a_reason_noted_at_any_time_takes_the_number_away(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    with ledger.start({}) as run:
        run.charge(STEP)
    with ledger.start({}) as other:
        other.charge(STEP)
    assert ledger.guarantee(1e-5).epsilon is not None
    run.note(reasons=["raw_norms were logged"])  # the run closed long ago
    for each in (ledger, Ledger(path)):
        assert each.reasons == ("raw_norms were logged",)
        assert each.guarantee(1e-5).epsilon is None
        assert "raw_norms were logged" in str(each.guarantee(1e-5))
    # The file is free again.
    with Ledger(path).start({}) as again:
        again.charge(STEP)
    assert Ledger(path).guarantee(1e-5).epsilon is None


def test_a_reason_from_the_start(path: Path) -> None:
    with Ledger(path, dataset="digits").start({}, reasons=["shuffled lots"]) as run:
        run.charge(STEP)
    assert Ledger(path).guarantee(1e-5).reasons == ("shuffled lots",)


def test_what_is_known_is_not_written_again(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({}, assumptions=["N is public"])
    run.note(notes=["a"])
    size = path.stat().st_size
    for _ in range(3):
        run.note(assumptions=["N is public"], notes=["a", "a"])
        run.note()
    assert path.stat().st_size == size
    run.close()
    size = path.stat().st_size
    with Ledger(path).start({}):  # held by another: nothing new is no reason to wait for it
        before = path.stat().st_size
        run.note(notes=["a"])
        assert path.stat().st_size == before
        with pytest.raises(LedgerError, match="in use"):
            run.note(reasons=["found too late"])
    run.note(reasons=["found too late"])
    assert Ledger(path).reasons == ("found too late",)


def test_a_forked_child_notes_nothing(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({})
    size = path.stat().st_size
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run.note(reasons=["raw"])
        except LedgerError:
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert path.stat().st_size == size
    run.close()


@pytest.mark.parametrize("bad", ["raw", [1], [""], [None], 5])
def test_remarks_are_lists_of_texts(bad: Any) -> None:
    ledger = Ledger()
    with ledger.start({}) as run:
        for kind in ("assumptions", "reasons", "untried", "notes"):
            with pytest.raises(ConfigurationError):
                run.note(**{kind: bad})
    with pytest.raises(ConfigurationError):
        ledger.start({}, reasons=bad)
    assert ledger.guarantee(1e-5).reasons == ()


def test_several_runs_without_a_shared_budget_were_planned_together(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    plan = {"steps": 10}
    with ledger.start(plan) as run:
        run.charge(STEP, 4)
    with ledger.start(plan, resume=run.id) as resumed:
        resumed.charge(STEP, 6)
    ledger.start({}).close()
    assert PLANNED_TOGETHER not in ledger.guarantee(1e-5).assumptions  # one plan, and a run that released nothing
    with ledger.start({}) as other:
        other.charge(STEP)
    assert PLANNED_TOGETHER in Ledger(path).guarantee(1e-5).assumptions


def test_untried_comes_before_the_assumptions() -> None:
    found = make_guarantee({Gaussian(4.0): 1}, 1e-5, assumptions=("N is public",), untried=("the loss",), notes=("n",))
    text, table = str(found), found.to_markdown()
    assert text.index("Not tried:\n- The loss.") < text.index("This rests on")
    assert table.index("Not tried:") < table.index("What it rests on:")
    values = list(json.loads(found.to_json()))
    assert values.index("untried") < values.index("assumptions")
    none = make_guarantee({Gaussian(4.0): 1}, 1e-5, assumptions=("a",), untried=("b",), notes=("c",), reasons=("d",))
    assert none.epsilon is None
    assert str(none).index("- D.") < str(none).index("Not tried:\n- B.") < str(none).index("Notes:\n- C.")
    assert make_guarantee({Gaussian(4.0): 1}, 1e-5).untried == ()


def test_the_unit_of_the_plans_is_the_guarantees() -> None:
    ledger = Ledger()
    with ledger.start({"unit": "one patient"}) as run:
        run.charge(STEP)
    assert ledger.guarantee(1e-5).unit == "one patient"
    with pytest.raises(ConfigurationError, match="one patient"):
        ledger.guarantee(1e-5, unit="one hospital")
    with pytest.raises(LedgerError, match="'one patient', and the plan 'one example'"):
        ledger.start({})
    assert Ledger().guarantee(1e-5).unit == "one example"


def test_reasons_wait_for_the_first_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(None, dataset="digits")
    run = ledger.start({})
    run.note_once_charged(reasons=["a batch was skipped"], notes=["a slow disk"])
    assert ledger.reasons == ()
    assert ledger.notes == ("a slow disk",)
    assert run.waiting == ["a batch was skipped"]

    def fail(*_: Any) -> None:
        raise LedgerError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "_note", fail)
        with pytest.raises(LedgerError, match="full"):
            run.charge(STEP)
    assert not run.charged()
    assert run.waiting == ["a batch was skipped"]  # a failure to write them must not lose them
    run.charge(STEP)
    assert ledger.reasons == ("a batch was skipped",)
    assert run.waiting == []
    run.note_once_charged(reasons=["another"])  # from now on at once
    assert ledger.reasons == ("a batch was skipped", "another")
    assert ledger.guarantee(1e-5).epsilon is None
