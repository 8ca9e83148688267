"""What runs from a checkout without being installed, and what the two packages say of themselves."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import adadp

ROOT = Path(__file__).parents[1]


def run_uninstalled(*arguments: str, cwd: Path) -> str:
    """Run Python without the `site` module: an editable installation of adadp is not seen, other packages are."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab"), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("package", "option"), [("bench", "--goals"), ("paper", "--claims")])
def test_the_lab_runs_without_installation(package: str, option: str, tmp_path: Path) -> None:
    assert option in run_uninstalled("-m", f"adadp_lab.{package}", "--help", cwd=tmp_path)


def test_the_library_does_not_need_the_lab(tmp_path: Path) -> None:
    code = "import adadp.cli, adadp.engine, adadp.training.loop, sys; print('adadp_lab' in sys.modules)"
    assert run_uninstalled("-c", code, cwd=tmp_path).strip() == "False"


def test_entry_points_of_the_lab_exist() -> None:
    points = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]["entry-points"]["adadp.commands"]
    assert set(points) == {"bench", "pretrain", "reproduce"}
    for name, point in points.items():
        module, _, function = point.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_one_version() -> None:
    lab = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())
    assert lab["project"]["version"] == adadp.__version__
    assert f"version: {adadp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {adadp.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_development_tools_are_pinned() -> None:
    """What `make` installs for development is of known versions; torch's lower bound is one that was tried."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {name for each in (project["dependencies"], *extras.values()) for name in map(distribution, each)}
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {distribution(line) for line in lines}
    assert wanted - {"adadp"} <= pinned
    assert all("==" in line for line in lines)
    assert "torch>=2.11" in project["dependencies"]


def distribution(requirement: str) -> str:
    """The normalised name at the beginning of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()
