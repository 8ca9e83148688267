"""Settings that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CPU = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"
if LIMIT not in os.environ and CPU.exists() and "amx_tile" in CPU.read_text():
    # Some virtual machines announce AMX and kill a process that uses it: torch itself cannot multiply there in
    # bfloat16. This must be known before torch is loaded; workers and child processes inherit it.
    multiply = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    works = subprocess.run([sys.executable, "-c", multiply], capture_output=True).returncode == 0
    os.environ[LIMIT] = "DEFAULT" if works else "AVX512_CORE_BF16"

import entropy  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# The models here are tiny: more threads only wait for each other.
torch.set_num_threads(1)

# The same examples on every machine and every day; `--hypothesis-profile=search` looks for new ones.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
settings.register_profile(
    "search", deadline=None, database=None, suppress_health_check=list(HealthCheck), max_examples=300
)
settings.load_profile("fixed")


# ---- the same draws in each run ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=0, help="another number makes all unseeded draws others")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    with entropy.aside(f"{item.config.getoption('draws')} {item.nodeid}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    if fixturedef.scope == "function":
        return (yield)
    which = f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"
    with entropy.aside(f"{request.config.getoption('draws')} {which}"):
        return (yield)
