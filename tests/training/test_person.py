"""`adadp train --person COLUMN`: the file's rows belong to persons, from the split to the guarantee."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from adadp import Ledger, data
from adadp.cli import app
from adadp.errors import ConfigurationError, DataError, LedgerError
from adadp.training import plan, train

ROWS = 467  # of the person with the most: more than there are persons, so that no other number is the same


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Persons of 1 to 4 rows, one of many, and rows without an id."""
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("visits") / "visits.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient", "a", "b", "site", "label"])
        for person in range(150):
            sick = draw.random() < 0.5
            for _ in range(ROWS if person == 7 else draw.randint(1, 4)):
                name = "" if person % 50 == 3 else f"P{person}" if person % 2 else f"{person}"
                cells = [draw.gauss(2.0 * sick, 1.0), draw.gauss(-1.0 * sick, 1.0), draw.choice("NS")]
                rows.writerow([name, *cells, "yes" if sick else "no"])
    return path


def options(path: Path, **more: object) -> dict[str, object]:
    return {"dataset": str(path), "person": "patient", "classes": ("no", "yes"), "lot": 40, "steps": 20, **more}


def test_a_run_is_for_persons(visits: Path, tmp_path: Path) -> None:
    result = train(**options(visits, out=str(tmp_path / "run"), ledger=str(tmp_path / "ledger.jsonl"), delta=1e-3))
    guarantee = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    assert guarantee["unit"] == result.to_dict()["unit"] == "one person"
    assert guarantee["epsilon"] <= 1.0
    assert "on all persons" in guarantee["sampling"]
    text = "a person is all rows with one value of patient, however many; each person has one id"
    assert any(assumption.startswith(text) for assumption in guarantee["assumptions"])
    persons = len(set(result.plan.train.persons))
    assert result.to_dict()["examples"] == persons < len(result.plan.train)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert [run.unit for run in ledger.runs] == ["one person"] * 2  # the scales and the training
    assert set(result.plan.train.columns) == {"a", "b", "site"}  # the ids are no feature
    assert f"rate {40 / persons:g}" in guarantee["sampling"]
    alone = {"person": None, "category": ("patient",), "ledger": str(tmp_path / "ledger.jsonl")}
    with pytest.raises(LedgerError, match="one person"):
        train(**options(visits, out=str(tmp_path / "other"), **alone))


def test_a_run_without_a_guarantee_is_noted_for_persons_too(
    visits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "visits.csv"
    copy.write_bytes(visits.read_bytes())
    for algorithm in ("sgd", "dpsgd", "sgd"):  # the first one makes the ledger
        train(**options(copy, algorithm=algorithm, delta=1e-3, steps=2))
    ledger = Ledger(tmp_path / "visits.csv.adadp-ledger.jsonl")
    assert {run.unit for run in ledger.runs} == {ledger.unit} == {"one person"}
    assert sum("without_guarantee" in run.plan for run in ledger.runs) == 2
    assert ledger.deltas == (1e-3,)


def test_the_split_is_by_person_and_each_has_a_coin_of_its_own(visits: Path, tmp_path: Path) -> None:
    whole = data.read_held_out(visits, label="label", person="patient", seed=4, test_fraction=0.3)
    assert not set(whole.train.persons) & set(whole.test.persons)
    assert len(whole.train.persons) == len(whole.train)
    lines = visits.read_text().splitlines()
    without = tmp_path / "visits.csv"
    without.write_text("\n".join(line for line in lines if not line.startswith("P7,")) + "\n")
    fewer = data.read_held_out(without, label="label", person="patient", seed=4, test_fraction=0.3)
    assert set(fewer.test.persons) == set(whole.test.persons) - {"P7"}
    assert set(fewer.train.persons) == set(whole.train.persons) - {"P7"}
    assert 0.15 < len(set(whole.test.persons)) / 148 < 0.45


def test_what_cannot_be_done_for_persons_is_refused(visits: Path) -> None:
    with pytest.raises(DataError, match="no column 'nobody'"):
        plan(**options(visits, person="nobody", category=("patient",)))
    with pytest.raises(ConfigurationError, match="adadp or dpsgd"):
        plan(**options(visits, algorithm="agd"))
    with pytest.raises(ConfigurationError, match="never split"):
        plan(**options(visits, microbatch=4))
    with pytest.raises(ConfigurationError, match="lot must be in"):
        plan(**options(visits, lot=200))
    with pytest.raises(ConfigurationError, match="person goes with data of your own"):
        plan(dataset="digits", person="patient")


def test_paid_figures_count_persons(visits: Path, tmp_path: Path) -> None:
    paths = {"out": str(tmp_path / "run"), "ledger": str(tmp_path / "ledger.jsonl")}
    result = train(**options(visits, paid_metrics=True, delta=1e-3, **paths))
    assert result.metrics.rows == len(set(result.plan.test.persons)) < len(result.plan.test)
    assert result.guarantee.unit == "one person"
    assert result.guarantee.epsilon is not None
    assert result.guarantee.epsilon <= 1.0
    assert [run.unit for run in Ledger(tmp_path / "ledger.jsonl").runs] == ["one person"] * 3
    other = tmp_path / "other.csv"
    other.write_text("a,b,site,label\n1,1,N,yes\n2,2,S,no\n")
    with pytest.raises(ConfigurationError, match="paid_metrics count persons, and the held-out data has no column"):
        plan(**options(visits, test=str(other), paid_metrics=True))


def test_images_of_persons(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images, label = draw.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 2
    np.savez(tmp_path / "scans.npz", images=images, label=label, patient=np.arange(60) // 3)
    pair = data.read_held_out(tmp_path / "scans.npz", label="label", person="patient", seed=1)
    assert isinstance(pair.train, data.Dataset)
    assert not set(pair.train.persons) & set(pair.test.persons)


def test_the_command_prints_persons_and_nobodys_number_of_rows(visits: Path, tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(visits.read_text())
    command = ["train", "--dataset", str(path), "--person", "patient", "--rows-per-person", "3", "--lot", "40", "--yes"]
    command += ["--classes", "no,yes", "--steps", "3", "--epsilon", "2", "--out", str(tmp_path / "run")]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    text = " ".join(found.output.split())
    assert "public by your use of this data: N = " in text
    assert "public: the number of persons (patient): N = " in text
    assert "differential privacy for one person" in text
    assert "at most 3 rows of a person are in a lot" in text
    assert f" {ROWS} " not in text
    assert " rows to train on" not in text
    found = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(path)])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--dataset", str(path)])
    assert found.exit_code == 0, found.output


def test_a_run_folder_that_is_published_does_not_show_how_many_rows_somebody_has(visits: Path, tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(visits.read_text())
    train(**options(path, out=str(tmp_path / "run"), number=("a=-4..4", "b=-4..4"), steps=2))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    lines = path.read_text().splitlines()
    assert "rows" not in config
    assert len(lines) - 1 not in config.values()
    assert config["persons"] == len({line.split(",")[0] for line in lines[1:]})
    evaluated = ["evaluate", str(tmp_path / "run")]
    assert CliRunner().invoke(app, evaluated).exit_code == 0
    path.write_text("\n".join([*lines, *[line for line in lines if line.startswith("P7,")]]) + "\n")
    assert CliRunner().invoke(app, evaluated).exit_code == 0  # the same persons: they are held out as they were
    path.write_text("\n".join(line for line in lines if not line.startswith("P7,")) + "\n")
    found = CliRunner().invoke(app, evaluated)
    assert found.exit_code != 0
    assert "other persons than when the run was trained" in " ".join(found.output.split())
