"""`adadp audit --script`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adadp.cli import app

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from adadp import PrivacyEngine

def dataset():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 6, generator=g), torch.randint(4, (40,), generator=g))

data = dataset()
number = 3

def run(dataset, weight):
    model = nn.Linear(6, 4)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
        data_loader=DataLoader(dataset, batch_size=8))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, weight=weight).backward()
            optimizer.step()

def main(dataset):
    run(dataset, None)

def weighted(dataset):
    run(dataset, torch.tensor([1.0, 1.0, 1.0, 1000.0]))

def alone():
    run(data, None)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["audit", *words])


def test_a_script_is_measured(script: str) -> None:
    done = command("--script", f"{script}:main", "--canary", "large", "--steps", "3")
    assert done.exit_code == 0, done.output
    assert "within" in done.output
    assert "proves nothing" in done.output


def test_a_false_epsilon_is_reported_as_json(script: str) -> None:
    done = command(
        "--script", f"{script}:weighted", "--dataset-from", f"{script}:data", "--canary", "other class", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["verdict"] in ("exceeded", "refused")
    assert set(found) == {
        "verdict", "says", "value", "bound", "epsilon", "delta", "example", "lot", "parameter", "kind", "why",
        "refused", "reasons", "effects", "caveat",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--script", "{}:alone"], "takes no dataset"),
        (["--script", "{}:number"], "is not a function"),
        (["--script", "{}:nobody"], "has no nobody"),
        (["--script", "{}"], "named by its file and name"),
        (["--script", "{}.txt:main"], "there is no file"),
        (["--script", "{}:main", "--dataset-from", "{}:number"], "is not a dataset"),
        (["--script", "{}:main", "--epsilon", "2"], "no --epsilon"),
        (["--script", "{}:main", "--canary", "enormous"], "can be made from this data"),
        (["--dataset-from", "{}:data"], "goes with --script"),
    ],
)
def test_mistakes_are_one_line(script: str, words: list[str], says: str) -> None:
    done = command(*[word.format(script) for word in words])
    assert done.exit_code == 2
    assert says in done.output
