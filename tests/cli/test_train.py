"""`adadp train`, `evaluate` and `predict` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from adadp import __version__, data
from adadp.algorithms.defaults import default_delta
from adadp.cli import app
from adadp.cli.pipeline import warn_about_delta

QUICK = ["--dataset", "digits", "--model", "linear", "--steps", "8", "--lot", "200", "--evaluations", "1"]
KEYS = {"accuracy", "epsilon", "claimed_epsilon", "delta", "guarantee", "steps", "algorithm", "seconds"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def values(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)  # JSON and nothing else
    assert result.stdout.count("\n") == 1, "one line"
    assert isinstance(found, dict)
    return found


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("adadp: ")
    return str(lines[0])


def test_epsilon_is_what_account_says_with_the_preprocessing() -> None:
    found = values("train", *QUICK, "--noise-multiplier", "3", "--delta", "1e-5", "--pca-noise-multiplier", "12")
    assert set(found) >= KEYS
    run = ["--examples", str(found["examples"]), "--lot", "200", "--steps", "8", "--noise-multiplier", "3"]
    said = values("account", *run, "--delta", "1e-5", "--gaussian", "12")
    assert found["epsilon"] == said["epsilon"]
    assert found["claimed_epsilon"] is None, "what has a guarantee needs no claim"
    assert found["delta"] == 1e-5
    assert (found["steps"], found["algorithm"]) == (8, "adadp")
    assert "1e-05)-differential privacy" in found["guarantee"]
    assert "not covered" in found["note"]


def test_a_budget_is_kept() -> None:
    found = values("train", *QUICK, "--epsilon", "0.7", "--delta", "1e-5", "--pca-noise-multiplier", "20")
    assert 0.69 < found["epsilon"] <= 0.7
    run = ["--examples", "1438", "--lot", "200", "--steps", "8", "--noise-multiplier", repr(found["noise_multiplier"])]
    assert found["epsilon"] == values("account", *run, "--delta", "1e-5", "--gaussian", "20")["epsilon"]


@pytest.mark.parametrize(
    ("algorithm", "reading"),
    [("adadp", "example"), ("adadp", "lot"), ("adan", "example"), ("adan", "lot"), ("dpopt", "published")],
)
def test_readings_of_the_paper_print_a_claim_and_no_epsilon(algorithm: str, reading: str) -> None:
    quick = [*QUICK, "--steps", "2"]
    found = values("train", *quick, "--algorithm", algorithm, "--reading", reading, "--epsilon", "4")
    assert found["epsilon"] is None
    assert 3.9 < found["claimed_epsilon"] <= 4
    assert found["guarantee"].startswith("none: ")
    assert found["reading"] == reading


@pytest.mark.parametrize("algorithm", ["dpsgd", "adal", "adan", "agd", "dpopt"])
def test_the_other_algorithms(algorithm: str) -> None:
    found = values("train", *QUICK, "--algorithm", algorithm, "--epsilon", "1")
    assert 0.9 < found["epsilon"] <= 1
    assert found["claimed_epsilon"] is None


def test_a_claim_is_theorem_1_on_the_training_steps() -> None:
    steps = ["--noise-multiplier", "3", "--delta", "1e-5", "--pca-noise-multiplier", "12"]
    found = values("train", *QUICK, *steps, "--reading", "lot")
    run = ["--examples", str(found["examples"]), "--lot", "200", "--steps", "8", "--noise-multiplier", "3"]
    said = values("account", *run, "--delta", "1e-5", "--accountant", "theorem1")
    assert (found["epsilon"], found["claimed_epsilon"]) == (None, said["epsilon"])


def test_without_privacy() -> None:
    found = values("train", *QUICK, "--algorithm", "sgd")
    assert found["epsilon"] is None
    assert found["claimed_epsilon"] is None
    assert found["guarantee"].startswith("none: ")


def test_for_people_every_setting_is_printed() -> None:
    result = call("train", *QUICK, "--seed", "12345", "--out", "run")
    assert result.exit_code == 0, result.output
    for text in ("noise-multiplier", "lot", "epochs", "max_grad_norm", "damping", "cosine", "device", "delta"):
        assert text in result.stdout
    assert "12345" not in result.stdout, "a seed is a secret"
    assert "its examples are not covered by the guarantee" in " ".join(result.stdout.split())
    assert "This rests on" in result.stdout
    assert {path.name for path in Path("run").iterdir()} >= {
        "config.json", "model.safetensors", "guarantee.json", "guarantee.md", "metrics.jsonl", "ledger.jsonl"
    }  # fmt: skip
    assert "12345" not in (Path("run") / "config.json").read_text()


def test_a_configuration_file_and_what_wins() -> None:
    Path("run.toml").write_text(
        'dataset = "digits"\nmodel = "linear"\nnoise-multiplier = 3.0\nepochs = 1\nlot = 200\n'
        'algorithm = "dpsgd"\nevaluations = 1\n[settings]\nmomentum = 0.5\n'
    )
    found = values("train", "--config", "run.toml", "--steps", "3")
    assert (found["steps"], found["algorithm"], found["noise_multiplier"]) == (3, "dpsgd", 3.0)
    config = json.loads((Path(found["run"]) / "config.json").read_text())
    assert config["settings"]["momentum"] == 0.5
    other = values("train", "--config", "run.toml", "--epsilon", "1", "--steps", "2", "--set", "momentum=0.25")
    assert other["noise_multiplier"] != 3.0
    assert json.loads((Path(other["run"]) / "config.json").read_text())["settings"]["momentum"] == 0.25
    Path("wrong.toml").write_text("epsilom = 1\n")
    assert "'epsilom'" in refused("train", "--config", "wrong.toml")
    Path("wrong.toml").write_text("steps = 'many'\n")
    assert "whole number" in refused("train", "--config", "wrong.toml")
    Path("wrong.toml").write_text("steps = = 3\n")
    assert "not TOML" in refused("train", "--config", "wrong.toml")
    assert "cannot be read" in refused("train", "--config", "nowhere.toml")


def write_table(path: str, rows: int = 300, label: str = "label") -> str:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, rows)
    lines = [f"amount,colour,{label}"]
    for y in labels:
        colour = generator.choice(["red", "green"])
        lines.append(f"{generator.normal(5000 + 4000 * y, 800):.2f},{colour},{('no', 'yes')[y]}")
    Path(path).write_text("\n".join(lines) + "\n")
    return path


def test_a_table_of_ones_own() -> None:
    write_table("train.csv", label="bought")
    found = values("train", "--dataset", "train.csv", "--label", "bought", "--epsilon", "3", "--steps", "20",
                   "--test-fraction", "0.3", "--out", "run", "--seed", "1", "--yes")  # fmt: skip
    assert len(found["gaussian"]) == 4
    assert found["epsilon"] <= 3
    run = ["--examples", str(found["examples"]), "--lot", str(found["lot"]), "--steps", "20"]
    run += ["--noise-multiplier", repr(found["noise_multiplier"]), "--delta", "1e-4"]
    for sigma in found["gaussian"]:
        run += ["--gaussian", repr(sigma)]
    assert found["epsilon"] == values("account", *run)["epsilon"]
    held = values("evaluate", "run", "--dataset", "train.csv")
    assert held["accuracy"] > 0.8
    assert "not covered" in held["note"]
    Path("new.csv").write_text("colour,amount\nred,5000\ngreen,9100\n")
    assert values("predict", "run", "new.csv")["predictions"] == ["no", "yes"]
    result = call("predict", "run", "new.csv")
    assert result.stdout.split() == ["no", "yes"]
    assert "give it again with --seed" in refused("evaluate", "run")
    assert values("evaluate", "run", "--seed", "1")["accuracy"] == found["accuracy"], "the rows that were held out"
    Path("less.csv").write_text("colour\nred\n")
    assert "'amount'" in refused("predict", "run", "less.csv")


OWN = ["--yes", "--epsilon", "3", "--delta", "1e-3", "--steps", "2", "--lot", "30", "--seed", "1", "--model", "linear"]


def test_what_counts_as_public_is_said_before_anything_is_spent() -> None:
    write_table("train.csv")
    said = call("train", "--dataset", "train.csv", *OWN, "--out", "one").stdout
    line = next(line for line in said.splitlines() if line.startswith("public by your use of this data: N = "))
    assert line.endswith("held out; classes: no, yes")
    assert said.index(line) < said.index("Trained")
    rests_on = json.loads((Path("one") / "guarantee.json").read_text())["assumptions"]
    assert any(text.startswith("public: the number of rows: N = ") for text in rests_on)
    assert "public: the class names, as they occur in the data (no, yes)" in rests_on
    assert json.loads((Path("one") / "config.json").read_text())["classes_declared"] is False
    result = call("train", "--dataset", "train.csv", *OWN, "--seed", "2", "--out", "two",
                  "--classes", "yes, no,maybe", "--json")  # fmt: skip
    assert json.loads(result.stdout)["steps"] == 2, "JSON and nothing else"
    assert result.stderr.splitlines()[0].endswith("held out; declared classes: yes, no, maybe")
    config = json.loads((Path("two") / "config.json").read_text())
    assert (config["classes"], config["classes_declared"]) == (["yes", "no", "maybe"], True)
    assert (
        "public: the class names, declared (yes, no, maybe)"
        in json.loads((Path("two") / "guarantee.json").read_text())["assumptions"]
    )
    assert "public by your use" not in call("train", *QUICK).output, "of a published data set all is public"


def test_labels_outside_the_declared_classes() -> None:
    Path(write_table("t.csv")).write_text(Path("t.csv").read_text() + "12,red,perhaps\n")
    arguments = ["train", "--dataset", "t.csv", *OWN, "--classes", "no,yes"]
    assert "drop-other-labels" in refused(*arguments)
    assert not Path("runs").exists(), "nothing was started"
    found = values(*arguments, "--drop-other-labels", "--out", "run")
    config = json.loads((Path("run") / "config.json").read_text())
    assert config["drop_other_labels"] is True
    assert found["examples"] < 301
    assert values("evaluate", "run", "--dataset", "t.csv")["examples"] == 300
    Path("run.toml").write_text('dataset = "t.csv"\nclasses = ["no", "yes"]\ndrop-other-labels = true\n')
    assert values("train", "--config", "run.toml", *OWN, "--ledger", "again")["examples"] == found["examples"]
    assert "data of your own" in refused("train", "--dataset", "digits", "--classes", "a,b")
    assert "classes" in refused("train", "--dataset", "t.csv", "--drop-other-labels")
    assert "without a name" in refused("train", "--dataset", "t.csv", "--classes", "no,,yes")


def test_the_number_of_examples_has_one_wording() -> None:
    run = ["--examples", "1000", "--lot", "10", "--steps", "5"]
    wording = "the number of examples N in q = L / N is declared, public and the same for both neighbouring datasets"
    assert wording in values("account", *run, "--noise-multiplier", "2", "--delta", "1e-5")["assumptions"]
    calibrated = call("calibrate", *run, "--epsilon", "2", "--delta", "1e-5", "--json").stdout
    assert wording in json.loads(calibrated)["assumptions"]


def test_images_of_ones_own() -> None:
    found = values("train", *QUICK, "--pca-noise-multiplier", "30", "--out", "run")
    test = data.load("digits", "test")
    assert values("evaluate", "run")["accuracy"] == found["accuracy"]
    np.savez("some.npz", images=test.images[:5, 0].numpy())
    assert len(values("predict", "run", "some.npz")["predictions"]) == 5
    np.savez("large.npz", images=np.zeros((2, 9, 9), dtype=np.uint8))
    assert "(1, 9, 9)" in refused("predict", "run", "large.npz")
    np.savez("floats.npz", images=np.zeros((2, 8, 8)))
    assert "uint8" in refused("predict", "run", "floats.npz")
    write_table("train.csv")
    assert "none of the classes" in refused("evaluate", "run", "--dataset", "train.csv")
    assert "not the folder of a finished run" in refused("evaluate", "nowhere")
    assert "does not exist" in refused("predict", "run", "nowhere.npz")
    (Path("run") / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refused("predict", "run", "some.npz")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--epsilon", "1", "--noise-multiplier", "1"],
            "either --epsilon, to which the noise is calibrated, or --noise-",
        ),
        (["--lot", "2000"], "--lot must be in 1..1,438"),
        (["--epsilon", "nan"], "epsilon"),
        (["--noise-multiplier", "0"], "--noise-multiplier must be"),
        (["--algorithm", "adam"], "no algorithm"),
        (["--reading", "literal"], "no reading"),
        (["--algorithm", "dpsgd", "--reading", "lot"], "leave it out"),
        (["--model", "gpt"], "no model"),
        (["--schedule", "steep"], "schedule must be"),
        (["--set", "beta"], "NAME=VALUE"),
        (["--steps", "x"], "steps"),
        (["--test", "x.csv"], "--test goes with data of your own"),
        (["--dataset-name", "x"], "--dataset-name goes with data of your own"),
        (["--budget", "3"], "give --ledger too"),
        (["--steps", "1", "--out", "/dev/null/x"], "--out must be a folder that can be made"),
        (["--device", "cuda:99"], "cuda"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    assert said in refused("train", "--dataset", "digits", *arguments)
    assert not Path("runs").exists(), "nothing was started"


def test_bad_data_is_named() -> None:
    write_table("t.csv")
    assert "no label column 'outcome'" in refused("train", "--dataset", "t.csv", "--label", "outcome")
    Path("one.csv").write_text("a,label\n1,x\n2,x\n3,x\n")
    assert "one class only" in refused("train", "--dataset", "one.csv")
    Path("mixed.csv").write_text("a,label\n1,x\ntwo,y\n3,x\n")
    assert "'a'" in refused("train", "--dataset", "mixed.csv")
    Path("gap.csv").write_text("a,label\n1,x\n,y\n3,x\n")
    assert "row 2" in refused("train", "--dataset", "gap.csv")
    Path("other.csv").write_text("amount,colour,label\n1,red,maybe\n2,red,no\n")
    assert "'maybe'" in refused("train", "--dataset", "t.csv", "--test", "other.csv")
    images = np.zeros((4, 8, 8))
    images[0, 0, 0] = np.nan
    np.savez("nan.npz", images=images, label=np.array([0, 1, 0, 1]))
    assert "uint8" in refused("train", "--dataset", "nan.npz")
    Path("tiny.csv").write_text("a,label\n" + "\n".join(f"{i},{i % 2}" for i in range(40)) + "\n")
    assert "lot must be in" in refused("train", "--dataset", "tiny.csv", "--lot", "100")
    assert "neither digits" in refused("train", "--dataset", "nowhere.csv")


def write_texts(path: str, rows: int = 400) -> str:
    words = {"tea": "green black hot cup drink leaf", "code": "compiler loop debug library function build"}
    generator = np.random.default_rng(0)
    lines = ["topic,text,price,seen"]
    for _ in range(rows):
        topic = ("tea", "code")[generator.integers(2)]
        said = " ".join(generator.choice(words[topic].split(), 5))
        price = 20 + 60 * (topic == "tea") + generator.normal(0, 5)
        lines.append(f"{topic},{said},{price:.1f},2024-0{generator.integers(1, 9)}-11")
    Path(path).write_text("\n".join(lines) + "\n")
    return path


TEXTS = ["--dataset", "t.csv", "--epsilon", "3", "--delta", "1e-3", "--steps", "60"]
COLUMNS = ["--text", "text", "--number", "price=0..200", "--date", "seen=2024-01-01..2024-12-31"]


def test_what_is_read_off_the_rows_is_confirmed_before_anything_is_spent() -> None:
    write_texts("t.csv")
    line = call("train", *TEXTS, "--label", "topic", "--text", "text")
    assert line.exit_code == 2
    assert "column price: number" in line.stderr
    assert "classes: code, tea" in line.stderr
    assert "--yes" in line.stderr
    assert not Path("runs").exists()
    assert not list(Path().glob("*.jsonl")), "nothing was spent"
    declared = values("train", *TEXTS, "--label", "topic", *COLUMNS, "--classes", "tea,code", "--out", "run")
    assert declared["gaussian"] == [], "declared ranges and text cost nothing"
    assert declared["accuracy"] > 0.9
    assert json.loads((Path("run") / "config.json").read_text())["built"] == "linear"
    doubtful = call(
        "train", *TEXTS, "--label", "topic", "--classes", "tea,code", "--date", "seen", "--yes", "--out", "b"
    )
    assert "--text text" in doubtful.stderr, "free text that is taken as a category is remarked on"


def test_the_held_out_rows_can_be_had_again_and_a_changed_file_is_refused() -> None:
    write_texts("t.csv")
    found = values("train", *TEXTS, "--label", "topic", *COLUMNS, "--classes", "tea,code", "--out", "run")
    again = values("evaluate", "run")
    assert again["accuracy"] == found["accuracy"]
    assert again["metrics"] == found["metrics"]
    Path("new.csv").write_text(
        "text,price,seen\nhot green tea leaf cup,80,2024-02-02\nbuild loop debug,20,2024-02-02\n"
    )
    new = values("predict", "run", "new.csv", "--probabilities")
    assert new["predictions"] == ["tea", "code"]
    assert new["probabilities"][0][new["classes"].index("tea")] > 0.5
    assert call("predict", "run", "new.csv", "--probabilities").stdout.splitlines()[0] == "prediction\ttea\tcode"
    Path("t.csv").write_text(Path("t.csv").read_text() + "tea,hot,70,2024-01-01\n")
    assert "other rows than when the run was trained" in refused("evaluate", "run")


def test_a_number_is_predicted() -> None:
    write_texts("t.csv")
    regression = ["--task", "regression", "--target-range", "0..100", "--label", "price"]
    arguments = ["train", *TEXTS, *regression, "--text", "text", "--category", "topic=tea,code", "--ignore", "seen"]
    found = values(*arguments, "--out", "run")
    assert found["accuracy"] is None
    assert found["metrics"]["values"]["mae"] < 0.5 * found["metrics"]["baseline"]
    assert values("evaluate", "run")["metrics"] == found["metrics"]
    Path("new.csv").write_text("text,topic\nhot green cup leaf cup,tea\n")
    assert 50 < values("predict", "run", "new.csv")["predictions"][0] <= 100
    said = call(*arguments).stdout
    assert "mean absolute error" in said
    assert "a number in 0..100 is predicted" in said
    assert "go together" in refused("train", *TEXTS, "--task", "regression", "--label", "price")


def test_paid_figures_are_in_the_budget() -> None:
    write_texts("t.csv")
    found = values(
        "train", *TEXTS, "--label", "topic", *COLUMNS, "--classes", "tea,code", "--paid-metrics", "--out", "run"
    )
    assert len(found["gaussian"]) == 1
    assert 2.9 < found["epsilon"] <= 3
    assert "covered by the guarantee" in found["note"]
    counted = [one["rows"] for one in found["metrics"]["by_class"].values()]
    assert all(rows == 0 or rows != round(rows) for rows in counted), "noised counts"
    assert found["metrics"]["noise"] > 0
    along = [json.loads(line) for line in (Path("run") / "metrics.jsonl").read_text().splitlines()]
    assert all(line["accuracy"] is None for line in along), "nothing exact on the way"


def test_a_run_that_learnt_nothing_says_so() -> None:
    rows = "\n".join(f"{i % 7},{'ab'[i % 5 == 0]}" for i in range(300))
    Path("t.csv").write_text(f"x,label\n{rows}\n")
    found = values("train", "--dataset", "t.csv", "--epsilon", "0.1", "--delta", "1e-3", "--steps", "5", "--yes")
    assert found["metrics"]["learnt"] is False
    assert "learnt nothing" in found["warnings"][-1]


def test_two_runs_on_a_file_print_what_both_cost() -> None:
    write_table("train.csv")
    quick = ["train", "--dataset", "train.csv", "--yes", "--noise-multiplier", "3", *QUICK[4:6], "--lot", "30"]
    first = call(*quick).stdout
    assert "ledger of 'train'" in first
    assert "no run so far" in first
    again = call(*quick)
    told = " ".join(again.stdout.split())
    assert told.index("1 run so far, epsilon") < told.index("Trained"), "before it starts"
    assert "epsilon of this run" in told
    assert "all 2 runs together. This is the one to publish" in told
    assert "claimed" not in told
    kept = json.loads((Path("runs") / "train-adadp-2" / "result.json").read_text())
    assert kept["run_epsilon"] < kept["epsilon"] == kept["dataset_epsilon"]


def test_the_version_and_large_epsilons() -> None:
    assert call("--version").stdout == f"adadp {__version__}\n"
    run = [
        "account",
        "--examples",
        "1000",
        "--lot",
        "10",
        "--noise-multiplier",
        "0.3",
        "--steps",
        "500",
        "--delta",
        "1e-5",
    ]
    result = call(*run)
    assert "adadp: warning: epsilon 49" in result.stderr
    assert values(*run)["warnings"][0].startswith("epsilon 49")
    assert "warning" not in call(*run[:6], "3", *run[7:]).stderr


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_the_default_delta_needs_no_warning(name: str) -> None:
    examples = {"mnist": 60_000, "digits": 1_438}[name]
    assert warn_about_delta(default_delta(examples), examples) == ()
    assert warn_about_delta(1e-3, 60_000) != ()


def test_a_run_of_version_0_2_predicts_as_it_did() -> None:
    """Its config.json calls categories text and knows no kinds of columns; a code of digits must stay a category."""
    Path("t.csv").write_text("code,label\n" + "".join(f"{'A1' if i % 2 else '17'},{'ab'[i % 2]}\n" for i in range(300)))
    arguments = ["--dataset", "t.csv", "--classes", "a,b", "--category", "code", "--steps", "30", "--epsilon", "3"]
    values("train", *arguments, "--delta", "1e-3", "--out", "run")
    Path("new.csv").write_text("code\n17\n17\n")  # numbers, if they were read off
    now = values("predict", "run", "new.csv")["predictions"]
    config = json.loads((Path("run") / "config.json").read_text())
    config["text"] = config.pop("category")
    for name in ("kinds", "number", "date", "ignore", "decimal_comma", "rows", "split_seed", "sha256"):
        config.pop(name, config.pop(name.replace("_", "-"), None))
    (Path("run") / "config.json").write_text(json.dumps(config))
    assert values("predict", "run", "new.csv")["predictions"] == now == ["a", "a"]
    assert "give --dataset" in refused("evaluate", "run")
    assert values("evaluate", "run", "--dataset", "t.csv")["accuracy"] > 0.9
