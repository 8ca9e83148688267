"""`adadp account` answers in time and memory wherever it is asked."""

import json
import subprocess
import sys

import pytest

from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import PoissonGaussian

MILLION = 10**6
CORNERS = [
    (MILLION // 2, 0.4, MILLION),
    (MILLION, 50.0, MILLION),
    (10_000, 50.0, MILLION),
    (1, 0.3, MILLION),
    (999_999, 50.0, MILLION),
]
MORE = [
    (lot, sigma, steps)
    for lot in (1, 100, 1000, 30_000, 300_000, 999_999, MILLION)
    for sigma in (0.3, 0.7, 3.0, 50.0)
    for steps in (1, 1000, MILLION)
]


def answer(lot: int, sigma: float, steps: int) -> tuple[dict[str, object], float, float]:
    """What the command says, how many seconds of processor time it took, and its largest memory in GiB."""
    code = (
        "import json, pathlib, resource, sys\n"
        "from adadp.cli import app\n"
        "try:\n    app()\n"
        "finally:\n"
        "    usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        # Not ru_maxrss: a child inherits its parent's there.
        "    peak = next(l for l in pathlib.Path('/proc/self/status').read_text().splitlines() if 'VmHWM' in l)\n"
        "    print(json.dumps([usage.ru_utime + usage.ru_stime, int(peak.split()[1]) / 2**20]), file=sys.stderr)\n"
    )
    options = ["account", "--examples", str(MILLION), "--lot", str(lot), "--noise-multiplier", str(sigma)]
    options += ["--steps", str(steps), "--delta", "1e-7", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=True)
    seconds, memory = json.loads(done.stderr.splitlines()[-1])
    return json.loads(done.stdout), seconds, memory


def check(lot: int, sigma: float, steps: int) -> None:
    found, seconds, memory = answer(lot, sigma, steps)
    # Processor time, not the clock: tests share their machine. One thread does nearly all of the work.
    assert seconds <= 5
    assert memory <= 1
    composition = [(PoissonGaussian(sigma, lot / MILLION), steps)]
    bound = get_accountant("rdp").epsilon(composition, 1e-7).epsilon
    assert isinstance(found["epsilon"], float | int)
    assert 0 <= found["epsilon"] <= bound
    if found["accountant"] == "rdp":
        assert any("rdp bound" in text for text in found["assumptions"])  # type: ignore[union-attr]


@pytest.mark.parametrize(("lot", "sigma", "steps"), CORNERS)
def test_corners(lot: int, sigma: float, steps: int) -> None:
    check(lot, sigma, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("lot", "sigma", "steps"), MORE)
def test_everywhere(lot: int, sigma: float, steps: int) -> None:
    check(lot, sigma, steps)
