"""A ledger states in its header which unit of privacy and which relation it is for, and holds no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adadp.accounting.budget import Budget
from adadp.accounting.chain import Chain
from adadp.accounting.events import FixedSizeGaussian, Gaussian, PoissonGaussian
from adadp.accounting.ledger import Ledger
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError

STEP = PoissonGaussian(4.0, 0.05)
PERSON, EXAMPLE = "one person", "one example"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.jsonl"


def header(path: Path) -> tuple[Any, Any]:
    first = json.loads(path.read_text().splitlines()[0])
    assert first["kind"] == "ledger"
    return first["unit"], first["neighbours"]


def spent(plan: dict[str, Any], dataset: str = "digits", event: Any = STEP) -> Any:
    ledger = Ledger(None, dataset=dataset, neighbours=None)
    with ledger.start(plan) as run:
        run.charge(event, 5)
    return ledger.spending()


@pytest.mark.parametrize(
    ("plan", "stated", "others"),
    [
        ({}, (EXAMPLE, "add-or-remove-one"), [{"unit": PERSON}, {"neighbours": "replace-one"}]),
        ({"unit": PERSON}, (PERSON, "add-or-remove-one"), [{}, {"unit": EXAMPLE}, {"unit": "One person"}]),
        (
            {"unit": "one hospital", "neighbours": "replace-one"},
            ("one hospital", "replace-one"),
            [{"unit": PERSON}, {"unit": "one hospital", "neighbours": "add-or-remove-one"}, {}],
        ),
    ],
)
def test_the_first_run_writes_it(
    path: Path, plan: dict[str, Any], stated: tuple[str, str], others: list[dict[str, Any]]
) -> None:
    Ledger(path, dataset="digits", neighbours=None).start(plan).close()
    assert header(path) == stated
    found = Ledger(path, neighbours=None)
    assert (found.unit, found.neighbours) == stated
    assert found.guarantee(1e-5).unit == stated[0]
    for other in others:
        with pytest.raises(LedgerError, match=r"it protects|it holds guarantees for"):
            found.start(other)


def test_whoever_makes_the_ledger_may_state_it(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", unit=PERSON, budget=Budget(3.0, 1e-5))
    ledger.settle_order(STEP)  # the first record that is written
    assert header(path) == (PERSON, "add-or-remove-one")
    with pytest.raises(LedgerError, match="it protects 'one person', and the plan 'one example'"):
        Ledger(path).start({})
    with pytest.raises(LedgerError, match="it protects 'one person', not 'one example'"):
        Ledger(path, unit=EXAMPLE)
    with pytest.raises(ConfigurationError, match="no guarantee for 'one example'"):
        Ledger(path).guarantee(1e-5, unit=EXAMPLE)
    with pytest.raises(ConfigurationError, match="unit must name"):
        Ledger(path, unit=" ")


def test_weights_that_come_first_write_it(path: Path) -> None:
    plan = {"unit": PERSON, "neighbours": "replace-one"}
    ledger = Ledger(path, dataset="digits", neighbours=None)
    ledger.inherit(spent(plan, event=FixedSizeGaussian(4.0, 100, 10)))
    assert header(path) == (PERSON, "replace-one")
    with pytest.raises(LedgerError, match="it protects 'one person'"):
        ledger.start({"neighbours": "replace-one"})


def test_weights_of_other_data_settle_nothing_and_the_first_run_does(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", neighbours=None)
    ledger.inherit(spent({"unit": PERSON}, dataset="letters"))
    assert header(path) == (None, None)
    ledger.start({}).close()
    for each in (ledger, Ledger(path, neighbours=None)):
        assert (each.unit, each.neighbours) == (EXAMPLE, "add-or-remove-one")
        with pytest.raises(LedgerError, match="it protects 'one example', and the plan 'one person'"):
            each.start({"unit": PERSON})


def test_what_is_refused_settles_nothing(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", neighbours=None, budget=Budget(0.01, 1e-5))
    with pytest.raises(LedgerError, match="no run 'run-9'"):
        ledger.start({"unit": PERSON}, resume="run-9")
    with pytest.raises(BudgetExhaustedError):
        ledger.inherit(spent({"unit": PERSON}, event=Gaussian(1.0)))
    assert not path.read_text()
    assert (ledger.unit, ledger.neighbours) == (None, None)
    ledger.start({}, seed=3).close()
    assert header(path) == (EXAMPLE, "add-or-remove-one")
    with pytest.raises(LedgerError, match="this seed has been used"):  # the first run's too: its key was there by then
        Ledger(path).start({}, seed=3)


def test_in_memory_too() -> None:
    ledger = Ledger(None, dataset="digits", unit=PERSON)
    assert ledger.records() == []
    ledger.start({"unit": PERSON}).close()
    copy = Ledger(None, dataset="digits", neighbours=None)
    copy.load_records(ledger.records())
    assert ledger.records()[0]["unit"] == copy.unit == PERSON


@pytest.mark.parametrize("kind", ["header", "run", "inherited"])
def test_a_file_that_disagrees_with_its_header_is_refused(path: Path, kind: str) -> None:
    """Records with hashes that fit, as a program that does not check would write them."""
    with Ledger(path, dataset="digits").start({"unit": PERSON}) as run:
        run.charge(STEP)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        for key in ("n", "prev", "hash"):
            del record[key]
    if kind == "header":
        records[0]["unit"] = EXAMPLE
    elif kind == "run":
        records.append({**records[1], "run": "run-2", "uid": "ab" * 16, "unit": EXAMPLE})
    else:
        records.append({"kind": "inherit", "runs": spent({})["runs"]})
    path.unlink()
    path.with_name(path.name + ".head").unlink()
    chain = Chain(path)
    chain.lock()
    for record in records:
        chain.append(record)
    chain.unlock()
    with pytest.raises(LedgerError, match="one ledger, one unit"):
        Ledger(path)


@pytest.mark.parametrize("unit", [5, "", " ", ["one person"], {}])
def test_a_header_without_a_sensible_unit_is_refused(path: Path, unit: object) -> None:
    chain = Chain(path)
    chain.lock()
    chain.append(
        {"kind": "ledger", "version": 3, "dataset": "digits", "neighbours": None, "key": "ab" * 32, "budget": None,
         "unit": unit}
    )  # fmt: skip
    chain.unlock()
    with pytest.raises(LedgerError, match="makes no sense"):
        Ledger(path)
