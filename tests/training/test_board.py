"""Curves for TensorBoard: the figures of the run's own files, also of one that is resumed; refused before it spends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adadp.cli import app
from adadp.errors import InterruptedRunError, MissingExtraError
from adadp.training.loop import plan, resume, run, train
from adadp.training.run_files import Audience, run_file

QUICK: dict[str, Any] = {
    "dataset": "digits", "model": "linear", "epsilon": 3.0, "delta": 1e-3, "lot": 60, "steps": 12, "evaluations": 4,
    "tensorboard": True,
}  # fmt: skip


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: (step, value) of each curve."""
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="this takes the extra tensorboard"
    )
    found = events.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


def written(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_curves_are_the_figures_of_the_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="this takes the extra tensorboard")
    options = ["--model", "linear", "--lot", "60", "--steps", "12", "--tensorboard", "--out", str(tmp_path / "run")]
    called = CliRunner().invoke(app, ["train", *options])
    assert called.exit_code == 0, called.output
    assert f"tensorboard--logdir{tmp_path / 'run'}" in "".join(called.output.split())
    curves = shown(tmp_path / "run")
    lines = written(tmp_path / "run", "metrics.jsonl")
    for curve, name in (("held-out/accuracy", "accuracy"), ("privacy/epsilon", "epsilon"), ("training/lr", "lr")):
        assert curves[curve] == [(line["step"], pytest.approx(line[name])) for line in lines]
    notes = written(tmp_path / "run", "history.jsonl")
    assert curves["noise/1"] == [(note["step"], pytest.approx(note["layers"]["1"]["noise"])) for note in notes]
    assert not [name for name in curves if "seconds" in name or "samples" in name]


def test_a_resumed_run_goes_on_in_its_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="this takes the extra tensorboard")
    folder, asked = tmp_path / "run", []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 7

    with pytest.raises(InterruptedRunError):
        run(plan(**QUICK, out=str(folder)), stop=stop)
    resume(folder)
    curves, lines = shown(folder), written(folder, "metrics.jsonl")
    assert [step for step, _ in curves["held-out/accuracy"]] == [3, 6, 9, 12] == [line["step"] for line in lines]


def test_figures_that_are_paid_for_at_the_end_are_not_shown_on_the_way(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="this takes the extra tensorboard")
    train(**QUICK, paid_metrics=True, out=str(tmp_path / "run"))
    curves = shown(tmp_path / "run")
    assert not [name for name in curves if name.startswith("held-out")]
    assert curves["privacy/epsilon"]


def test_without_the_package_nothing_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"adadp\[tensorboard\]"):
        train(**QUICK, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_curves_are_the_curators() -> None:
    assert run_file("tensorboard").audience_with(True) is Audience.CURATOR
