"""`adadp bench`: its contract, its table, its pages, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from adadp_lab.bench.models import SIZES
from adadp_lab.bench.scaling import SWEEPS
from lab.bench import tiny
from typer.testing import CliRunner

from adadp.cli import app

QUICK = ["bench", "--device", "cpu", "--rounds", "2", "--models", "mlp", "--against", "sgd"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "cpu", {**tiny.SIZES, **tiny.REAL})
    monkeypatch.setitem(SWEEPS, "cpu", tiny.SWEEPS)


def run(*arguments: str | Path) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_json() -> None:
    found = json.loads(run(*QUICK, "--clipping", "flat,ellipsoid,local", "--json"))
    keys = {"model", "method", "clipping", "device", "ms", "ratio_to_sgd", "peak_mib"}
    assert all(row.keys() >= keys for row in found["rows"])
    assert [row["clipping"] for row in found["rows"]] == [
        "none", "flat", "ellipsoid-diagonal", "ellipsoid-rowcolumn", "ellipsoid-kronecker", "local",
    ]  # fmt: skip
    assert found["versions"]["torch"]


def test_the_table_for_people(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cpu.json"
    shown = run(*QUICK, "--clipping", "flat", "--goals", "--out", path)
    assert "mlp on cpu: lot 8, width 16, depth 1" in shown
    (flat,) = [row for row in json.loads(path.read_text())["rows"] if row["clipping"] == "flat"]
    (line,) = [line for line in shown.splitlines() if line.startswith("adadp")]
    assert f"{flat['ratio_to_sgd']:.2f}x" in line
    assert "time 1.20" in line
    assert "goals" not in run(*QUICK, "--clipping", "flat")


def test_without_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    shown = CliRunner().invoke(app, [*QUICK[:-1], "sgd,opacus", "--clipping", "flat"])
    assert shown.exit_code == 0
    assert "Opacus is not installed" in shown.stdout
    assert "pip install 'adadp[bench]'" in " ".join(shown.stdout.split())
    found = json.loads(run(*QUICK[:-1], "sgd,opacus", "--clipping", "flat", "--json"))
    assert "Opacus is not installed" in found["notes"][0]


def test_pages_are_made_of_the_files(tmp_path: Path) -> None:
    run(*QUICK, "--out", tmp_path / "cpu.json")
    run("bench", "--scaling", "--device", "cpu", "--out", tmp_path / "scaling-cpu.json")
    names = {f"scaling-cpu-{what}.{kind}" for what in ("time", "memory") for kind in ("svg", "png")}
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.json", "scaling-cpu.json", *names}
    kept = json.loads((tmp_path / "cpu.json").read_text())
    kept["rows"][1] |= {"ratio_to_sgd": 12.34, "goals": {"time": {"most": 1.2, "met": False}}}
    kept["rows"][2] |= {"error": "out of memory", "ms": None, "ratio_to_sgd": None, "goals": {}}
    (tmp_path / "cpu.json").write_text(json.dumps(kept))
    for name in names:
        (tmp_path / name).unlink()
    shown = run("bench", "--draw", "--out", tmp_path)
    assert {Path(line).name for line in shown.splitlines()} == {"tables.md", *names}
    page = (tmp_path / "tables.md").read_text()
    assert "| adadp flat | 12.34x" in page
    assert "- mlp, adadp flat: time 12.340x of 1.200x" in page
    assert "- mlp, adadp ellipsoid-diagonal: out of memory" in page
    for name in names:
        assert (tmp_path / name).is_file()
        assert name in page or name.endswith(".png")
    again = page
    run("bench", "--draw", "--out", tmp_path)
    assert (tmp_path / "tables.md").read_text() == again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "lenet"], "no model is called 'lenet'; there are mlp, alexnet, wrn, transformer"),
        (["--clipping", "round"], "no clipping is called 'round'; there are flat, ellipsoid, local"),
        (["--against", "jax"], "no peer is called 'jax'; there are sgd, opacus"),
        (["--device", "abacus"], "device must be auto, cpu or cuda, not 'abacus'"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--scaling", "--models", "mlp"], "--scaling has models and sizes of its own: no --models"),
        (["--draw", "--scaling"], "--draw measures nothing: no --scaling"),
        (["--out", "."], "--out . is a folder: give a file"),
        (["--add"], "--add needs a file to add to: give --out"),
        (["--busy"], "times of single models are the wall's: no --busy"),
        (["--scaling", "--busy", "--threads", "2"], "--busy takes one thread: no --threads"),
        (["--draw", "--add"], "--draw measures nothing: no --add"),
        (["--fastdp", "."], ". is no checkout of fastDP: it has no fastDP/__init__.py"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert found.exit_code == 2
    assert found.stderr == f"adadp: {words}\n" or found.stderr.startswith(f"adadp: {words}")
    assert len(found.stderr.splitlines()) == 1


def test_files_of_several_runs_are_one(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    alone = ["bench", "--device", "cpu", "--rounds", "2", "--against", "sgd", "--clipping", "flat", "--out", path]
    run(*alone, "--models", "transformer", "--add")  # there is none yet
    run(*alone, "--models", "mlp", "--add")
    found = json.loads(path.read_text())
    assert [(row["model"], row["method"]) for row in found["rows"]] == [
        ("mlp", "sgd"), ("mlp", "adadp"), ("transformer", "sgd"), ("transformer", "adadp"),
    ]  # fmt: skip
    assert found["settings"]["sizes"] == {name: tiny.SIZES[name] for name in ("mlp", "transformer")}
    found["rows"][0]["lot"] = found["rows"][2]["lot"] = 7777
    path.write_text(json.dumps(found))
    run(*alone, "--models", "mlp", "--add")
    assert [row["lot"] for row in json.loads(path.read_text())["rows"]] == [8, 8, 7777, 2]
    found["versions"]["torch"] = "0.1"
    path.write_text(json.dumps(found))
    refused = CliRunner().invoke(app, [str(argument) for argument in [*alone, "--models", "mlp", "--add"]])
    assert refused.exit_code == 2
    assert "measured with other versions: torch 0.1 there" in refused.stderr
    assert json.loads(path.read_text()) == found
    run(*alone, "--models", "mlp")
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["mlp", "mlp"]


def test_a_model_whose_library_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = CliRunner().invoke(app, ["bench", "--device", "cpu", "--models", "mlp,llama-lora"])
    assert found.exit_code == 2
    assert "'llama-lora' is made of transformers peft, not installed here: pip install" in found.stderr


def test_draw_says_what_is_missing_or_strange(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["bench", "--draw", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert "has none of cpu.json" in found.stderr
    (tmp_path / "cpu.json").write_text('{"rows": []}')
    found = CliRunner().invoke(app, ["bench", "--draw", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert "was not written by this version" in found.stderr
