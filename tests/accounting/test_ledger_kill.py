"""`kill -9` at random moments: the ledger never holds less than what was released."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adadp.accounting.events import PoissonGaussian
from adadp.accounting.ledger import MOST_RESERVED, Ledger

STEP = PoissonGaussian(0.9, 0.01)

# A release is a byte written straight to the file descriptor, after its charge. The package is entered without its
# __init__, so that a child starts in a fraction of a second.
CHILD = """
import os, sys, types
package = types.ModuleType("adadp"); package.__path__ = [sys.argv[1]]; sys.modules["adadp"] = package
from adadp.accounting.ledger import Ledger
from adadp.accounting.events import PoissonGaussian
released = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
print("ready", flush=True)
while True:
    run = Ledger(sys.argv[2], dataset="digits").start(eval(sys.argv[5]))
    for _ in range(int(sys.argv[4])):
        run.charge(PoissonGaussian(0.9, 0.01))
        os.write(released, b"x")
    run.close()
"""


def wait_for_releases(released: Path) -> None:
    """Until the child has released something, however slow the machine is."""
    before = released.stat().st_size
    end = time.monotonic() + 5
    while released.stat().st_size == before and time.monotonic() < end:
        time.sleep(0.001)


def kill_at_random(tmp_path: Path, times: int, seed: int, planned: int = 0) -> None:
    import adadp

    package = str(Path(str(adadp.__file__)).parent)
    ledger, released = tmp_path / "ledger.jsonl", tmp_path / "released"
    chance = random.Random(seed)
    for round_ in range(times):
        # Short runs are killed while they start and close, long ones while they reserve.
        length = chance.choice([3, 50, 3000, 10**6])
        arguments = [sys.executable, "-c", CHILD, package, str(ledger), str(released), str(length)]
        arguments.append(str({"steps": planned} if planned else {}))
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            if chance.random() < 0.5:
                wait_for_releases(released)
            time.sleep(chance.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
        if not ledger.exists() or not ledger.read_bytes().count(b"\n"):
            assert not released.exists() or released.stat().st_size == 0
            continue
        made = released.stat().st_size
        found = Ledger(ledger)
        charged = dict(found.charged()).get(STEP, 0)
        assert dict(found.composition()).get(STEP, 0) == sum(
            max(planned, count) for run in found.runs if (count := run.reserved.get(STEP, 0))
        )
        # Each kill can leave one reservation unused, and only a kill can.
        assert made <= charged <= made + (round_ + 1) * MOST_RESERVED
    assert released.stat().st_size > 100
    # And it is still a ledger that can be used.
    with Ledger(ledger, dataset="digits").start({}) as run:
        run.charge(STEP)


def test_nothing_is_lost_in_20_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 20, seed=1)


def test_a_plan_is_charged_whole_after_any_kill(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 10, seed=3, planned=5000)


@pytest.mark.slow
def test_nothing_is_lost_in_200_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200, seed=2)
