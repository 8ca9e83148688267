"""`adadp train` in several processes that is stopped, killed and resumed; and under torchrun itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adadp.accounting.ledger import Ledger
from adadp.checkpoint import read
from distributed.commanded import STEPS, resumed, stopped, table, until_killed
from distributed.team import TIMEOUT, Answer, size_of, start, values, wait_for_releases


def charged(ledger: Path) -> int:
    return sum(count for _, count in Ledger(ledger).charged())


@pytest.mark.parametrize(("who", "seed", "then"), [(0, None, 2), (1, 8, 2), (1, None, 1), (0, 9, 1)])
def test_one_process_is_asked_and_all_stop(tmp_path: Path, who: int, seed: int | None, then: int) -> None:
    folder = tmp_path / "run"
    (said, released), (told, others) = values(2, tmp_path, stopped, str(folder), who, seed)
    made = len(released)
    assert 3 < made < STEPS
    assert said.startswith(f"stopped after {made} of {STEPS} steps; charged so far")
    assert f"Go on with: adadp train --resume {folder}" in said
    assert told == f"in process 0: {said}"
    assert others == released  # the same noise on the same sums
    assert read(folder / "checkpoint.safetensors").checkpoint.values["lot"] == made
    assert charged(folder / "ledger.jsonl") == made
    for steps, more in values(then, tmp_path, resumed, str(folder), seed):
        assert steps == STEPS
        assert len(more) == STEPS - made
        assert not set(more) & set(released)
    assert charged(folder / "ledger.jsonl") == STEPS


@pytest.mark.filterwarnings("ignore::adadp.errors.CheckpointWarning")
@pytest.mark.parametrize(("seed", "then"), [(None, 2), (8, 2), (9, 1)])
def test_lots_that_are_repeated_have_new_noise_and_are_charged(tmp_path: Path, seed: int | None, then: int) -> None:
    folder = tmp_path / "run"
    (_, released), _ = values(2, tmp_path, stopped, str(folder), 0, seed)
    (folder / "checkpoint.safetensors").unlink()  # the one before is used
    repeated = len(released) - read(folder / "checkpoint.safetensors").checkpoint.values["lot"]
    assert repeated > 0
    for steps, more in values(then, tmp_path, resumed, str(folder), seed):
        assert steps == STEPS
        assert len(more) == STEPS - len(released) + repeated
        assert not set(more) & set(released)
    assert charged(folder / "ledger.jsonl") == STEPS + repeated


# ---- kill -9 --------------------------------------------------------------------------------------------------------


def kill_at_random(folder: Path, times: int, seed: int) -> None:
    """Each run loses a process at a random moment, the other ends by an error, and both go on with it."""
    chance = random.Random(seed)
    rows = table(folder / "table.csv")
    ledger = Path(f"{rows}.adadp-ledger.jsonl")
    interrupted = 0
    for number in range(times):
        victim, place = number % 2, folder / f"run-{number}"
        members = start(2, folder, until_killed, str(folder), number, timeout=20)
        # Counted in releases, since the same seconds are a whole run on one machine and its start on another. The
        # first release of process 0 is the preprocessing's.
        wait_for(place)
        wait_for_releases(folder / f"released-{victim}", chance.randrange(STEPS + 2), (place / "result.json").exists)
        time.sleep(chance.uniform(0, 0.02))
        members[victim].process.kill()
        began = time.monotonic()
        answer = members[1 - victim].answer()
        assert time.monotonic() - began < TIMEOUT
        members[victim].answer()
        check_charged(folder, ledger)
        if (place / "result.json").exists():
            continue
        interrupted += 1
        assert answer.error.startswith("DistributedError: the processes could not"), answer
        if (place / "run.json").exists():
            assert f"Go on with: adadp train --resume {place}" in answer.error
        else:
            shutil.rmtree(place)  # it had not begun
        for found in [member.answer() for member in start(2, folder, until_killed, str(folder), number)]:
            assert found == Answer(), found
        assert json.loads((place / "result.json").read_text())["steps"] == STEPS
        check_charged(folder, ledger)
    assert interrupted >= times // 2  # the others ended first


def check_charged(folder: Path, ledger: Path) -> None:
    on_record = charged(ledger) if ledger.exists() else 0
    for rank in range(2):
        assert size_of(folder / f"released-{rank}") <= on_record


def wait_for(place: Path) -> None:
    end = time.monotonic() + 60
    while not place.exists() and time.monotonic() < end:
        time.sleep(0.005)


def test_five_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 5, seed=25)


@pytest.mark.slow
def test_thirty_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 30, seed=2)


# ---- torchrun itself ------------------------------------------------------------------------------------------------

OPTIONS = [
    "--dataset", "digits", "--model", "linear", "--algorithm", "dpsgd", "--lot", "60", "--evaluations", "1",
    "--noise-multiplier", "3", "--checkpoint-every", "0.5",
]  # fmt: skip


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adadp", *arguments]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    return subprocess.Popen([sys.executable, *command], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, **given)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and what the command complained of."""
    out, complained = process.communicate(timeout=120)
    print(complained)  # for whoever reads about a failure
    return process.returncode, out, [line for line in complained.splitlines() if line.startswith("adadp: ")]


def workers(process: subprocess.Popen[str]) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_torchrun_is_stopped_and_goes_on(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "train", *OPTIONS, "--steps", "500", "--out", "run")
    wait_for(tmp_path / "run" / "checkpoint.safetensors")
    process.send_signal(signal.SIGINT)
    code, _, complained = ended(process)
    assert code != 0
    assert len(complained) == 1
    assert complained[0].startswith("adadp: stopped after ")
    code, out, complained = ended(torchrun(tmp_path, "train", "--resume", "run", "--json"))
    assert (code, complained) == (0, [])
    assert json.loads(out)["steps"] == 500
    assert charged(tmp_path / "run" / "ledger.jsonl") == 500


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children of a process are not listed here")
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_loses_a_process(tmp_path: Path, victim: int) -> None:
    process = torchrun(tmp_path, "train", *OPTIONS, "--steps", "4000", "--out", "run")
    wait_for(tmp_path / "run" / "checkpoint.safetensors")
    os.kill(workers(process)[victim], signal.SIGKILL)
    code, out, complained = ended(process)
    assert code != 0
    assert len(complained) == 1
    assert complained[0].startswith(f"adadp: {'process 1: ' if victim == 0 else ''}the processes could not ")
    assert complained[0].endswith("Go on with: adadp train --resume run")
    assert "Trained" not in out


def test_torchrun_refuses_what_is_not_for_several(tmp_path: Path) -> None:
    code, out, complained = ended(torchrun(tmp_path, "evaluate", "run"))
    assert code != 0
    assert out == ""
    assert complained[0].startswith("adadp: adadp evaluate is the work of one process, and torchrun started 2")
