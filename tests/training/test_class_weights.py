"""Weights of classes: declared or paid for, never from raw counts; one row's contribution stays bounded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from adadp import Ledger, PrivacyEngine, algorithms, training
from adadp.accounting.events import Gaussian
from adadp.cli import app
from adadp.errors import ConfigurationError, InterruptedRunError
from adadp.mechanism.observation import Observer, Unnoised
from adadp.training import class_weights, loop, run_folder
from adadp.training.settings import Settings


class Charged(list[Any]):
    def __init__(self, unit: str = "one example") -> None:
        super().__init__()
        self.unit = unit

    def charge(self, event: Gaussian) -> None:
        self.append(event)


@pytest.fixture
def rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3,000 rows, a twelfth of them "yes", which numbers tell only in part."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)
    lines = ["a,b,label"]
    for _ in range(3000):
        yes = draw.random() < 1 / 12
        lines.append(f"{draw.gauss(1.2 * yes, 1):.3f},{draw.gauss(-0.8 * yes, 1):.3f},{'yes' if yes else 'no'}")
    path = tmp_path / "rare.csv"
    path.write_text("\n".join(lines))
    return path


def options(path: Path, **more: Any) -> dict[str, Any]:
    numbers = ("a=-4..4", "b=-4..4")
    return {"dataset": str(path), "classes": ("no", "yes"), "number": numbers, "epsilon": 3.0, "seed": 1, **more}


def test_weights_are_read_or_refused() -> None:
    assert class_weights.declared("yes=5,no=1", ["no", "yes"]).tolist() == pytest.approx([0.2, 1.0])
    assert class_weights.declared("a=b=2, c = 1", ["a=b", "c"]).tolist() == pytest.approx([1.0, 0.5])
    assert class_weights.declared("paid", ["no", "yes"]) is None
    for wrong in ("yes", "yes=0,no=1", "yes=-1,no=1", "yes=nan,no=1", "yes=1,yes=2", "=1", "balanced", "yes=1e999"):
        with pytest.raises(ConfigurationError, match=r"class_weights must be paid, or a weight above 0 for each class"):
            Settings(class_weights=wrong)
    for wrong, match in (("yes=1", "no has none"), ("no=1,yes=1,maybe=1", "no class 'maybe'")):
        with pytest.raises(ConfigurationError, match=match):
            class_weights.declared(wrong, ["no", "yes"])
    with pytest.raises(ConfigurationError, match="a number is predicted"):
        class_weights.declared("paid", [])


@pytest.mark.parametrize("rows", [1, 100])
def test_one_row_or_one_person_moves_counts_by_one(rows: int) -> None:
    """The release without noise, with and without somebody, in units of the sensitivity that the noise is made for."""
    labels = torch.tensor([0] * 500 + [1] * 40 + [1] * rows)
    persons = None if rows == 1 else np.array([*range(540), *[999] * rows])
    seen: list[np.ndarray[Any, Any]] = []

    def counts(kept: slice) -> None:
        ledger = Charged() if persons is None else Charged("one person")
        whose = None if persons is None else persons[kept]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                class_weights, "release",
                lambda statistic, **given: seen.append(statistic / given["sensitivity"]) or (statistic, None),
            )  # fmt: skip
            class_weights.paid(labels[kept], 2, 5.0, persons=whose, seed=None, ledger=ledger)

    counts(slice(None))
    counts(slice(0, 540))
    assert 0.99 < np.linalg.norm(seen[0] - seen[1]) <= 1.0


def test_counts_are_charged_before_they_are_released_and_never_divided_by_noise() -> None:
    ledger = Charged()
    labels = torch.tensor([0] * 9000 + [1] * 900)
    found = class_weights.paid(labels, 3, 20.0, persons=None, seed=4, ledger=ledger)
    assert ledger == [Gaussian(20.0)]
    assert found[1] == pytest.approx(60 / 900, rel=0.1)  # the empty class counts as three deviations
    assert found[2] == 1.0
    assert found[0] == pytest.approx(60 / 9000, rel=0.1)
    assert class_weights.planned(20.0) == (Gaussian(20.0),)

    class Spent(Charged):
        def charge(self, event: Gaussian) -> None:
            raise RuntimeError("spent")

    with pytest.raises(RuntimeError, match="spent"):
        class_weights.paid(labels, 3, 20.0, persons=None, seed=4, ledger=Spent())


def test_a_row_of_a_heavy_class_stays_within_the_bound() -> None:
    """Ten equal rows with huge gradients, of the class of weight 1000: their sum has length 10 C and no more."""
    bound, rows = 0.1, 10
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(model[0].weight)
    data = TensorDataset(100 * torch.ones(rows, 4), torch.ones(rows, dtype=torch.int64))
    algorithm = algorithms.create("dpsgd", settings={"lr": 0.1, "max_grad_norm": bound})
    optimizer = algorithm.optimizer(model.parameters())
    _, private, lots = algorithm.make_private(
        PrivacyEngine(seed=1), module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=rows),
        noise_multiplier=1.0, task=algorithms.Task(rows, 1),
    )  # fmt: skip
    lengths: list[float] = []

    class Watch(Observer):
        def noising(self, release: Unnoised) -> None:
            lengths.append(sum(float(value.double().square().sum()) for value in release.sums.values()) ** 0.5)

    private.observe(Watch())
    work = algorithm.training_step(private, model, torch.tensor([1.0, 1000.0, 1.0]))
    for inputs, labels in lots:
        work(inputs, labels)
    assert lengths
    assert 0.999 * rows * bound < lengths[0] <= rows * bound


@pytest.mark.parametrize("asked", ["no=1,yes=11", "paid"])
def test_a_rare_class_is_found(rare: Path, asked: str) -> None:
    plain = training.train(**options(rare, out="plain", ledger="plain.jsonl"))
    weighted = training.train(**options(rare, out="weighted", ledger="weighted.jsonl", class_weights=asked))
    gain = weighted.metrics.values["balanced_accuracy"] - plain.metrics.values["balanced_accuracy"]
    assert gain > 0.08
    assert weighted.remark is None
    assert weighted.runs == 1
    assert weighted.guarantee.epsilon is not None
    assert weighted.guarantee.epsilon <= 3.0
    found = json.loads(Path("weighted/result.json").read_text())["class_weights"]
    assert found["yes"] == 1.0
    assert found["no"] == pytest.approx(1 / 11, rel=0.4)
    ledger = Ledger("weighted.jsonl")
    counted = [run for run in ledger.runs if "class_weights" in run.plan]
    if asked == "paid":
        (event,) = weighted.plan.events
        assert [run.reserved for run in counted] == [{event: 1}]
        assert weighted.plan.noise_multiplier > plain.plan.noise_multiplier  # it is out of the same budget
    else:
        assert not counted
        assert any("weights of classes were declared" in text for text in weighted.guarantee.assumptions)
    assert len(run_folder.read("weighted").predict(weighted.plan.test)) == len(weighted.plan.test)
    again = CliRunner().invoke(app, ["evaluate", "weighted", "--seed", "1", "--json"])
    assert json.loads(again.stdout)["metrics"] == weighted.metrics.to_dict()


def test_a_resumed_run_keeps_the_weights_that_it_paid_for(rare: Path) -> None:
    steps: list[int] = []

    def stop() -> bool:
        steps.append(1)
        return len(steps) > 5

    settings = Settings(**options(rare, out="run", class_weights="paid", seed=None, steps=20, ledger="l.jsonl"))
    with pytest.raises(InterruptedRunError):
        loop.run(training.plan(settings), None, stop)
    kept = json.loads(Path("run/run.json").read_text())["class_counts"]["weights"]
    resumed = training.resume("run")
    assert resumed.class_weights == pytest.approx(dict(zip(("no", "yes"), kept, strict=True)), abs=1e-5)
    assert sum("class_weights" in run.plan for run in Ledger("l.jsonl").runs) == 1
    assert resumed.guarantee.epsilon is not None
    assert resumed.guarantee.epsilon <= 3.0


def test_what_cannot_be_is_refused_before_anything_is_spent(rare: Path) -> None:
    for wrong, match in (
        ({"class_weights": "no=1"}, "yes has none"),
        ({"class_weights": "paid", "algorithm": "sgd", "epsilon": None}, "no budget to pay class counts"),
        ({"class_weights": "no=1,yes=2", "algorithm": "agd"}, "bounds the loss of each row"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            training.train(**options(rare, **wrong))
    assert not list(rare.parent.glob("*.jsonl"))
    planned = [
        "plan",
        "--dataset",
        "x.csv",
        "--examples",
        "3000",
        "--classes",
        "no,yes",
        "--number",
        "a=0..1",
        "--quick",
    ]
    found = json.loads(CliRunner().invoke(app, [*planned, "--class-weights", "paid", "--json"]).stdout)
    assert len(found["gaussian"]) == 1
