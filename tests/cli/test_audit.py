"""`adadp audit`: its contract, its report, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adadp.cli import app

KEYS = {"epsilon_lower", "guaranteed_epsilon", "claimed_epsilon", "verdict", "confidence", "trials"}
SMALL = ["--trials", "210", "--steps", "2", "--seed", "1"]


def run(*arguments: str) -> dict[str, object]:
    found = CliRunner().invoke(app, ["audit", *arguments, "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_json_of_a_sound_algorithm() -> None:
    found = run("--algorithm", "dpsgd", "--threat", "gradient", "--epsilon", "2", "--delta", "1e-5", *SMALL)
    assert found.keys() >= KEYS
    assert found["verdict"] == "consistent"
    assert found["guaranteed_epsilon"] == pytest.approx(2.0, rel=0.01)
    assert 0 <= found["epsilon_lower"] <= found["guaranteed_epsilon"]
    assert found["confidence"] == 0.95
    assert found["trials"] == 210
    assert "synthetic" in found["privacy"]


def test_a_reading_without_a_guarantee_is_held_to_its_claim(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    found = run("--reading", "lot", "--epsilon", "0.5", *SMALL, "--steps", "4", "--report", str(folder))
    assert found["guaranteed_epsilon"] is None
    assert found["claimed_epsilon"] == pytest.approx(0.5, rel=0.01)
    assert found["verdict"] == "violated"
    assert found["epsilon_lower"] > 2
    assert json.loads((folder / "audit.json").read_text()) == found
    assert (folder / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "audit.svg").read_text()
    page = (folder / "audit.md").read_text()
    assert "violated" in page
    assert "There is no guarantee" in page
    counted = found["counted"]
    assert f"| {counted['without']} | {counted['false_positives']} |" in page


def test_the_table_for_people_says_the_same() -> None:
    shown = CliRunner().invoke(app, ["audit", "--algorithm", "dp-pca", "--trials", "200", "--seed", "1"])
    assert shown.exit_code == 0
    for word in ("consistent", "epsilon guaranteed", "trials", "Privacy of this output"):
        assert word in shown.stdout


def test_a_violation_says_what_it_rests_on() -> None:
    # A bound on epsilon may lie far below a guarantee that is contradicted: the whole curve is what was held against.
    shown = CliRunner().invoke(app, ["audit", "--reading", "lot", "--epsilon", "0.5", "--canary", "steady", *SMALL])
    assert "Why violated" in shown.stdout
    assert "Clopper-Pearson" in " ".join(shown.stdout.split("Why violated")[1].split())


def test_one_run() -> None:
    found = run("--algorithm", "dpsgd", "--one-run", "--examples", "90", "--epsilon", "2", "--seed", "1")
    assert found.keys() >= KEYS
    assert found["trials"] == 1
    assert found["canaries"] == 90


def test_a_real_dataset_says_what_it_was_charged(tmp_path: Path) -> None:
    ledger = tmp_path / "spent.jsonl"
    found = run(
        "--dataset", "digits", "--examples", "20", "--lot", "20", "--algorithm", "dpsgd", "--threat", "black-box",
        "--trials", "110", "--steps", "2", "--seed", "1", "--ledger", str(ledger),
    )  # fmt: skip
    assert "digits" in found["privacy"]
    assert f"charged to {ledger}" in found["privacy"]
    shown = CliRunner().invoke(app, ["ledger", "show", str(ledger), "--json"])
    charged = [event for each in json.loads(shown.stdout)["runs"] for event in each["charged"]]
    assert [count for _, count in charged] == [2 * (110 + 110)]  # and a second set, made or not


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithm", "sgd"], "sgd is not private"),
        (["--trials", "20"], "20 trials are too few"),
        (["--threat", "rumour"], "--threat must be one of gradient, white-box, black-box"),
        (["--canary", "dodo"], "no gradient canary is called 'dodo'"),
        (["--threat", "black-box", "--canary", "dodo"], "no canary example is called 'dodo'"),
        (["--layers", "4x4", "--canary", "last layer"], "do not fit a model of one layer"),
        (["--layers", "four"], "--layers must look like"),
        (["--epsilon", "1", "--noise-multiplier", "1"], "give either --epsilon"),
        (["--ledger", "x"], "--ledger goes with --dataset"),
        (["--confidence", "1"], "confidence must be above"),
        (["--algorithm", "nothing"], "no algorithm is called 'nothing'"),
        (["--dataset", "nothing"], "an audit's --dataset is one of"),
        (["--lot", "40"], "lot must be in 1..16"),
        (["--noise-multiplier", "0"], "the noise multiplier must be a finite number above 0, not 0.0"),
        (["--noise-multiplier", "nan"], "the noise multiplier must be a finite number above 0, not nan"),
        (["--algorithm", "dp-pca", "--noise-multiplier", "0"], "the noise multiplier must be a finite number above 0"),
        (["--algorithm", "dp-pca", "--epsilon", "-1"], "the target epsilon must be a finite number above 0"),
        (["--algorithm", "dp-pca", "--threat", "black-box"], "dp-pca is attacked as it is: no --threat"),
        (["--algorithm", "dp-pca", "--canary", "flipping"], "dp-pca is attacked as it is: no --canary"),
        (["--one-run", "--confidence", "2"], "confidence must be above"),
        (["--one-run", "--examples", "90", "--epsilon", "8"], "90 canaries are too few to contradict anything"),
        (["--one-run", "--layers", "4x4"], "--one-run has gradient canaries of its own: no --layers"),
        (["--dataset", "digits", "--examples", "20", "--canary", "opposed"], "'opposed' does not fit real examples"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["audit", *arguments])
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_suspicion_says_the_command_that_settles_it(tmp_path: Path) -> None:
    # Of a sound target the first set of trials contradicts the guarantee, by accident, and the second does not.
    options = ["--algorithm", "dp-scaler", "--trials", "200", "--seed", "14"]
    folder = tmp_path / "a report"
    found = run(*options, "--report", str(folder))
    assert found["verdict"] == "suspicious"
    assert found["confidence"] == 0.95
    assert found["confirmation"]["confidence"] == 0.999
    command = shlex.split(str(found["settled_by"]))
    assert command == [
        "adadp", "audit", "--algorithm", "dp-scaler", "--trials", "2000", "--confidence", "0.999", "--seed", "15",
        "--report", str(folder), "--json",
    ]  # fmt: skip
    assert str(found["settled_by"]) in (folder / "audit.md").read_text()
    shown = CliRunner().invoke(app, ["audit", *options])
    assert shown.exit_code == 0
    assert "not confirmed at 0.999" in " ".join(shown.stdout.split())
    assert "adadp audit --algorithm dp-scaler --trials 2000 --confidence 0.999 --seed 15\n" in shown.stdout


def test_a_violation_is_confirmed_and_still_exits_with_0() -> None:
    options = ["--reading", "lot", "--epsilon", "0.5", "--canary", "steady", "--canary", "last layer", *SMALL]
    found = run(*options)
    assert found["verdict"] == "violated"
    assert found["confirmation"]["contradicts"] is True
    assert found["settled_by"] is None


def test_help_says_what_the_words_and_the_exit_status_mean() -> None:
    shown = " ".join(CliRunner().invoke(app, ["audit", "--help"]).stdout.split())
    for word in ("consistent", "suspicious", "violated", "exit status is 0 whatever the verdict"):
        assert word in shown
