"""Completion in a shell: what is offered, that torch is not imported for it, and a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adadp import algorithms, data, models
from adadp.accounting.accountants import ACCOUNTANTS
from adadp.cli import completion

PROGRAM = """#!{python}
import sys
from adadp.__main__ import main
sys.argv[0] = "adadp"
try:
    main()
finally:
    assert "torch" not in sys.modules and "adadp_lab" not in sys.modules, "slow to complete"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The command `adadp` in a folder of its own; it fails where completing imported torch."""
    path = tmp_path / "bin" / "adadp"
    path.parent.mkdir()
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


def offered(program: Path, *words: str) -> list[str]:
    """What bash is offered for the last of these words."""
    asked = {"COMP_WORDS": "\n".join(["adadp", *words]), "COMP_CWORD": str(len(words))}
    found = subprocess.run(
        [program],
        env={**os.environ, **asked, "_ADADP_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_names_are_those_of_the_registries() -> None:
    assert set(completion.DATASETS) == set(data.NAMES)
    assert set(completion.MODELS) == {"auto", *models.MODELS}
    assert set(completion.ALGORITHMS) == set(algorithms.ALGORITHMS)
    assert set(completion.SCHEDULES) == set(algorithms.SCHEDULES)
    assert set(completion.ACCOUNTANTS) == set(ACCOUNTANTS)


def test_commands_are_completed_without_importing_those_of_other_packages(program: Path) -> None:
    assert {"plan", "train", "ledger"} <= set(offered(program, ""))
    assert offered(program, "pred") == ["predict"]
    assert offered(program, "ledger", "s") == ["show"]


def test_options_and_their_values(program: Path) -> None:
    assert offered(program, "train", "--noise-mul") == ["--noise-multiplier"]
    assert offered(program, "train", "--algorithm", "a") == ["adadp", "adal", "adan", "agd"]
    assert offered(program, "plan", "--model", "tanh") == ["tanh-cnn"]
    assert offered(program, "account", "--accountant", "p") == ["pld"]
    assert offered(program, "audit", "--threat", "") == ["gradient", "white-box", "black-box"]


def test_columns_are_those_of_the_file_that_is_named_before(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("\ufeffage;size;blood pressure;label\n1;2;3;4\n")
    assert offered(program, "train", "--dataset", str(path), "--label", "") == ["age", "size", "label"]
    assert offered(program, "train", "--label", "") == []
    assert offered(program, "train", "--dataset", "gone.csv", "--label", "") == []
    path.write_bytes(b"\xff\xfe\x00")
    assert offered(program, "train", "--dataset", str(path), "--label", "") == []


def test_a_zsh_is_answered_in_its_own_way(program: Path) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "adadp train --schedule co", "_ADADP_COMPLETE": "complete_zsh"}
    found = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ['_arguments \'*: :(("constant"', '"cosine"))\'']


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_in_a_bash_after_it_is_installed(program: Path, tmp_path: Path) -> None:
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    home["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # then the shell is named
    subprocess.run([program, "--install-completion", "bash"], env=home, check=True, capture_output=True)
    script = """
        source ~/.bashrc
        COMP_WORDS=(adadp train --reading s) COMP_CWORD=3
        $(complete -p adadp | sed 's/.*-F \\([^ ]*\\).*/\\1/') adadp
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    found = subprocess.run(["bash", "--norc", "-c", script], env=home, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["sound"], found.stderr
