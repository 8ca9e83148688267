"""Spending follows the weights: from ledger to ledger, once, and never less than it was."""

import copy
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

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
from adadp.accounting.statement import PLANNED_TOGETHER
from adadp.errors import BudgetExhaustedError, ConfigurationError, LedgerError

STEP, OTHER, PCA = PoissonGaussian(4.0, 0.05), PoissonGaussian(2.0, 0.01), Gaussian(16.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def spent(counts: dict[Event, int], dataset: str | None = "digits", **plan: Any) -> Ledger:
    ledger = Ledger(None, dataset=dataset, neighbours=None)
    with ledger.start(plan) as run:
        for event, count in counts.items():
            run.charge(event, count)
    return ledger


def total(ledger: Ledger) -> dict[Event, int]:
    return dict(ledger.composition())


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_weights_cost_is_charged_where_they_are_trained_on(path: Path, on_disk: bool) -> None:
    ledger = Ledger(path if on_disk else None, dataset="digits")
    with ledger.start({}) as run:
        run.charge(STEP, 10)
    ledger.inherit(spent({STEP: 5, PCA: 1}).spending())
    for each in (ledger, Ledger(path) if on_disk else ledger):
        assert total(each) == {STEP: 15, PCA: 1}
        expected = get_accountant("pld").epsilon({STEP: 15, PCA: 1}, 1e-5).epsilon
        assert each.guarantee(1e-5).epsilon == expected
        assert PLANNED_TOGETHER in each.guarantee(1e-5).assumptions


def test_numbers_of_numpy_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    ((event, _),) = spent({Gaussian(numpy.float64(4.0)): 1}).spending()["runs"][0]["events"]
    assert type(event["noise_multiplier"]) is float


def test_it_is_plain_and_survives_json_and_torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = spent({STEP: 3, PCA: 1, Uncovered("raw", STEP): 2}, steps=7)
    spending = source.spending()
    assert spending == json.loads(json.dumps(spending))
    buffer = io.BytesIO()
    torch.save(spending, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=True)
    ledger = Ledger(path, dataset="digits")
    ledger.inherit(read)
    assert total(ledger) == total(source)
    assert set(spending) == {"version", "runs"}
    assert {"uid", "dataset", "unit", "neighbours", "events", "assumptions", "reasons", "untried"} <= set(
        spending["runs"][0]
    )


def test_what_is_here_already_is_not_charged_twice(path: Path) -> None:
    ledger, source = Ledger(path, dataset="digits"), spent({STEP: 5})
    with ledger.start({}) as run:
        run.charge(OTHER, 3)
        ledger.inherit(source.spending())
        lines = path.read_bytes().count(b"\n")
        for spending in (source.spending(), ledger.spending(), run.spending(), Ledger(path).spending()):
            ledger.inherit(spending)
        assert path.read_bytes().count(b"\n") == lines
        assert total(ledger) == {STEP: 5, OTHER: 3}
        run.charge(OTHER, 4)
    ledger.inherit(Ledger(path).spending())
    assert total(Ledger(path)) == {STEP: 5, OTHER: 7}


def test_there_and_back_again() -> None:
    a, b, c = (Ledger(None, dataset="digits") for _ in range(3))
    for number, (ledger, source) in enumerate([(a, None), (b, a), (c, b), (a, c), (b, a), (c, a)]):
        if source is not None:
            ledger.inherit(source.spending())
        with ledger.start({"number": number}) as run:
            run.charge(STEP)
    # a, b and c each made two; what each knows is what its weights have seen.
    assert total(a) == {STEP: 4}  # its own two, and what came back from c: one of b and one of c
    assert total(b) == {STEP: 5}
    assert total(c) == {STEP: 5}
    for ledger in (a, b, c):
        for source in (a, b, c):
            ledger.inherit(source.spending())
    assert total(a) == total(b) == total(c) == {STEP: 6}


@pytest.mark.parametrize("seed", range(5))
def test_no_way_through_ledgers_loses_a_release(seed: int) -> None:
    choose = random.Random(seed)
    ledgers = [Ledger(None, dataset="digits") for _ in range(4)]
    # What was released, by uid, that each ledger's weights depend on.
    truth: list[dict[str, int]] = [{} for _ in ledgers]
    for _ in range(40):
        here = choose.randrange(4)
        if choose.random() < 0.5:
            there = choose.randrange(4)
            ledgers[here].inherit(ledgers[there].spending())
            truth[here] = {**truth[there], **truth[here]}
        else:
            with ledgers[here].start({}) as run:
                count = choose.randint(1, 9)
                run.charge(STEP, count)
                truth[here][run.uid] = count
        assert total(ledgers[here]).get(STEP, 0) == sum(truth[here].values())


def test_of_a_run_that_comes_again_the_larger_counts_are_kept() -> None:
    source, ledger = Ledger(None, dataset="digits"), Ledger(None, dataset="digits")
    run = source.start({})
    run.charge(STEP, 5)
    early = run.spending()
    run.charge(STEP, 5)
    run.charge(OTHER)
    late = source.spending()
    ledger.inherit(early)
    assert total(ledger) == {STEP: 5}
    ledger.inherit(late)
    assert total(ledger) == {STEP: 10, OTHER: 1}
    ledger.inherit(early)
    assert total(ledger) == {STEP: 10, OTHER: 1}
    # Counts of each kind on their own: neither copy holds the other.
    crossed = copy.deepcopy(early)
    crossed["runs"][0]["events"] = [[{"kind": "gaussian", "noise_multiplier": 16.0}, 2]]
    ledger.inherit(crossed)
    assert total(ledger) == {STEP: 10, OTHER: 1, PCA: 2}


def test_a_ledger_that_lost_its_end_learns_it_from_its_own_weights(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    run = ledger.start({})
    run.charge(STEP, 5)
    files = [path, path.with_name(path.name + ".head")]
    backup = [file.read_bytes() for file in files]
    run.charge(STEP, 5000)
    run.close()
    spending = ledger.spending()
    for file, content in zip(files, backup, strict=True):
        file.write_bytes(content)
    restored = Ledger(path)
    assert total(restored)[STEP] < 5000
    restored.inherit(spending)
    assert total(Ledger(path)) == {STEP: 5005}
    assert total(restored) == {STEP: 5005}


def test_a_ledger_that_lost_a_reason_learns_it_from_its_own_weights(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    with ledger.start({}) as run:
        run.charge(STEP, 5)
    files = [path, path.with_name(path.name + ".head")]
    backup = [file.read_bytes() for file in files]
    run.note(reasons=["raw norms were logged"])
    spending = ledger.spending()
    for file, content in zip(files, backup, strict=True):
        file.write_bytes(content)
    restored = Ledger(path)
    assert restored.guarantee(1e-5).epsilon is not None
    restored.inherit(spending)
    assert Ledger(path).guarantee(1e-5).epsilon is None
    assert total(restored) == {STEP: 5}


def test_planned_steps_travel_as_planned() -> None:
    ledger = Ledger(None, dataset="digits")
    ledger.inherit(spent({STEP: 3}, steps=100).spending())
    assert total(ledger) == {STEP: 100}


def test_remarks_travel_and_a_reason_takes_the_number_away(path: Path) -> None:
    source, ledger = Ledger(None, dataset="digits"), Ledger(path, dataset="digits")
    with source.start({}, assumptions=["N is public"], untried=["the loss"]) as run:
        run.charge(STEP)
    ledger.inherit(source.spending())
    assert ledger.guarantee(1e-5).epsilon is not None
    run.note(reasons=["raw norms were logged"])
    ledger.inherit(source.spending())  # no count is larger, but there is more to know
    for each in (ledger, Ledger(path)):
        assert (each.assumptions, each.untried, each.reasons) == (
            ("N is public",), ("the loss",), ("raw norms were logged",),
        )  # fmt: skip
        assert each.guarantee(1e-5).epsilon is None


def test_a_reason_travels_without_any_release() -> None:
    source, ledger = Ledger(None, dataset="digits"), Ledger(None, dataset="digits")
    source.start({}, reasons=["trained without noise"]).close()
    ledger.inherit(source.spending())
    assert ledger.guarantee(1e-5).epsilon is None


def test_uncovered_releases_survive(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    ledger.inherit(spent({Uncovered("raw gradients", STEP): 2}).spending())
    for each in (ledger, Ledger(path)):
        assert total(each) == {Uncovered("raw gradients", STEP): 2}
        assert each.guarantee(1e-5).epsilon is None
    third = Ledger(None, dataset="digits")
    third.inherit(ledger.spending())
    assert third.guarantee(1e-5).reasons == ("raw gradients",)


# -- datasets, units, relations -----------------------------------------------------------------------------------


def test_other_datasets_are_kept_apart_and_named(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    ledger.inherit(spent({STEP: 5}, "letters").spending())
    ledger.inherit(spent({OTHER: 2}, "letters").spending())
    ledger.inherit(spent({STEP: 1}).spending())
    for each in (ledger, Ledger(path)):
        assert total(each) == {STEP: 1}
        assert [(name, dict(counts)) for name, counts in each.elsewhere] == [("letters", {STEP: 5, OTHER: 2})]
        text = "these weights also carry 7 releases on dataset 'letters', which are not part of this number"
        assert text in each.guarantee(1e-5).notes
    # They go on with the weights, and count where their data is.
    letters = Ledger(None, dataset="letters")
    letters.inherit(ledger.spending())
    assert total(letters) == {STEP: 5, OTHER: 2}
    assert letters.elsewhere == (("digits", ((STEP, 1),)),)


def test_another_dataset_without_a_guarantee_is_said_and_not_counted() -> None:
    ledger = Ledger(None, dataset="digits")
    ledger.inherit(spent({Uncovered("raw"): 1}, "letters").spending())
    found = ledger.guarantee(1e-5)
    assert found.epsilon == 0
    assert any("'letters'" in note and "no guarantee there: raw" in note for note in found.notes)


@pytest.mark.parametrize(("theirs", "ours"), [(None, "digits"), ("digits", None), (None, None)])
def test_a_dataset_without_a_name_may_be_any(theirs: str | None, ours: str | None) -> None:
    ledger = Ledger(None, dataset=ours)
    ledger.inherit(spent({STEP: 5}, theirs).spending())
    assert total(ledger) == {STEP: 5}
    assert ledger.elsewhere == ()


def test_another_relation_or_unit_is_refused_and_named(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    with ledger.start({}) as run:
        run.charge(STEP)
    size = path.stat().st_size
    replace = spent({FixedSizeGaussian(4.0, 100, 10): 5}, neighbours="replace-one").spending()
    with pytest.raises(LedgerError, match=r"add-or-remove-one neighbours.*replace-one"):
        ledger.inherit(replace)
    with pytest.raises(LedgerError, match=r"'one example'.*'one patient'"):
        ledger.inherit(spent({STEP: 5}, unit="one patient").spending())
    assert path.stat().st_size == size
    # What concerns other people's data may be counted in any way.
    ledger.inherit(spent({FixedSizeGaussian(4.0, 100, 10): 5}, "letters", neighbours="replace-one").spending())
    assert total(ledger) == {STEP: 1}


def test_an_empty_ledger_takes_relation_and_unit_from_what_it_inherits(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", neighbours=None)
    source = spent({FixedSizeGaussian(4.0, 100, 10): 5}, neighbours="replace-one", unit="one patient")
    ledger.inherit(source.spending())
    for each in (ledger, Ledger(path, neighbours=None)):
        assert each.neighbours is Neighbours.REPLACE_ONE
        assert each.guarantee(1e-5).unit == "one patient"
        with pytest.raises(LedgerError, match="replace-one"):
            each.start({"neighbours": "add-or-remove-one"})
        with pytest.raises(LedgerError, match="one patient"):
            each.start({})


def test_a_new_file_needs_a_dataset(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dataset"):
        Ledger(path).inherit(spent({STEP: 1}).spending())
    assert not path.exists()


# -- what is not spending -----------------------------------------------------------------------------------------

GOOD = spent({STEP: 5, PCA: 1}).spending()


def broken() -> list[tuple[str, Any]]:
    def row(**values: Any) -> dict[str, Any]:
        return {"version": 1, "runs": [{**GOOD["runs"][0], **values}]}

    def without(key: str) -> dict[str, Any]:
        return {"version": 1, "runs": [{k: v for k, v in GOOD["runs"][0].items() if k != key}]}

    event = {"kind": "gaussian", "noise_multiplier": 4.0}
    cases: list[Any] = [
        None, [], "", 5, {}, {"runs": []}, {"version": 1}, {**GOOD, "version": 2}, {**GOOD, "version": True},
        {**GOOD, "version": "1"}, {**GOOD, "more": 1}, {**GOOD, "runs": None}, {**GOOD, "runs": {}},
        {**GOOD, "runs": [5]},
        {**GOOD, "runs": "abc"}, {**GOOD, "runs": GOOD["runs"] * 2},
        *(without(key) for key in GOOD["runs"][0] if key != "filter"),
        *(row(**{key: 5}) for key in GOOD["runs"][0]),
        *(row(**{key: "raw"}) for key in ("events", "assumptions", "reasons", "untried", "filter", "neighbours")),
        row(uid=""), row(uid=None), row(unit=""), row(dataset=""), row(more=1), row(reasons=[""]), row(events=[[]]),
        *(row(events=[[event, count]]) for count in (0, -1, 1.0, "1", None, True)),
        row(events=[[event]]), row(events=[[event, 1, 1]]), row(events=[event]), row(events={"a": 1}),
        *(row(events=[[value, 1]]) for value in (
            {}, None, 5, {"kind": "laplace"}, {"kind": ["gaussian"]}, {"kind": "gaussian"}, {**event, "more": 1},
            *({**event, "noise_multiplier": value} for value in (
                0, -1, float("nan"), float("inf"), "4", None, True, 10**400)),
            {"kind": "poisson-gaussian", "noise_multiplier": 4.0, "rate": 1.5},
            {"kind": "fixed-size-gaussian", "noise_multiplier": 4.0, "examples": 100.5, "lot": 10},
            {"kind": "uncovered", "reason": None, "claimed": None},
            {"kind": "uncovered", "reason": "", "claimed": None},
            {"kind": "uncovered", "reason": "raw", "claimed": {"kind": "gaussian"}}, {5: 6})),
        *(row(filter=value) for value in (
            {}, {"uid": "a", "order": 2.0}, {"uid": "a", "order": 1.0, "divergence": 1.0},
            {"uid": "a", "order": 2.0, "divergence": -1.0}, {"uid": "", "order": 2.0, "divergence": 1.0},
            {"uid": "a", "order": float("nan"), "divergence": 1.0})),
    ]  # fmt: skip
    return [(str(number), case) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "spending"), broken())
def test_what_cannot_be_read_is_refused_and_changes_nothing(path: Path, name: str, spending: Any) -> None:
    ledger = Ledger(path, dataset="digits")
    ledger.inherit(GOOD)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.inherit(spending)
    assert path.read_bytes() == before
    assert total(ledger) == {STEP: 5, PCA: 1}


def test_nothing_spent_is_nothing_to_write(path: Path) -> None:
    Ledger(path, dataset="digits").inherit(Ledger().spending())
    assert not path.exists()


def test_one_run_in_two_versions_is_refused() -> None:
    ledger = Ledger(None, dataset="digits")
    ledger.inherit(GOOD)
    edited = copy.deepcopy(GOOD)
    edited["runs"][0]["dataset"] = "letters"
    with pytest.raises(LedgerError, match="edited"):
        ledger.inherit(edited)
    with ledger.start({}) as run:
        run.charge(STEP)
    own = ledger.spending()
    own["runs"][0]["dataset"] = "letters"
    with pytest.raises(LedgerError, match="'letters' in the weights"):
        ledger.inherit(own)


# -- durability and budgets ---------------------------------------------------------------------------------------


def test_it_is_on_the_disk_before_it_counts_and_all_of_it_or_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = spent({STEP: 5})
    with source.start({}) as run:
        run.charge(OTHER, 2)
    copies: list[Path] = []
    append = Chain.append

    def appended(chain: Chain, body: Record) -> None:
        append(chain, body)
        copy_ = path.with_name(f"{len(copies)}.jsonl")
        shutil.copy(path, copy_)
        shutil.copy(path.with_name(path.name + ".head"), copy_.with_name(copy_.name + ".head"))
        copies.append(copy_)

    monkeypatch.setattr(Chain, "append", appended)
    Ledger(path, dataset="digits").inherit(source.spending())
    monkeypatch.undo()
    assert [total(Ledger(each)) for each in copies] == [{}, {STEP: 5, OTHER: 2}]

    def full(*_: object) -> None:
        raise LedgerError("no space left on device")

    ledger = Ledger(None, dataset="digits")
    on_disk = Ledger(path)
    monkeypatch.setattr(Chain, "append", full)
    with pytest.raises(LedgerError, match="no space"):
        on_disk.inherit(spent({PCA: 1}).spending())
    assert PCA not in total(on_disk)
    assert total(ledger) == {}


def test_another_run_holds_the_file(path: Path) -> None:
    with Ledger(path, dataset="digits").start({}), pytest.raises(LedgerError, match="in use"):
        Ledger(path).inherit(GOOD)
    Ledger(path).inherit(GOOD)


def test_what_is_inherited_counts_against_an_open_runs_budget() -> None:
    ledger = Ledger(None, dataset="digits")
    with ledger.start({}, budget=Budget(1.0, 1e-5), accountant="rdp") as run:
        run.charge(STEP)
        assert sum(run._left.values()) > 0
        ledger.inherit(spent({Gaussian(1.0): 5}).spending())
        with pytest.raises(BudgetExhaustedError):
            run.charge(STEP)
    with ledger.start({}, budget=Budget(1.0, 1e-5)) as run, pytest.raises(BudgetExhaustedError):
        run.charge(STEP)


def test_runs_of_a_filter_cost_all_of_it_once(path: Path) -> None:
    source = Ledger(None, dataset="digits", budget=Budget(2.0, 1e-5))
    for _ in range(3):
        with source.start({}) as run:
            run.charge(STEP)
    ledger = Ledger(path, dataset="digits")
    ledger.inherit(source.spending())
    with source.start({}) as run:
        run.charge(STEP)
    ledger.inherit(source.spending())
    for each in (ledger, Ledger(path)):
        ((block, count),) = each.composition()
        assert isinstance(block, RenyiBlock)
        assert count == 1
        # Whatever accountant is asked for, none but rdp can say it.
        assert 1.9 < each.guarantee(1e-5, accountant="pld").require() <= 2.0
        assert dict(each.charged()) == {STEP: 4}
    with ledger.start({}) as run:
        run.charge(STEP)
    assert ledger.guarantee(1e-5).require() > 2.0
    assert PLANNED_TOGETHER in ledger.guarantee(1e-5).assumptions
    # Back where the filter is, its runs are its own, and the new one goes through it.
    source.inherit(ledger.spending())
    assert dict(source.charged()) == {STEP: 5}
    assert source.guarantee(1e-5).require() <= 2.0
