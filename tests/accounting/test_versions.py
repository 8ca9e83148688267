"""Files of older versions are read as they are, and continued in a way that programs of their time read or refuse."""

import json
import shutil
from pathlib import Path

import pytest

from adadp.accounting.chain import Chain
from adadp.accounting.events import Gaussian, PoissonGaussian
from adadp.accounting.ledger import Ledger
from adadp.errors import LedgerError

REFERENCES = Path(__file__).parent / "references"
OLD = REFERENCES / "v1.jsonl"  # written by version 1 itself (008fe18)
OLD_2 = (
    REFERENCES / "v2.jsonl"
)  # written by version 2 itself (0.2.0): three runs for one patient, one of them inherited
PCA, STEP, OTHER = Gaussian(16.0), PoissonGaussian(4.0, 0.05), PoissonGaussian(8.0, 0.05)
KINDS_OF_VERSION_1 = {"ledger", "run", "reserve", "give-back", "close"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name in ("v1.jsonl", "v1.jsonl.head"):
        shutil.copy(OLD.with_name(name), tmp_path / name)
    return tmp_path / "v1.jsonl"


def test_it_is_read_and_not_one_byte_changes(path: Path) -> None:
    before = path.read_bytes(), path.with_name("v1.jsonl.head").read_bytes()
    ledger = Ledger(path, dataset="digits")
    assert [(run.id, run.closed) for run in ledger.runs] == [
        ("run-1", True), ("run-2", True), ("run-3", True), ("run-4", False),
    ]  # fmt: skip
    assert dict(ledger.charged()) == {PCA: 1, STEP: 5, OTHER: 5}
    # run-2 planned 10 steps and made 3. run-3 had a budget, and nothing says how many of its steps that allowed.
    assert dict(ledger.composition()) == {PCA: 1, STEP: 12, OTHER: 5}
    assert any("3 of 10 planned steps" in note for note in ledger.notes)
    assert any("run-3 ended before its 1,000,000 planned steps" in text for text in ledger.assumptions)
    assert ledger.guarantee(1e-5).require() > 0
    ledger.spending()
    assert (path.read_bytes(), path.with_name("v1.jsonl.head").read_bytes()) == before


def test_uids_are_always_the_same_and_each_runs_own(path: Path) -> None:
    uids = [run.uid for run in Ledger(path).runs]
    assert uids == [run.uid for run in Ledger(path).runs]
    assert len({len(uid) for uid in uids}) == 1 < len(set(uids)) == 4
    assert "abab" not in "".join(uids)  # the ledger's key
    with Ledger(path).start({}) as run:
        run.charge(STEP)
    assert [run.uid for run in Ledger(path).runs][:4] == uids


@pytest.mark.parametrize("how", ["start", "inherit", "note"])
def test_what_follows_makes_old_programs_refuse(path: Path, how: str) -> None:
    content = path.read_bytes()
    ledger = Ledger(path)
    if how == "inherit":
        other = Ledger(None, dataset="digits")
        with other.start({}) as run:
            run.charge(STEP, 7)
        ledger.inherit(other.spending())
    else:
        with ledger.start({"steps": 7}) as run:
            run.charge(STEP, 3)
            run.note(reasons=["raw"])
    assert path.read_bytes().startswith(content)
    added = [json.loads(line) for line in path.read_bytes()[len(content) :].splitlines()]
    # An old program knows no such kind and refuses the file there, before it could miss anything.
    assert added[0]["kind"] == "upgrade"
    assert added[0]["kind"] not in KINDS_OF_VERSION_1
    assert [record["kind"] for record in added].count("upgrade") == 1
    assert dict(Ledger(path).composition()) == {PCA: 1, STEP: 19, OTHER: 5}


def test_seeds_of_old_runs_are_remembered(path: Path) -> None:
    with pytest.raises(LedgerError, match="seed"):
        Ledger(path).start({}, seed=7)


def test_records_of_version_2_mean_nothing_in_a_file_of_version_1(path: Path) -> None:
    chain = Chain(path)
    chain.lock()
    chain.append({"kind": "note", "run": "run-1", "reasons": [], "assumptions": [], "untried": [], "notes": []})
    chain.unlock()
    with pytest.raises(LedgerError, match="later version"):
        Ledger(path)


@pytest.mark.parametrize("version", [0, 4, "2", None, True, 2.0])
def test_other_versions_are_refused(tmp_path: Path, version: object) -> None:
    chain = Chain(tmp_path / "ledger.jsonl")
    chain.lock()
    header = {"kind": "ledger", "version": version, "dataset": "digits", "neighbours": None, "key": "ab" * 32}
    chain.append({**header, "budget": None, "unit": None})
    chain.unlock()
    with pytest.raises(LedgerError, match=f"it is of version {version}, and this adadp reads up to version 3"):
        Ledger(tmp_path / "ledger.jsonl")


def test_a_new_file_is_of_version_3(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", dataset="digits").start({}) as run:
        pass
    header, started = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines()[:2])
    assert header["version"] == 3
    assert started["uid"] == run.uid
    assert len(run.uid) == 32


def test_a_file_of_version_2_is_read_and_goes_on_as_one(tmp_path: Path) -> None:
    path = tmp_path / "v2.jsonl"
    for name in ("v2.jsonl", "v2.jsonl.head"):
        shutil.copy(OLD_2.with_name(name), tmp_path / name)
    content = path.read_bytes()
    ledger = Ledger(path, dataset="digits", unit="one patient")
    assert ledger.guarantee(1e-5).unit == "one patient"
    assert dict(ledger.composition()) == {PCA: 1, STEP: 12}  # ten of them planned, two inherited
    assert "public weights" in ledger.assumptions
    assert path.read_bytes() == content
    for plan in ({}, {"unit": "one example"}):
        with pytest.raises(LedgerError, match="it protects 'one patient', and the plan 'one example'"):
            ledger.start(plan)
    with pytest.raises(LedgerError, match="this seed has been used"):
        ledger.start({"unit": "one patient"}, seed=7)
    with pytest.raises(LedgerError, match="it protects 'one patient', not 'one example'"):
        Ledger(path, unit="one example")
    assert path.read_bytes() == content
    with ledger.start({"unit": "one patient"}) as run:
        run.charge(STEP)
    added = [json.loads(line) for line in path.read_bytes()[len(content) :].splitlines()]
    # Each run of version 2 states unit and relation, so a program of that time reads on and mixes nothing either.
    assert [(record["kind"], record.get("unit")) for record in added] == [
        ("run", "one patient"), ("reserve", None), ("close", None),
    ]  # fmt: skip
    assert dict(Ledger(path).composition()) == {PCA: 1, STEP: 13}
