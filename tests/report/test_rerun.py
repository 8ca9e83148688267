"""The command that makes a run again: run as it is printed, it has the same settings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adadp.cli import app
from adadp.report.rerun import rerun
from adadp.training.loop import train
from adadp.training.settings import from_mapping

QUICK: dict[str, Any] = {"lot": 60, "evaluations": 2, "delta": 1e-3, "checkpoint_every": 0.0, "steps": 3}
OF_ONE_RUN = ("sha256", "split_seed", "out")


def table(path: Path) -> str:
    lines = [f"{'yes' if i % 3 else 'no'},{i % 7},{'red' if i % 2 else 'green'},p{i // 2},{i % 5}" for i in range(300)]
    path.write_text("\n".join(["the outcome --x,amount,colour's,who,level", *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": "digits", "epsilon": 2.0},
        {"dataset": "digits", "noise_multiplier": 3.0, "algorithm": "dpsgd", "lr": 0.7, "model": "mlp"},
        {"dataset": "digits", "reading": "lot", "epsilon": 1.0, "settings": {"beta": 1.5}},
        {"dataset": "digits", "algorithm": "sgd"},
        {"dataset": "digits", "epsilon": 2.0, "pca_noise_multiplier": 20.0, "paid_metrics": True},
        {"label": "the outcome --x", "ignore": ("who",), "number": ("amount=0..7",), "epsilon": 2.0},
        {"label": "the outcome --x", "classes": ("yes", "no"), "person": "who", "rows_per_person": 3, "epsilon": 2.0},
        {"label": "amount", "task": "regression", "target_range": "0..7", "category": ("colour's=red,green",),
         "ignore": ("who", "level"), "epsilon": 2.0},
    ],
)  # fmt: skip
def test_it_has_the_same_settings(options: dict[str, Any], tmp_path: Path) -> None:
    if "dataset" not in options:
        options = {"dataset": table(tmp_path / "some data.csv"), **options}
    train(from_mapping({**options, **QUICK, "out": str(tmp_path / "one")}))
    first = json.loads((tmp_path / "one" / "config.json").read_text())
    words = shlex.split(rerun(first).replace("\\\n", ""))
    assert words[:2] == ["adadp", "train"]
    found = CliRunner().invoke(app, [*words[1:], "--out", str(tmp_path / "two"), "--yes"])
    assert found.exit_code == 0, found.output
    second = json.loads((tmp_path / "two" / "config.json").read_text())
    same_rows = "split_seed" not in first or first["split_seed"] is None  # else other rows are held out, and N differs
    unlike = {name for name in first | second if first.get(name) != second.get(name)} - set(OF_ONE_RUN)
    assert unlike <= (set() if same_rows else {"epochs", "noise_multiplier"}), "nothing but what follows from N"


def test_a_public_one_has_no_path(tmp_path: Path) -> None:
    paths = {"dataset": "/a/b.csv", "test": "/a/c.csv", "ledger": "/a/d", "data_dir": "/a", "out": "/a/e"}
    shown = rerun({**paths, "algorithm": "dpsgd"}, public=True)
    assert "/a" not in shown
    assert shlex.split(shown.replace("\\\n", "")) == [
        "adadp", "train", "--dataset", "YOUR-DATA", "--test", "TEST-DATA", "--data-dir", "DATA-DIR",
        "--algorithm", "dpsgd", "--ledger", "LEDGER",
    ]  # fmt: skip
