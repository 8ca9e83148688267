"""One ledger for a data set of one's own: where it is, what it binds, and what a run says before it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Gaussian
from adadp.accounting.guarantee import round_up
from adadp.accounting.ledger import Ledger
from adadp.algorithms.defaults import default_delta
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError
from adadp.training import dataset_ledger
from adadp.training.loop import plan, train
from adadp.training.result import Result

QUICK: dict[str, Any] = {"model": "linear", "steps": 6, "lot": 40, "evaluations": 1, "algorithm": "dpsgd"}
FAST = {"algorithm": "agd"}  # whose accountant is the quick one


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = "".join(f"{i % 7},{i % 2}\n" for i in range(250))
    (folder / "survey.csv").write_text(f"a,label\n{rows}")
    return folder / "survey.csv"


def run(data: Path, **options: Any) -> Result:
    return train(dataset=str(data), **{**QUICK, **options})


def test_two_runs_on_one_file_know_of_each_other(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(dataset=str(data), **{**QUICK, **FAST}, epsilon=1.0, test=str(data))
    first = run(data, noise_multiplier=3.0, test=str(data)).to_dict()
    assert first["ledger"] == str(data) + ".adadp-ledger.jsonl"
    assert first["epsilon"] == first["run_epsilon"] == first["dataset_epsilon"]
    monkeypatch.chdir("/")  # the ledger is the data's, not the folder's from where somebody starts
    made = plan(dataset=str(data), **QUICK, noise_multiplier=3.0)
    assert f"1 run so far, epsilon {round_up(first['epsilon'])} at" in made.notices[0]
    again = plan(dataset=str(data), **{**QUICK, **FAST}, epsilon=1.0, test=str(data))
    assert again.noise_multiplier == alone.noise_multiplier, "epsilon is for the run"
    monkeypatch.chdir(data.parent)
    result = run(Path("survey.csv"), noise_multiplier=3.0, test=str(data))
    second = result.to_dict()
    assert second["run_epsilon"] == pytest.approx(first["epsilon"])
    assert 1.2 * first["epsilon"] < second["epsilon"] < 2 * first["epsilon"]
    assert second["epsilon"] == second["dataset_epsilon"] == result.guarantee.epsilon
    assert (second["dataset_runs"], second["dataset_name"]) == (2, "survey")
    ledger = Ledger(second["ledger"])
    own = [*ledger.charges()["run-3"], *ledger.charges()["run-4"]]
    assert second["epsilon"] == get_accountant("pld").epsilon(ledger.composition(), second["delta"]).epsilon
    assert second["run_epsilon"] == get_accountant("pld").epsilon(own, second["delta"]).epsilon


def test_names_and_places(data: Path) -> None:
    other = data.parent.parent / "elsewhere"
    other.mkdir()
    (other / "survey.csv").write_bytes(data.read_bytes())
    assert dataset_ledger.ledger_path(str(other / "survey.csv"), None).parent == other.resolve()
    link = other / "link.csv"
    link.symlink_to(data)
    assert dataset_ledger.ledger_path(str(link), None) == dataset_ledger.ledger_path(str(data), None)
    assert dataset_ledger.ledger_path(str(data), "survey 2026").name == "survey 2026.adadp-ledger.jsonl"
    for name in ("../x", "", ".x", "a/b", "x" * 200):
        with pytest.raises(ConfigurationError, match="dataset_name must be"):
            dataset_ledger.ledger_path(str(data), name)
    with pytest.raises(ConfigurationError, match="dataset_name goes with data of your own"):
        plan(dataset="digits", dataset_name="x")
    declared = run(data, dataset_name="people", noise_multiplier=3.0).to_dict()
    assert (declared["dataset"], declared["dataset_name"]) == ("survey", "people")
    with pytest.raises(LedgerError, match="belongs to the dataset 'people'"):
        run(data, ledger=declared["ledger"])


def test_a_folder_that_cannot_be_written_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match="cannot be written here: name another place by ledger="):
        plan(dataset=str(data), **QUICK)
    assert plan(dataset=str(data), **QUICK, noise_multiplier=3.0, ledger="here.jsonl").ledger is not None


def test_a_budget_for_all_runs(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="give ledger= too"):
        plan(dataset="digits", budget=1.0)
    first = run(data, epsilon=1.0, budget=1.5).to_dict()
    assert first["epsilon"] == pytest.approx(1.5), "a filter's price is all of its budget"
    assert first["run_epsilon"] <= 1
    assert first["steps"] == 6
    again = run(data, epsilon=0.6).to_dict()  # the ledger knows its budget
    assert again["epsilon"] == first["epsilon"]
    with pytest.raises(LedgerError, match=r"epsilon 1.5, delta 0.0001.* not .epsilon 3"):
        run(data, budget=3.0)
    with pytest.raises(BudgetExhaustedError, match=r"has room for \d of 6 steps"):
        run(data, noise_multiplier=1.85)
    with pytest.raises(ConfigurationError, match="a filter of its own"):
        plan(dataset=str(data), **{**QUICK, **FAST})
    less = run(data, noise_multiplier=1.85, spend_the_rest=True)
    assert 0 < less.steps < 3
    assert less.guarantee.epsilon == first["epsilon"]


def test_a_budget_is_not_set_after_the_fact(data: Path) -> None:
    run(data, noise_multiplier=3.0)
    with pytest.raises(LedgerError, match="budget cannot be set now"):
        plan(dataset=str(data), **QUICK, budget=3.0)


def test_a_partly_spent_epsilon_says_so_and_absurd_noise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {
        "ledger": "all.jsonl",
        "dataset": "digits",
        "model": "linear",
        "steps": 6,
        "lot": 200,
        "algorithm": "agd",
    }
    with Ledger("all.jsonl", dataset="digits").start({}) as earlier:
        earlier.charge(Gaussian(3.2))
    some = plan(**given, epsilon=1.4)
    assert some.notices[0].startswith("ledger of 'digits': all.jsonl; 1 run so far, epsilon 0.995 at")
    assert f"noise multiplier {some.noise_multiplier:.4g}, where a first run needs" in some.notices[1]
    with pytest.raises(BudgetExhaustedError, match=r"little to learn from. Give a larger epsilon .about 1."):
        plan(**given, epsilon=1.12)
    insisting = plan(**given, epsilon=1.12, spend_the_rest=True)
    assert insisting.noise_multiplier is not None
    assert some.noise_multiplier is not None
    assert insisting.noise_multiplier > 2 * some.noise_multiplier
    with pytest.raises(BudgetExhaustedError, match="no noise leaves room"):
        plan(**given, epsilon=0.9)


def test_a_run_without_a_guarantee_is_noted_and_not_counted(data: Path) -> None:
    first = run(data, noise_multiplier=3.0, test=str(data)).to_dict()
    baseline = run(data, algorithm="sgd")
    assert baseline.guarantee.epsilon is None
    assert "not counted there" in baseline.plan.notices[0]
    assert baseline.to_dict()["ledger"] == str(baseline.folder / "ledger.jsonl")
    kept = Ledger(first["ledger"]).guarantee(first["delta"])
    assert kept.epsilon == first["epsilon"]
    (noted,) = [text for text in kept.assumptions if "without a guarantee" in text]
    assert baseline.folder.name in noted
    assert str(baseline.folder.parent) not in noted, "guarantees are published, and no path of a machine with them"


@pytest.mark.parametrize("examples", [1, 2, 10, 1438, 4329, 10_000, 60_000, 99_999, 10**6, 10**9])
def test_the_default_delta_is_below_1_over_n(examples: int) -> None:
    delta = default_delta(examples)
    assert delta < 1 / examples
    assert delta <= 1e-4
    assert f"{delta:.0e}" == f"{delta:.1e}".replace(".0e", "e"), "one digit"
    assert delta == 1e-4 or 0.45 < delta * examples**1.1 <= 1


def test_data_that_has_a_ledger_gets_no_second_one_by_another_name(tmp_path: Path) -> None:
    """Runs of one file would be counted apart, each as the only one."""
    data = tmp_path / "survey.csv"
    data.touch()
    named = dataset_ledger.ledger_path(str(data), "people")
    dataset_ledger.ledger_path(str(data), None).touch()
    with pytest.raises(ConfigurationError, match=r"survey\.csv are charged to .*leave dataset_name out"):
        dataset_ledger.ledger_path(str(data), "people")
    named.touch()  # of other files of these people
    with pytest.raises(ConfigurationError, match="would not count with them"):
        dataset_ledger.ledger_path(str(data), "people")
    assert dataset_ledger.ledger_path(str(tmp_path / "second.csv"), "people") == named
