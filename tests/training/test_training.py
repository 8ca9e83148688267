"""From data to a run folder, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adadp import data
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Gaussian, PoissonGaussian, Uncovered
from adadp.accounting.ledger import Ledger
from adadp.data import Table
from adadp.errors import ConfigurationError, LedgerError
from adadp.training import loop as training
from adadp.training import planning as plan
from adadp.training import preparation as prepared
from adadp.training import run_folder as runs
from adadp.training.settings import Settings, from_mapping

QUICK: dict[str, Any] = {"dataset": "digits", "model": "linear", "steps": 12, "lot": 200, "evaluations": 2}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(path: Path, rows: int = 400, text: bool = True) -> str:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, rows)
    amount = generator.normal(5_000 + 4_000 * labels, 1_000)
    lines = ["amount,year,colour,label" if text else "amount,year,label"]
    for i in range(rows):
        cells = [f"{amount[i]:.2f}", f"{generator.integers(1950, 2000)}", generator.choice(["red", "green"])]
        lines.append(",".join([*cells[: 3 if text else 2], ("no", "yes")[labels[i]]]))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_it_learns_digits_within_its_budget(tmp_path: Path) -> None:
    seen: list[training.Progress] = []
    result = training.train(
        dataset="digits", epsilon=2.0, steps=60, seed=1, evaluations=3, out=str(tmp_path / "run"), report=seen.append
    )
    assert result.accuracy > 0.8
    assert result.guarantee.epsilon is not None
    assert 1.98 < result.guarantee.epsilon <= 2.0
    assert [p.step for p in seen] == list(range(1, 61))
    assert seen[0].accuracy is None
    assert seen[-1].accuracy == result.accuracy
    assert seen[-1].epsilon is not None
    assert result.guarantee.epsilon <= seen[-1].epsilon <= 2.0
    sampled = PoissonGaussian(result.plan.noise_multiplier, result.plan.lot / 1438)
    assert Ledger(tmp_path / "run" / "ledger.jsonl", dataset="digits").composition() == ((sampled, 60),)


def test_one_budget_is_for_preprocessing_and_training() -> None:
    made = plan.Plan(Settings(**{**QUICK, "pca_noise_multiplier": 10.0, "epsilon": 1.0}))
    composition = [(PoissonGaussian(made.noise_multiplier, 200 / 1438), 12), (Gaussian(10.0), 1)]
    assert made.events == (Gaussian(10.0),)
    whole = get_accountant("pld").epsilon(composition, 1e-4).epsilon
    assert 0.99 < whole <= 1.0
    result = training.run(made)
    assert result.guarantee.epsilon == whole
    assert made.noise_multiplier > plan.Plan(Settings(**{**QUICK, "epsilon": 1.0})).noise_multiplier
    with pytest.raises(ConfigurationError, match="no noise multiplier reaches"):
        plan.Plan(Settings(**{**QUICK, "pca_noise_multiplier": 0.5, "epsilon": 1.0}))


def test_planning_releases_nothing(tmp_path: Path) -> None:
    plan.Plan(Settings(**{**QUICK, "pca_noise_multiplier": 10.0, "out": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "reading"), [("adadp", "example"), ("adan", "lot"), ("dpopt", "published")])
def test_a_reading_without_a_proof_has_a_claim_and_no_epsilon(name: str, reading: str) -> None:
    result = training.train(**{**QUICK, "algorithm": name, "reading": reading, "epsilon": 3.0, "steps": 4})
    found = result.to_dict()
    assert found["epsilon"] is None
    assert 2.9 < found["claimed_epsilon"] <= 3.0
    assert found["guarantee"].startswith("none: ")
    assert all(isinstance(event, Uncovered) for event, _ in Ledger(result.folder / "ledger.jsonl").composition())
    kept = json.loads((result.folder / "guarantee.json").read_text())
    assert kept["epsilon"] is None
    assert kept["claimed_epsilon"] == found["claimed_epsilon"]
    assert "claimed, not guaranteed" in (result.folder / "guarantee.md").read_text()


def test_sgd_says_that_it_is_not_private() -> None:
    result = training.train(**{**QUICK, "algorithm": "sgd", "steps": 40})
    assert result.accuracy > 0.8
    assert result.guarantee.epsilon is None
    assert result.claimed_epsilon is None
    assert "without noise" in result.sentence()
    with pytest.raises(ConfigurationError, match="not private"):
        training.train(**{**QUICK, "algorithm": "sgd", "epsilon": 1.0})


def test_agd_keeps_to_the_budget_of_everything() -> None:
    result = training.train(
        **{**QUICK, "algorithm": "agd", "epsilon": 2.0, "pca_noise_multiplier": 10.0, "pca_components": 30}
    )
    assert result.guarantee.epsilon is not None
    assert 1.95 < result.guarantee.epsilon <= 2.0
    assert result.guarantee.accountant == "rdp"
    assert result.steps <= 12


def test_a_run_can_be_used_again(tmp_path: Path) -> None:
    result = training.train(**{**QUICK, "pca_noise_multiplier": 20.0, "out": "run", "seed": 3})
    finished = runs.read("run")
    test = data.load("digits", "test")
    assert float((finished.predict(test) == test.labels).double().mean()) == result.accuracy
    assert finished.config["seed"] is None
    assert (Path("run") / "preprocessing.safetensors").exists()
    metrics = [json.loads(line) for line in (Path("run") / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [6, 12]
    assert json.loads((Path("run") / "result.json").read_text()) == result.to_dict()
    with pytest.raises(ConfigurationError, match="no run is written over another"):
        training.train(**{**QUICK, "out": "run"})


def test_a_seed_repeats_a_run_and_none_does_not() -> None:
    def weights(**more: Any) -> torch.Tensor:
        result = training.train(**{**QUICK, "steps": 3, **more})
        return runs.read(result.folder).model.state_dict()["1.weight"]

    torch.testing.assert_close(weights(seed=5), weights(seed=5), rtol=0, atol=0)
    assert not torch.equal(weights(seed=5), weights(seed=6))
    assert not torch.equal(weights(), weights())


def test_a_ledger_for_several_runs() -> None:
    first = training.train(**{**QUICK, "noise_multiplier": 4.0, "ledger": "all.jsonl", "seed": 1})
    second = training.train(**{**QUICK, "noise_multiplier": 4.0, "ledger": "all.jsonl", "seed": 2})
    assert first.guarantee.epsilon is not None
    assert second.guarantee.epsilon is not None
    assert second.guarantee.epsilon > first.guarantee.epsilon
    with pytest.raises(LedgerError, match="seed has been used"):
        training.train(**{**QUICK, "noise_multiplier": 4.0, "ledger": "all.jsonl", "seed": 2})
    third = plan.Plan(Settings(**{**QUICK, "epsilon": 3.0, "ledger": "all.jsonl"}))
    alone = plan.Plan(Settings(**{**QUICK, "epsilon": 3.0}))
    assert third.noise_multiplier > alone.noise_multiplier


@pytest.mark.parametrize("text", [True, False])
def test_tables_are_scaled_within_the_budget(tmp_path: Path, text: bool) -> None:
    made = plan.Plan(Settings(dataset=table(tmp_path / "t.csv", text=text), epsilon=3.0, steps=40, seed=2))
    result = training.run(made)
    assert result.accuracy > 0.8
    assert len(made.events) == 4
    assert made.estimator is not None
    assert made.events == made.estimator.events_
    assert result.guarantee.epsilon is not None
    assert 2.95 < result.guarantee.epsilon <= 3.0
    assert isinstance(made.train, Table)
    assert made.input_shape == (prepared.rows(made.train, made.estimator).shape[1],)
    probes = prepared.probes_for(made.train, made.estimator)(64, torch.Generator().manual_seed(0))
    assert probes.shape == (64, made.input_shape[0])
    assert any("types of the columns" in text for text in result.guarantee.assumptions)


def test_probes_go_through_the_same_projection() -> None:
    digits = data.load("digits")
    pca = prepared.estimator_for(digits, pca_noise_multiplier=5.0, pca_components=7, table_noise_multiplier=1.0, seed=0)
    assert pca is not None
    pca.fit(prepared.raw(digits, pca))
    probes = prepared.probes_for(digits, pca)(32, torch.Generator().manual_seed(0))
    assert probes.shape == (32, 7)
    assert prepared.rows(digits, pca).shape == (1438, 7)


def test_microbatches_change_no_number_of_steps() -> None:
    result = training.train(**{**QUICK, "microbatch": 64, "noise_multiplier": 1.0})
    assert result.steps == 12
    assert Ledger(result.folder / "ledger.jsonl").composition() == ((PoissonGaussian(1.0, 200 / 1438), 12),)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "either epsilon"),
        ({"epochs": 1.0, "steps": 5}, "either epochs= or steps="),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lot": 100_000}, "lot must be in 1..1,438"),
        ({"delta": 0.0}, "delta must be above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"seed": -1}, "seed"),
        ({"model": "gpt"}, "no model is called"),
        ({"model": "paper"}, "pca-noise-multiplier"),
        ({"algorithm": "adam"}, "no algorithm is called"),
        ({"reading": "published"}, "its readings are"),
        ({"device": "quantum"}, "device must be"),
        ({"label": "x"}, "label goes with data of your own"),
        ({"dataset": "nowhere"}, "neither digits"),
        ({"pca_noise_multiplier": 5.0, "pca_components": 65}, "1..64"),
        ({"pca_noise_multiplier": 0.0}, "noise_multiplier must be a finite number above 0"),
        ({"settings": {"beta": 1}}, "no setting 'beta'"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"lots": 3}, "no setting 'lots'"),
        ({"image_size": "28"}, "28x28"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], match: str, tmp_path: Path) -> None:
    if "image_size" in wrong:
        wrong = {**wrong, "dataset": table(tmp_path / "t.csv")}
    with pytest.raises(ConfigurationError, match=match):
        plan.Plan(from_mapping({"dataset": "digits", **wrong}))
