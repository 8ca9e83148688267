"""The ledger: what it remembers, what it refuses, what it costs."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Event, FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.accounting.ledger import MOST_RESERVED, Budget, Ledger, dataset_fingerprint
from adadp.accounting.unused import boot_id
from adadp.errors import AccountingError, BudgetExhaustedError, ConfigurationError, LedgerError, LedgerNotice

STEP = PoissonGaussian(4.0, 0.05)
PCA = Gaussian(16.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def make(path: Path, steps: int = 100) -> None:
    ledger = Ledger(path, dataset="digits")
    with ledger.start({"steps": steps}) as run:
        run.charge(PCA)
        for _ in range(steps):
            run.charge(STEP)


def charged(ledger: Ledger) -> dict[Event, int]:
    return dict(ledger.composition())


@pytest.mark.parametrize("on_disk", [True, False])
def test_counts_what_was_charged(path: Path, on_disk: bool) -> None:
    ledger = Ledger(path if on_disk else None, dataset="digits")
    with ledger.start({"steps": 3000}) as run:
        run.charge(PCA, 2)
        for step in range(1, 2501):
            run.charge(STEP)
            if step % 700 == 0:
                assert dict(ledger.charged()) == {PCA: 2, STEP: step}
                assert charged(ledger) == {PCA: 2, STEP: 3000}
    for each in (ledger, Ledger(path, dataset="digits") if on_disk else ledger):
        assert dict(each.charged()) == {PCA: 2, STEP: 2500}
        assert charged(each) == {PCA: 2, STEP: 3000}  # as planned


def test_many_runs_compose(path: Path) -> None:
    make(path, 50)
    make(path, 70)
    ledger = Ledger(path)
    assert charged(ledger) == {PCA: 2, STEP: 120}
    assert [run.closed for run in ledger.runs] == [True, True]
    assert ledger.guarantee(1e-5).epsilon == Ledger(path).guarantee(1e-5).epsilon


def test_a_run_that_did_not_close_is_charged_in_full(path: Path) -> None:
    code = (
        "import os, sys\n"
        "from adadp.accounting.ledger import Ledger\n"
        "from adadp.accounting.events import PoissonGaussian\n"
        "run = Ledger(sys.argv[1], dataset='digits').start({})\n"
        "for _ in range(5000): run.charge(PoissonGaussian(4.0, 0.05))\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    ledger = Ledger(path)
    assert 5000 <= charged(ledger)[STEP] <= 5000 + MOST_RESERVED
    # And the next run goes on in the same ledger.
    before = charged(ledger)[STEP]
    with ledger.start({}) as run:
        run.charge(STEP, 10)
    # Then it is known what the dead one did not release, if the system says that it was not restarted since.
    assert charged(Ledger(path))[STEP] == (5000 if boot_id() else before) + 10


def test_a_run_closes_when_the_process_ends_normally(path: Path) -> None:
    code = (
        "import sys\n"
        "from adadp.accounting.ledger import Ledger\n"
        "from adadp.accounting.events import PoissonGaussian\n"
        "run = Ledger(sys.argv[1], dataset='digits').start({})\n"
        "for _ in range(300): run.charge(PoissonGaussian(4.0, 0.05))\n"
        "raise RuntimeError('training failed')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, stderr=subprocess.DEVNULL)
    assert charged(Ledger(path)) == {STEP: 300}


# -- refusals ---------------------------------------------------------------------------------------------------


def refused(path: Path, match: str, **options: Any) -> None:
    """The ledger is refused for reading and for writing, and not one byte changes."""
    head = path.with_name(path.name + ".head")
    before = [each.read_bytes() if each.exists() else None for each in (path, head)]
    with pytest.raises(LedgerError, match=match):
        Ledger(path, **options)
    assert [each.read_bytes() if each.exists() else None for each in (path, head)] == before


def test_another_dataset_is_refused(path: Path) -> None:
    make(path)
    refused(path, "'digits', not to 'letters'", dataset="letters")


def test_another_relation_is_refused(path: Path) -> None:
    make(path)
    refused(path, "add-or-remove-one neighbours, not for replace-one", neighbours=Neighbours.REPLACE_ONE)
    with pytest.raises(LedgerError, match="replace-one"):
        Ledger(path).start({"neighbours": "replace-one"})
    assert Ledger(path, neighbours=None).neighbours is Neighbours.ADD_REMOVE


def test_the_first_plan_may_fix_the_relation(path: Path) -> None:
    ledger = Ledger(path, dataset="digits", neighbours=None)
    with ledger.start({"neighbours": "replace-one"}) as run:
        run.charge(FixedSizeGaussian(2.0, 100, 10))
    assert Ledger(path, neighbours=None).neighbours is Neighbours.REPLACE_ONE
    refused(path, "replace-one neighbours, not for add-or-remove-one")


def test_a_new_file_needs_a_dataset(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dataset"):
        Ledger(path).start({})
    assert list(path.parent.iterdir()) == []


def test_asking_and_charging_from_two_threads_never_waits_for_ever(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    run = ledger.start({})
    asking = threading.Thread(target=lambda: [ledger.composition() for _ in range(3000)], daemon=True)
    asking.start()
    for _ in range(3000):
        run.charge(STEP)
    asking.join(timeout=30)
    assert not asking.is_alive()
    run.close()
    assert charged(ledger) == {STEP: 3000}


@pytest.mark.parametrize("drop", [1, 2, 3])
def test_truncation_at_the_end_is_seen(path: Path, drop: int) -> None:
    make(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-drop]))
    refused(path, "truncated")


def test_a_line_cut_in_the_middle_is_seen(path: Path) -> None:
    make(path)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, "truncated")


def test_an_emptied_or_missing_file_is_seen(path: Path) -> None:
    make(path)
    path.write_bytes(b"")
    refused(path, "truncated")
    path.unlink()
    refused(path, "truncated")


def test_a_missing_or_damaged_head_is_seen(path: Path) -> None:
    make(path)
    head = path.with_name(path.name + ".head")
    content = head.read_bytes()
    head.write_bytes(b"x" * len(content))
    refused(path, "head file")
    head.unlink()
    refused(path, "head file")


def test_every_edited_byte_is_seen(path: Path) -> None:
    make(path, 20)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        edited = bytearray(content)
        edited[position] ^= 1
        path.write_bytes(bytes(edited))
        with pytest.raises(LedgerError):
            Ledger(path)
    path.write_bytes(content)
    Ledger(path)


def test_removed_reordered_and_rewritten_lines_are_seen(path: Path) -> None:
    make(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (lines[:2] + lines[3:], [lines[0], lines[2], lines[1], *lines[3:]], lines[1:]):
        path.write_bytes(b"".join(wrong))
        refused(path, "edited|truncated")
    # A consistent chain of another ledger, put in this one's place.
    other = path.with_name("other.jsonl")
    make(other, 90)
    path.write_bytes(other.read_bytes())
    refused(path, "rewritten|truncated")


def test_a_torn_last_line_costs_nothing_and_is_dropped(path: Path) -> None:
    make(path)
    intact = path.read_bytes()
    path.write_bytes(intact + b'{"count":64,"event":{"ki')
    ledger = Ledger(path)
    assert charged(ledger)[STEP] == 100
    with ledger.start({}) as run:
        run.charge(STEP)
    assert path.read_bytes().startswith(intact)
    assert charged(Ledger(path))[STEP] == 101


def test_a_torn_head_falls_back_to_the_one_before(path: Path) -> None:
    make(path)
    head = path.with_name(path.name + ".head")
    slots = head.read_bytes()
    newest = max((0, 256), key=lambda start: json.loads(slots[start : start + 256])["count"])
    torn = slots[:newest] + slots[newest : newest + 60].ljust(256) + slots[newest + 256 :]
    head.write_bytes(torn)
    assert charged(Ledger(path))[STEP] == 100


def test_only_one_process_appends(path: Path) -> None:
    make(path)
    with Ledger(path).start({}) as run:
        with pytest.raises(LedgerError, match=r"in use by an earlier run of this process.*engine\.close\(\)"):
            Ledger(path).start({})
        run.charge(STEP)
        assert charged(Ledger(path))[STEP] >= 101  # reading needs no lock
    with Ledger(path).start({}):
        pass


def hold(path: Path, held: Any, seconds: float) -> None:
    with Ledger(path).start({}):
        held.set()
        time.sleep(seconds)


def test_another_process_is_waited_for_and_that_is_said(path: Path) -> None:
    make(path)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold, args=(path, held, 1.0))
    process.start()
    assert held.wait(60)
    with pytest.warns(LedgerNotice, match=r"waiting up to 0\.1 s"), pytest.raises(LedgerError, match="another process"):
        Ledger(path, wait=0.1).start({})
    with pytest.warns(LedgerNotice, match="waiting up to 60 s"), Ledger(path, wait=60).start({}) as run:
        run.charge(STEP)
    process.join()
    assert charged(Ledger(path))[STEP] == 101


def test_a_forked_child_can_neither_charge_nor_close(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({})
    run.charge(STEP)
    size = path.stat().st_size

    def child(queue: Any) -> None:
        try:
            run.charge(STEP)
        except LedgerError as error:
            queue.put(str(error))
        run.close()

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert "another process" in queue.get(timeout=20)
    process.join()
    assert path.stat().st_size == size
    run.close()
    assert charged(Ledger(path)) == {STEP: 1}


def test_a_seed_is_used_once(path: Path) -> None:
    Ledger(path, dataset="digits").start({}, seed=7).close()
    assert json.loads(path.read_text().splitlines()[1])["seed"] != "7"
    for ledger in (Ledger(path),):
        with pytest.raises(LedgerError, match="seed"):
            ledger.start({}, seed=7)
        ledger.start({}, seed=8).close()
    memory = Ledger()
    memory.start({}, seed=7).close()
    with pytest.raises(LedgerError, match="seed"):
        memory.start({}, seed=7)


def test_resuming_needs_the_same_plan(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    first = ledger.start({"steps": 100, "lot": 10})
    first.charge(STEP, 40)
    with pytest.raises(LedgerError, match="still open"):
        ledger.start({"steps": 100, "lot": 10}, resume=first.id)
    first.close()
    with pytest.raises(LedgerError, match="lot was 10 and is 20"):
        ledger.start({"steps": 100, "lot": 20}, resume=first.id)
    with pytest.raises(LedgerError, match="no run"):
        ledger.start({}, resume="run-9")
    with ledger.start({"steps": 100, "lot": 10}, resume=first.id) as second:
        second.charge(STEP, 60)
    assert charged(Ledger(path)) == {STEP: 100}


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_bad_counts_are_refused(count: Any) -> None:
    run = Ledger().start({})
    run.charge(STEP, 5)
    with pytest.raises(ConfigurationError):
        run.charge(STEP, count)
    run.close()
    with pytest.raises(LedgerError, match="closed"):
        run.charge(STEP)


def test_plans_are_plain_json() -> None:
    with pytest.raises(ConfigurationError, match="JSON"):
        Ledger().start({"value": float("nan")})


def test_a_failed_write_stops_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ledger(path, dataset="digits").start({})
    run.charge(STEP)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(LedgerError, match="no space"):
        run.charge(STEP, 5000)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="earlier write"):
        run.charge(STEP, 5000)
    with pytest.raises(LedgerError):
        run.close()
    assert charged(Ledger(path))[STEP] >= 1


def test_what_another_process_charged_is_not_forgotten(path: Path) -> None:
    mine, theirs = Ledger(path, dataset="digits"), Ledger(path, dataset="digits")
    mine.start({}).close()
    with theirs.start({}) as run:
        run.charge(STEP, 500)
        assert charged(mine)[STEP] >= 500
    assert charged(mine) == {STEP: 500}
    assert len(mine.runs) == 2
    assert mine.guarantee(1e-5).require() > 0


def test_a_ledger_that_vanishes_or_starts_anew_is_refused_by_whoever_read_it(path: Path) -> None:
    make(path)
    ledger = Ledger(path)
    files = [path, path.with_name(path.name + ".head")]
    for file in files:
        file.unlink()
    for ask in (ledger.composition, lambda: ledger.start({})):
        with pytest.raises(LedgerError, match="truncated"):
            ask()
    for file in files:
        file.unlink(missing_ok=True)
    make(path)
    with pytest.raises(LedgerError, match="rewritten"):
        ledger.composition()


@pytest.mark.parametrize("suffix", ["", ".head"])
@pytest.mark.parametrize("how", ["removed", "replaced", "written to"])
def test_a_file_that_changes_while_it_is_open_is_refused(path: Path, suffix: str, how: str) -> None:
    run = Ledger(path, dataset="digits").start({})
    run.charge(STEP)
    file = path.with_name(path.name + suffix)
    if how == "removed":
        file.unlink()
    elif how == "replaced":  # as an editor does
        copy = path.with_name("copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
    elif suffix:
        pytest.skip("a head is checked when it is read")
    else:
        with file.open("ab") as stream:
            stream.write(b"{}")
    with pytest.raises(LedgerError, match="while it was open"):
        run.charge(STEP, 5000)
    with pytest.raises(LedgerError, match="while it was open"):
        run.close()


def test_a_crash_or_a_full_disk_before_the_first_record_leaves_a_usable_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(LedgerError, match="no space"):
        Ledger(path, dataset="digits").start({})
    monkeypatch.undo()
    make(path)
    assert charged(Ledger(path)) == {PCA: 1, STEP: 100}


def test_a_path_that_cannot_be_written_is_a_ledger_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        Ledger(tmp_path / "file" / "ledger.jsonl", dataset="digits").start({})


def test_a_child_forked_while_a_thread_charges_does_not_wait_for_it(path: Path) -> None:
    ledger = Ledger(path, dataset="digits")
    run = ledger.start({})
    run.charge(STEP)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger._mutex:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run.charge(STEP)
        except LedgerError:
            run.close()
            code = 0
        os._exit(code)
    ended, status = 0, -1
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert (ended, status) == (child, 0)
    run.close()
    assert charged(Ledger(path)) == {STEP: 1}


def test_a_release_given_back_while_it_was_charged_does_not_happen(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({})

    class Interrupted(dict[Event, int]):
        def get(self, *arguments: Any) -> Any:
            value = super().get(*arguments)
            run.close()  # what a signal's handler may do at any moment
            return value

    run.charge(STEP)
    run._left = Interrupted({STEP: 1})
    run._reserved[STEP] += 1
    run._ledger._reserve(run.id, STEP, 1)
    with pytest.raises(LedgerError, match="closed"):
        run.charge(STEP)
    assert charged(Ledger(path)) == {STEP: 1}


# -- budgets ----------------------------------------------------------------------------------------------------


def release_all(ledger: Ledger, planned: int, budget: Budget, accountant: str = "pld") -> tuple[int, str]:
    done, message = 0, ""
    with ledger.start({"steps": planned}, budget=budget, accountant=accountant) as run:
        try:
            run.charge(PCA)
            for _ in range(planned):
                run.charge(STEP)
                done += 1
        except BudgetExhaustedError as error:
            message = str(error)
    return done, message


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_budget_is_kept_and_used_up(path: Path, accountant: str) -> None:
    from adadp.accounting.accountants import get_accountant

    ledger = Ledger(path, dataset="digits")
    budget = Budget(1.0, 1e-5)
    done, message = release_all(ledger, 5000, budget, accountant)
    assert f"{5000 - done:,} of 5,000 planned steps were left out" in message
    spent = get_accountant(accountant)
    assert spent.epsilon(ledger.composition(), 1e-5).epsilon <= 1.0
    # One step more would not have fitted: the budget is used to the end.
    assert spent.epsilon([*ledger.composition(), (STEP, 1)], 1e-5).epsilon > 1.0
    assert charged(Ledger(path)) == {PCA: 1, STEP: done}
    # Nothing is left for another run.
    done, message = release_all(Ledger(path), 100, budget, accountant)
    assert done == 0
    assert "does not allow" in message


def test_a_plan_that_fits_runs_to_its_end() -> None:
    done, message = release_all(Ledger(), 300, Budget(3.0, 1e-5))
    assert (done, message) == (300, "")


def test_events_that_take_turns_share_the_budget() -> None:
    from adadp.accounting.accountants import get_accountant

    ledger, other = Ledger(), PoissonGaussian(2.0, 0.02)
    started = time.perf_counter()
    with ledger.start({}, budget=Budget(2.0, 1e-5), accountant="rdp") as run:

        def take_turns() -> None:
            for _ in range(10**6):
                run.charge(STEP)
                run.charge(other)

        with pytest.raises(BudgetExhaustedError):
            take_turns()
    cost = get_accountant("rdp").epsilon(ledger.composition(), 1e-5).epsilon
    assert 1.99 <= cost <= 2.0
    assert time.perf_counter() - started < 20


def test_what_is_given_back_to_make_room_is_reserved_again_before_it_is_used(path: Path) -> None:
    # Room for 100 steps, of which 90 are reserved and 20 unused, when 25 are wanted at once.
    budget = Budget(get_accountant("rdp").epsilon({STEP: 100}, 1e-5).epsilon * (1 + 1e-9), 1e-5)
    ledger = Ledger(path, dataset="digits")
    with ledger.start({}, budget=budget, accountant="rdp") as run:
        run.charge(STEP, 90)
        run._left[STEP] = 20
        other = PoissonGaussian(40.0, 0.05)
        run._reserved[other] = run._left[other] = 100
        ledger._reserve(run.id, other, 100)
        run.charge(STEP, 25)
        assert min(run._left.values()) >= 0
        assert charged(Ledger(path))[STEP] >= charged(ledger)[STEP] == 95
        with pytest.raises(BudgetExhaustedError):
            run.charge(STEP, 6)
        run.charge(STEP, 5)
    assert charged(Ledger(path)) == {STEP: 100}


@pytest.mark.parametrize("accountant", ["rdp", "theorem1"])
@pytest.mark.parametrize("seed", range(4))
def test_no_interleaving_exceeds_the_budget_or_the_record(path: Path, accountant: str, seed: int) -> None:
    choose = random.Random(seed)
    events = [PoissonGaussian(2.0, 0.01), PoissonGaussian(4.0, 0.1), Gaussian(20.0)]
    budget = Budget(choose.choice([1.0, 3.0]), 1e-5)
    ledger = Ledger(path, dataset="digits")
    runs = [ledger.start(plan, budget=budget, accountant=accountant) for plan in ({}, {"steps": 400})]
    released: dict[Event, int] = {}
    refused = 0
    for _ in range(300):
        event, count = choose.choices(events, [10, 10, 0.2])[0], choose.choice([1, 1, 20, 300])
        try:
            choose.choice(runs).charge(event, count)
        except BudgetExhaustedError:
            refused += 1
            if refused == 8:
                break
            continue
        released[event] = released.get(event, 0) + count
        on_disk = charged(Ledger(path))
        assert all(on_disk[each] >= total for each, total in released.items())
    assert refused
    ledger.close()
    assert dict(Ledger(path).charged()) == released
    on_disk = charged(Ledger(path))
    assert all(on_disk[each] >= total for each, total in released.items())
    assert get_accountant(accountant).epsilon(on_disk, budget.delta).epsilon <= budget.epsilon


@pytest.mark.parametrize("other", [None, Budget(50.0, 1e-5)])
def test_a_reservation_is_checked_again_when_a_run_of_another_budget_spends(other: Budget | None) -> None:
    ledger, budget = Ledger(), Budget(2.0, 1e-5)
    careful = ledger.start({"steps": 1000}, budget=budget, accountant="rdp")
    careful.charge(STEP)
    assert careful._left[STEP] > 100  # reserved, and within the budget as it was
    with ledger.start({}, budget=other, accountant="rdp") as careless:
        careless.charge(Gaussian(1.0), 5)
    with pytest.raises(BudgetExhaustedError):
        careful.charge(STEP)
    assert careful.charged()[STEP] == 1


def test_unused_reservations_do_not_eat_the_budget() -> None:
    """Reserved steps that were never made are given back before the budget is called exhausted."""
    ledger = Ledger()
    with ledger.start({}, budget=Budget(1.5, 1e-5), accountant="rdp") as run:
        run.charge(PoissonGaussian(1.0, 0.01))
        assert sum(run._left.values()) > 100
        run.charge(Gaussian(6.0))
    assert dict(ledger.composition())[Gaussian(6.0)] == 1


def test_no_budget_over_what_no_proof_covers() -> None:
    ledger = Ledger()
    with ledger.start({}, budget=Budget(1.0, 1e-5)) as run, pytest.raises(AccountingError, match="raw"):
        run.charge(Uncovered("raw norms were released"))
    with ledger.start({}) as run:
        run.charge(Uncovered("raw norms were released"))
    with pytest.raises(AccountingError, match="raw"):
        ledger.start({}, budget=Budget(1.0, 1e-5))
    assert ledger.guarantee(1e-5).epsilon is None


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (float("nan"), 1e-5), (1, 0), (1, 1)])
def test_bad_budgets_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigurationError):
        Budget(epsilon, delta)


# -- cost -------------------------------------------------------------------------------------------------------


def test_a_charge_costs_microseconds(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({})
    for _ in range(3000):
        run.charge(STEP)
    started = time.perf_counter()
    for _ in range(20000):
        run.charge(STEP)
    per_step = (time.perf_counter() - started) / 20000
    run.close()
    assert per_step < 100e-6


def test_slow_steps_reserve_little(path: Path) -> None:
    run = Ledger(path, dataset="digits").start({})
    for _ in range(5):
        run.charge(STEP)
        time.sleep(0.3)
    run.charge(STEP)
    assert sum(run._left.values()) < 64
    run.close()


def test_a_keyed_name_hides_the_data() -> None:
    key = b"0123456789abcdef"
    name = dataset_fingerprint([b"rows", b"labels"], key)
    assert name == dataset_fingerprint([b"rows", b"labels"], key)
    assert name != dataset_fingerprint([b"rowsl", b"abels"], key)
    assert name != dataset_fingerprint([b"rows", b"labels"], key[::-1])
    with pytest.raises(ConfigurationError):
        dataset_fingerprint([b"rows"], b"short")


def test_recording_needs_no_numerical_library() -> None:
    code = (
        "import sys, types\n"
        # The package itself may export the training engine; what is measured is the accounting side.
        "package = types.ModuleType('adadp'); package.__path__ = [sys.argv[1]]; sys.modules['adadp'] = package\n"
        "import adadp.accounting.events, adadp.accounting.guarantee\n"
        "from adadp.accounting.ledger import Ledger\n"
        "from adadp.accounting.events import Gaussian\n"
        "Ledger().start({}).charge(Gaussian(1.0))\n"
        "heavy = {'torch', 'numpy', 'scipy', 'dp_accounting'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    import adadp

    folder = str(Path(str(adadp.__file__)).parent)
    subprocess.run([sys.executable, "-c", code, folder], check=True)
