"""The Triton kernels on a CPU, in Triton's interpreter.

The interpreter must be asked for before Triton is first imported, and other tests must not meet it: so the cases run in
a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_cases_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("interpreted.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(cases), "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts="],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 110, run.stdout
    assert "skipped" not in run.stdout
