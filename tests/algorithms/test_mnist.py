"""Each algorithm on real MNIST, briefly. `$ADADP_DATA` says where it lies."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from adadp import data
from adadp.data import Dataset
from adadp.training import loop as training

REAL_DATA = os.environ.get("ADADP_DATA")
pytestmark = pytest.mark.skipif(not REAL_DATA, reason="ADADP_DATA is not set: no real MNIST to train on")

# (algorithm, reading, accuracy that a few steps reach at least). The paper's readings start slowly.
CASES = [
    ("adadp", "sound", 0.7), ("adadp", "example", 0.3), ("adadp", "lot", 0.5), ("dpsgd", None, 0.7),
    ("adal", None, 0.3), ("adan", "sound", 0.7), ("adan", "example", 0.05), ("adan", "lot", 0.05), ("agd", None, 0.5),
    ("dpopt", "sound", 0.3), ("dpopt", "published", 0.3), ("sgd", None, 0.7),
]  # fmt: skip
load = cache(data.load)


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Verifying and unpacking MNIST takes most of a second: once is enough."""

    def loaded(name: str, split: str = "train", **_: object) -> Dataset:
        return load(name, split, data_dir=REAL_DATA)

    monkeypatch.setattr(data, "load", loaded)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "reading", "least"), CASES)
def test_it_learns(name: str, reading: str | None, least: float) -> None:
    noise = {} if name == "sgd" else {"noise_multiplier": 1.0}
    result = training.train(
        dataset="mnist", model="linear", algorithm=name, reading=reading, steps=25, lot=400, evaluations=1, seed=1,
        **noise,
    )  # fmt: skip
    assert result.accuracy >= least
    assert (result.guarantee.epsilon is None) == (name == "sgd" or reading in ("example", "lot", "published"))


def test_the_papers_net_on_dp_pca() -> None:
    result = training.train(
        dataset="mnist", model="paper", pca_noise_multiplier=16.0, noise_multiplier=2.0, steps=40, lot=600,
        evaluations=1,
    )  # fmt: skip
    assert result.accuracy > 0.7
    assert result.to_dict()["gaussian"] == [16.0]


@pytest.mark.slow
@pytest.mark.parametrize(("reading", "least"), [("lot", 0.95), ("sound", 0.905)])
def test_the_papers_setting(reading: str, least: float) -> None:
    """sigma=8, L=600, 1,600 steps, DP-PCA at 16: the lot reading gives the paper's figure, and no guarantee."""
    result = training.train(
        dataset="mnist", model="paper", reading=reading, pca_noise_multiplier=16.0, noise_multiplier=8.0, lot=600,
        steps=1600, delta=1e-5, evaluations=1, seed=1,
    )  # fmt: skip
    assert result.accuracy >= least
    assert (result.guarantee.epsilon is None) == (reading == "lot")


@pytest.mark.slow
def test_the_default_run() -> None:
    result = training.train(dataset="mnist", epsilon=0.75, delta=1e-4)
    assert result.accuracy >= 0.92
    assert result.guarantee.epsilon is not None
    assert result.guarantee.epsilon <= 0.75
