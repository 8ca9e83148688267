"""A damaged ledger is refused, or reads as at least as much spent: never as less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzz import damaged, read_or_refused
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from adadp.accounting.chain import Chain, _hash, _head_slot, canonical_json
from adadp.accounting.events import Event, Gaussian, PoissonGaussian
from adadp.accounting.ledger import Ledger
from adadp.errors import LedgerError

STEP, PCA = PoissonGaussian(4.0, 0.05), Gaussian(16.0)
SLOT = 256


def write(path: Path, runs: int = 3) -> None:
    ledger = Ledger(path, dataset="digits")
    for number in range(runs):
        with ledger.start({"number": number}) as run:
            run.charge(PCA)
            run.charge(STEP, 40 + number)


def pair_of(folder: Path, runs: int = 3) -> tuple[bytes, bytes]:
    path = folder / f"of-{runs}.jsonl"
    if not path.exists():
        write(path, runs)
    return path.read_bytes(), path.with_name(path.name + ".head").read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return pair_of(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "spent.jsonl"


def put(path: Path, lines: bytes, head: bytes | None) -> None:
    path.write_bytes(lines)
    other = path.with_name(path.name + ".head")
    other.unlink(missing_ok=True)
    if head is not None:
        other.write_bytes(head)


def spent(path: Path) -> dict[Event, int] | None:
    ledger = read_or_refused(lambda: Ledger(path), path)
    return None if ledger is None else dict(ledger.composition())


def not_less(path: Path, whole: dict[Event, int]) -> None:
    found = spent(path)
    assert found is None or all(found.get(event, 0) >= count for event, count in whole.items()), found


WHOLE: dict[Event, int] = {PCA: 3, STEP: 123}
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_damage_to_either_file_never_makes_it_cheaper(
    data: st.DataObject, files: tuple[bytes, bytes], path: Path
) -> None:
    lines, head = files
    where = data.draw(st.sampled_from(["lines", "head", "both"]))
    put(
        path,
        data.draw(damaged(lines)) if where != "head" else lines,
        data.draw(damaged(head)) if where != "lines" else head,
    )
    assume(path.stat().st_size)  # an emptied file and a damaged head: see below
    not_less(path, WHOLE)


def test_it_may_end_anywhere(files: tuple[bytes, bytes], path: Path) -> None:
    lines, head = files
    for end in [*range(0, len(lines), 37), *(n for n, byte in enumerate(lines) if byte == 10)]:
        put(path, lines[:end], head)
        with pytest.raises(LedgerError, match="truncated"):
            Ledger(path)
    for end in range(0, len(head), 11):
        put(path, lines, head[:end])
        not_less(path, WHOLE)


@pytest.mark.parametrize("kept", [1, 2, 3, 5, 9, 12])
def test_a_cut_at_a_line_with_any_part_of_its_head_damaged_is_seen(
    files: tuple[bytes, bytes], path: Path, kept: int
) -> None:
    lines, head = files
    start = b"".join(lines.splitlines(keepends=True)[:-kept])
    for changed in (
        head,
        head[:SLOT],
        head[SLOT:],
        head[:SLOT] + b"\0" * SLOT,
        b"\0" * SLOT + head[SLOT:],
        head[SLOT:] + head[:SLOT],
        head[:SLOT] * 2,
        head[SLOT:] * 2,
        _head_slot(0, Chain(path)._head),
        b"",
        None,
    ):
        put(path, start, changed)
        found = read_or_refused(lambda: Ledger(path), path)
        assert found is None or not found.runs, changed  # or nothing but the header is left: the ledger begins anew


def test_swapped_lines_and_heads_of_other_ledgers_are_seen(tmp_path: Path, path: Path) -> None:
    lines, head = pair_of(tmp_path)
    rows = lines.splitlines(keepends=True)
    for first in range(len(rows)):
        for second in range(first + 1, len(rows)):
            moved = list(rows)
            moved[first], moved[second] = moved[second], moved[first]
            put(path, b"".join(moved), head)
            with pytest.raises(LedgerError, match="edited"):
                Ledger(path)
    for runs in (1, 2, 4):
        put(path, lines, pair_of(tmp_path, runs)[1])
        with pytest.raises(LedgerError, match=r"rewritten|truncated"):
            Ledger(path)


def test_an_older_head_beside_all_lines_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    write(path, 2)
    head = path.with_name(path.name + ".head")
    older = head.read_bytes()
    write(path, 1)
    before = spent(path)
    head.write_bytes(older)  # from a backup of that file alone
    assert spent(path) == before == {PCA: 3, STEP: 121}


def test_files_put_back_together_are_not_seen_but_by_a_kept_head(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    head = path.with_name(path.name + ".head")
    write(path, 2)
    backup = path.read_bytes(), head.read_bytes()
    write(path, 1)
    kept = head.read_bytes()
    put(path, *backup)
    assert spent(path) == {PCA: 2, STEP: 81}  # docs/accounting.md says so
    head.write_bytes(kept)
    with pytest.raises(LedgerError, match="truncated"):
        Ledger(path)


@pytest.mark.parametrize("crash", ["before the head", "within the head"])
@pytest.mark.parametrize("records", [0, 1, 4])
def test_after_a_crash_between_line_and_head_it_goes_on(tmp_path: Path, crash: str, records: int) -> None:
    path = tmp_path / "chain"
    chain, head = Chain(path), tmp_path / "chain.head"
    chain.lock()
    for number in range(records):
        chain.append({"kind": str(number)})
    before = head.read_bytes()
    chain.append({"kind": "last"})
    chain.unlock()
    slot = (records + 1) % 2 * SLOT
    torn = before[:slot] + b'{"count": 1'.ljust(SLOT) + before[slot + SLOT :]
    head.write_bytes(before if crash == "before the head" else torn)
    for _ in range(3):
        chain = Chain(path)
        assert len(chain.read()) > records
        count = len(chain.lock())
        chain.unlock()
        assert len(Chain(path).read()) == count  # opening it for writing brought the head up to date
        lines = path.read_bytes()
        path.write_bytes(b"".join(lines.splitlines(keepends=True)[:-1]))
        with pytest.raises(LedgerError):
            Chain(path).read()
        path.write_bytes(lines)
        chain.lock()
        chain.append({"kind": "more"})
        chain.unlock()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(FUZZ, max_examples=60)
@given(number=st.integers(0, 12), key=st.integers(0, 12), value=VALUES)
@example(number=2, key=0, value=10**400)
@example(number=2, key=1, value={"kind": "gaussian", "noise_multiplier": "16"})
@example(number=2, key=1, value={"kind": "poisson-gaussian", "noise_multiplier": 1e-300, "rate": 1})
def test_a_record_that_makes_no_sense_is_refused_even_if_its_hashes_fit(
    files: tuple[bytes, bytes], path: Path, number: int, key: int, value: Any
) -> None:
    rows = [json.loads(line) for line in files[0].splitlines()]
    row = rows[number % len(rows)]
    keys = sorted(set(row) - {"n", "prev", "hash"})
    row[keys[key % len(keys)]] = value
    chain, before = Chain(path), Chain(path)._head
    text = b""
    for row in rows:
        row = {**{name: part for name, part in row.items() if name != "hash"}, "prev": before}
        before = _hash(row)
        text += canonical_json({**row, "hash": before}).encode() + b"\n"
    slots = [_head_slot(len(rows) - 1, chain._head), _head_slot(len(rows), before)]
    put(path, text, b"".join(slots if len(rows) % 2 else reversed(slots)))
    ledger = read_or_refused(lambda: Ledger(path), path)
    if ledger is not None:
        read_or_refused(lambda: ledger.guarantee(1e-5, accountant="rdp"), path)
