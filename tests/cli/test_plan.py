"""`adadp plan`: what `adadp train` would do, told without reading the data or charging a ledger."""

from __future__ import annotations

import builtins
import inspect
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from adadp import Ledger, data
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import PoissonGaussian
from adadp.cli import app
from adadp.cli.plan import plan as plan_command
from adadp.cli.train import train as train_command
from adadp.training.outlook import look_ahead
from adadp.training.settings import Settings

TABLE = ["--classes", "no,yes", "--number", "age=0..120", "--category", "size=S,M", "--examples", "1000"]
QUICK = ["--quick", "--noise-multiplier", "3"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def values(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def write_table(path: Path, rows: int = 1000) -> None:
    random = np.random.default_rng(0)
    lines = [f"{random.integers(20, 90)},{'SM'[i % 2]},{('no', 'yes')[i % 2]}" for i in range(rows)]
    path.write_text("age,size,label\n" + "\n".join(lines) + "\n")


def test_it_takes_every_option_of_train() -> None:
    shared = set(inspect.signature(train_command).parameters) - {"resume"}
    assert shared <= set(inspect.signature(plan_command).parameters)


def test_it_is_what_train_does() -> None:
    options = [
        "--dataset",
        "digits",
        "--model",
        "linear",
        "--steps",
        "4",
        "--epsilon",
        "2",
        "--pca-noise-multiplier",
        "20",
    ]
    found = values(*options, "--quick")
    trained = json.loads(CliRunner().invoke(app, ["train", *options, "--json"]).stdout)
    for key in ("examples", "lot", "noise_multiplier", "epsilon", "delta", "steps", "model", "gaussian"):
        assert found[key] == trained[key], key
    written = json.loads((Path(trained["run"]) / "config.json").read_text())
    assert found["settings"] == written["settings"]


def test_it_is_what_train_does_with_a_table() -> None:
    write_table(Path("people.csv"))
    write_table(Path("held.csv"), 100)
    options = ["--dataset", "people.csv", "--test", "held.csv", "--classes", "no,yes", "--number", "age"]
    options += ["--category", "size=S,M", "--epsilon", "1.5", "--steps", "4", "--paid-metrics"]
    found = values(*options, "--examples", "1000", "--quick")
    trained = json.loads(CliRunner().invoke(app, ["train", *options, "--json"]).stdout)
    for key in ("examples", "lot", "noise_multiplier", "epsilon", "delta", "steps", "model", "gaussian"):
        assert found[key] == trained[key], key
    again = values(*options, "--examples", "1000", "--quick")
    assert again["ledger"]["epsilon"] == trained["dataset_epsilon"]
    assert again["ledger"]["epsilon_after"] > trained["dataset_epsilon"]
    assert again["ledger"]["runs"] == 1


def poison(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Whoever opens a file of one of these names gets an error; the names that were asked for."""
    asked: list[str] = []

    def refusing(usual: Any) -> Any:
        def opened(file: Any, *rest: Any, **more: Any) -> Any:
            if not isinstance(file, int) and Path(os.fspath(file)).name in names:
                asked.append(os.fspath(file))
                raise AssertionError(f"{file} was opened")
            return usual(file, *rest, **more)

        return opened

    for place, name in ((builtins, "open"), (io, "open"), (os, "open"), (np, "load")):
        monkeypatch.setattr(place, name, refusing(getattr(place, name)))
    for function in ("read", "read_held_out", "load"):
        monkeypatch.setattr(data, function, lambda *_, **__: pytest.fail("data was read"))
    return asked


def test_the_data_is_not_opened_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(Path("people.csv"))
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    asked = poison(monkeypatch, "people.csv")
    with pytest.raises(AssertionError):
        Path("people.csv").read_text()  # the poison works
    asked.clear()
    run = ["--steps", "20", "--model", "linear", "--noise-multiplier", "3"]
    found = values("--dataset", "people.csv", *TABLE, *run)
    assert found["seconds"] > 0
    assert found["examples"] == 800
    assert not asked
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_a_known_data_set_is_planned_without_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADADP_DATA", "nowhere")
    poison(monkeypatch)
    found = values("--dataset", "mnist", *QUICK)
    assert (found["examples"], found["held_out"], found["lot"], found["input_shape"]) == (
        60000,
        10000,
        4096,
        [1500],
    )


def test_a_ledger_is_read_and_not_charged() -> None:
    ledger = Ledger("spent.jsonl", dataset="people")
    with ledger.start({"algorithm": "dpsgd", "steps": 10}) as charged:
        charged.charge(PoissonGaussian(2.0, 0.1), 10)
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    run = ["--dataset", "people.csv", "--dataset-name", "people", "--ledger", "spent.jsonl", *TABLE, "--delta", "1e-5"]
    found = values(*run, *QUICK, "--steps", "50", "--lot", "80")
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    spent = [(PoissonGaussian(2.0, 0.1), 10)]
    both = [*spent, (PoissonGaussian(3.0, 0.1), 50)]
    pld = get_accountant("pld")
    assert found["ledger"]["epsilon"] == pld.epsilon(spent, 1e-5).epsilon
    assert found["ledger"]["epsilon_after"] == pytest.approx(pld.epsilon(both, 1e-5).epsilon, rel=1e-3)
    assert "1 run so far" in " ".join(call(*run, *QUICK, "--steps", "50", "--lot", "80").stdout.split())


def test_signal_over_noise_is_of_public_numbers() -> None:
    found = values("--dataset", "digits", "--model", "linear", "--lot", "200", "--steps", "100", *QUICK)
    assert found["weights"] == 650
    assert found["signal"]["direction"] == pytest.approx(200 / 3)
    assert found["signal"]["whole"] == pytest.approx(200 / 3 / math.sqrt(650))
    assert found["signal"]["run_whole"] == pytest.approx(10 * 200 / 3 / math.sqrt(650))


def test_signal_over_noise_is_that_of_a_step() -> None:
    """A lot of one and the same example beyond the bound: the released mean is as far above its noise as was said."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from adadp import PrivacyEngine

    sums, lots = torch.zeros(50), 400
    inputs = torch.zeros(40, 50)
    inputs[:, 0] = 1e3
    module = torch.nn.Linear(50, 1, bias=False)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    private, optimizer, loader = PrivacyEngine(seed=3).make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(TensorDataset(inputs), batch_size=40),
        noise_multiplier=2.0, max_grad_norm=1.0, steps=lots,
    )  # fmt: skip
    released = []
    while len(released) < lots:
        for (rows,) in loader:
            optimizer.zero_grad()
            optimizer.backward(private(rows).sum(1))
            optimizer.step()
            released.append(module.weight.grad[0].clone())
            if len(released) == lots:
                break
    sums = torch.stack(released)
    noise = sums[:, 1:].std()
    assert float(sums[:, 0].mean() / noise) == pytest.approx(40 / 2.0, rel=0.05)
    assert float(sums[:, 0].mean() / (noise * math.sqrt(50))) == pytest.approx(40 / (2.0 * math.sqrt(50)), rel=0.05)


def test_other_choices_are_plans_of_their_own() -> None:
    run = Settings(model="linear", lot=100, epochs=20.0, epsilon=2.0, algorithm="dpsgd")
    found = look_ahead(run, measured=False, factors=(0.5,)).to_dict()
    by = {(one["changed"], one["value"]): one for one in found["choices"]}
    assert set(by) == {
        *(("epsilon", value) for value in (1.0, 2.0)),
        *(("lot", value) for value in (50, 100)),
        *(("epochs", value) for value in (found["epochs"] / 2, found["epochs"])),
    }
    for key in ("noise_multiplier", "lot", "steps", "epsilon"):
        for axis in ("epsilon", "lot", "epochs"):
            value = {"epsilon": 2.0, "lot": 100}.get(axis, found["epochs"])
            assert by[axis, value][key] == found[key]
    half = look_ahead(replace(run, lot=50), measured=False, factors=()).to_dict()
    assert by["lot", 50]["noise_multiplier"] == half["noise_multiplier"]
    assert by["lot", 50]["signal"] == half["signal"]
    assert by["epsilon", 1.0]["noise_multiplier"] > found["noise_multiplier"] > half["noise_multiplier"]
    assert by["epochs", found["epochs"] / 2]["steps"] == found["steps"] // 2


def test_a_choice_that_cannot_be_is_said() -> None:
    run = ["--dataset", "digits", "--model", "linear", "--lot", "1000", "--steps", "3", "--noise-multiplier", "3"]
    found = values(*run)
    refused = [one for one in found["choices"] if one["refused"]]
    assert [(one["changed"], one["value"]) for one in refused] == [("lot", 2000)]
    assert found["choices"][0]["changed"] == "noise_multiplier"
    assert "lot must be in 1..1,438" in call(*run).stdout


def test_time_and_memory_are_of_steps_of_the_plan() -> None:
    few = look_ahead(Settings(model="linear", noise_multiplier=3.0, steps=10), factors=())
    many = look_ahead(Settings(model="linear", noise_multiplier=3.0, steps=100_000), factors=())
    assert few.seconds is not None
    assert many.seconds is not None
    assert many.measured is not None
    assert few.seconds < many.seconds
    assert many.seconds == pytest.approx(100_000 * many.measured.step, rel=0.5)
    assert many.memory is None or many.memory > many.measured.data > 0


@pytest.mark.parametrize("algorithm", ["adan", "agd", "dpopt", "sgd"])
def test_other_algorithms(algorithm: str) -> None:
    noise = None if algorithm == "sgd" else 3.0
    found = look_ahead(
        Settings(algorithm=algorithm, model="linear", lot=40, steps=3, noise_multiplier=noise), factors=()
    )
    assert found.seconds is not None
    assert found.seconds > 0
    assert (found.epsilon is None) == (algorithm == "sgd")


def test_a_reading_without_a_proof_has_no_epsilon() -> None:
    found = values(
        "--dataset", "digits", "--reading", "lot", "--epsilon", "4", "--quick", "--lot", "40", "--steps", "3"
    )
    assert found["epsilon"] is None
    assert 3.9 < found["claimed_epsilon"] <= 4
    assert "would be claimed" in call("--reading", "lot", "--epsilon", "4", "--quick", "--steps", "3").stdout


def test_persons() -> None:
    found = values("--person", "patient", *TABLE, *QUICK, "--steps", "3")
    assert (found["unit"], found["examples"], found["ledger"]) == ("persons", 800, None)
    said = call("--person", "patient", *TABLE, "--noise-multiplier", "3", "--steps", "3", "--model", "linear").stdout
    assert "for one person" in " ".join(said.split())


def test_what_is_not_declared_is_asked_for() -> None:
    for arguments, said in (
        (["--dataset", "people.csv"], "--examples"),
        (["--dataset", "people.csv", "--examples", "100"], "--classes"),
        (["--dataset", "people.csv", "--examples", "100", "--classes", "a,b"], "not opened"),
        (["--dataset", "mnist", "--examples", "100"], "leave them out"),
        (["--examples", "100", "--classes", "a,b", "--shape", "3x3"], "3x32x32"),
    ):
        result = call(*arguments, *QUICK)
        assert result.exit_code == 2
        assert said in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1


def test_for_people() -> None:
    run = ["--dataset", "digits", "--model", "linear", "--steps", "20", "--noise-multiplier", "3"]
    assert "--quick leaves out" in call(*run, "--plot", "plan.svg", "--quick").stderr
    said = call(*run, "--plot", "plan.svg")
    assert said.exit_code == 0, said.output
    for text in (
        "If you trained on digits",
        "noise multiplier",
        "signal / noise",
        "time",
        "memory",
        "epochs",
        "plan.svg",
    ):
        assert text in said.stdout
    picture = Path("plan.svg").read_text()
    assert picture.lstrip().startswith("<?xml")
    assert list(Path().iterdir()) == [Path("plan.svg")], "nothing else is written"
