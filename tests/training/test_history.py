"""What a run notes of its released gradients: signal, noise, and the spread of the noise over coordinates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adadp.accounting.composition import releases_from_json
from adadp.accounting.ledger import Ledger
from adadp.algorithms.dpopt import OptimisedNoise
from adadp.clipping import Flat
from adadp.mechanism.sums import NoisedSums
from adadp.shapes import Probe
from adadp.training import history
from adadp.training.loop import train

QUICK = {"dataset": "digits", "model": "linear", "steps": 8, "lot": 200, "evaluations": 2, "checkpoint_every": 0.0}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def noted(tmp_path: Path, signal: float, steps: int = 400) -> list[dict[str, Any]]:
    """The history of a run whose gradients are one direction of length `signal` and noise of deviation 2 / 4."""
    generator = torch.Generator().manual_seed(3)
    weights = {"first.weight": nn.Parameter(torch.zeros(30, 4)), "first.bias": nn.Parameter(torch.zeros(30))}
    weights["last"] = nn.Parameter(torch.zeros(50))
    clipping = Flat(1.0)
    clipping.parameters = dict(weights)
    optimizer: Any = SimpleNamespace(clipping=clipping, noise_multiplier=2.0, expected_batch_size=4)
    written = history.History(tmp_path, optimizer, steps)
    for step in range(1, steps + 1):
        for value in weights.values():
            value.grad = torch.randn(value.shape, generator=generator) * 0.5
        weights["first.weight"].grad[0, 0] += signal
        written.stepped(step)
    return lines(tmp_path)


def test_signal_noise_and_error_are_those_of_what_was_released(tmp_path: Path) -> None:
    found = noted(tmp_path, signal=1.0)
    assert [line["step"] for line in found] == [20 * i for i in range(1, 21)]
    assert all(line["samples"] == 20 and line["layers"].keys() == {"first", "last"} for line in found)
    for layer, coordinates, true in (("first", 150, 1.0), ("last", 50, 0.0)):
        parts = [line["layers"][layer] for line in found]
        assert all(part["noise"] == pytest.approx(coordinates / 4) for part in parts)
        errors = [(part["signal"] - true) / part["error"] for part in parts]
        assert abs(sum(errors)) / math.sqrt(len(errors)) < 4, "right on average"
        assert 0.5 < sum(error**2 for error in errors) / len(errors) < 2, "the error is as it is said to be"


def test_the_histogram_counts_every_coordinate() -> None:
    parameters = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    found = history.histogram({"a": 10.0, "b": torch.tensor([[0.0, 1e-3], [1e-3, 1.0]])}, parameters)
    assert (found["counts"][0], found["low"]) == (1, history.LOW), "no noise: with the smallest"
    counted = {round(found["low"] + i / found["per_decade"], 3): n for i, n in enumerate(found["counts"]) if n and i}
    assert counted == {-3.0: 2, 0.0: 1, 1.0: 3}


def test_a_run_writes_its_history_and_what_it_released(tmp_path: Path) -> None:
    result = train(**QUICK, epsilon=1.0, out=str(tmp_path / "run"))
    found = lines(result.folder)
    assert [line["step"] for line in found] == [2, 4, 6, 8]
    assert sum(found[0]["noise_by_coordinate"]["counts"]) == 650
    released = json.loads((result.folder / "releases.json").read_text())
    ledger = Ledger(result.ledger)
    assert released["ids"] == [run.uid for run in ledger.runs]
    assert releases_from_json(released["all_releases"]) == ledger.composition()
    assert released["own"]["epsilon"] == result.run_guarantee.epsilon
    metrics = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in metrics)
    assert metrics[-1]["accuracy"] == result.accuracy


@pytest.mark.parametrize("options", [
    {"algorithm": "sgd"}, {"algorithm": "agd", "epsilon": 1.0}, {"reading": "lot", "epsilon": 1.0},
], ids=str)  # fmt: skip
def test_nothing_is_noted_of_gradients_that_were_not_released(options: dict[str, Any], tmp_path: Path) -> None:
    result = train(**QUICK, **options, out=str(tmp_path / "run"))
    assert not (result.folder / "history.jsonl").exists()


def test_noise_is_that_of_the_run(tmp_path: Path) -> None:
    result = train(**QUICK, algorithm="dpsgd", noise_multiplier=3.0, max_grad_norm=0.5, out=str(tmp_path / "run"))
    for line in lines(result.folder):
        (layer,) = line["layers"].values()
        assert layer["noise"] == pytest.approx((3.0 * 0.5 / 200) ** 2 * 650, rel=1e-5)


def test_optimised_noise_says_how_its_release_is_spread() -> None:
    probe = Probe(lambda count, generator: torch.randn(count, 3, generator=generator))
    clipping = OptimisedNoise(0.5, source=probe, floor=0.1)
    clipping.parameters = {"weight": torch.zeros(3)}
    clipping.axes = {"weight": torch.tensor([0.1, 1.0, 7.0])}
    said = clipping.noise_of_release(4.0)["weight"]
    deviation = NoisedSums({"weight": torch.ones(3) * clipping.stddev(4.0)["weight"]})
    torch.testing.assert_close(said, clipping._carried(deviation)["weight"])
