"""`adadp report` on runs that were really made: what it says, what it must not say, in each format."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adadp.accounting.events import Gaussian, Uncovered
from adadp.accounting.guarantee import round_up
from adadp.accounting.ledger import Ledger
from adadp.cli import app
from adadp.errors import ConfigurationError, InterruptedRunError
from adadp.report import FORMATS, report, text_of
from adadp.report.wording import NOTHING_PROMISED
from adadp.training.loop import plan, run, train

QUICK: dict[str, Any] = {"lot": 60, "evaluations": 3, "epsilon": 2.0, "delta": 1e-3, "checkpoint_every": 0.0}
DIGITS = {**QUICK, "dataset": "digits", "steps": 12, "model": "linear"}
SCRIPT = "<script>alert(1)</script>"
SECRET = "a-path-that-names-somebody"

Runs = dict[str, Path]


def _table(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["outcome,amount,colour<b>,who"]
    lines += [f"{SCRIPT if i % 3 else 'no'},{i % 7},{'red' if i % 2 else '<i>green</i>'},p{i // 2}" for i in range(400)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of each kind that a report must tell of."""
    folder = tmp_path_factory.mktemp("runs")
    own: dict[str, Any] = {
        **QUICK, "dataset": _table(folder / SECRET / "people.csv"), "label": "outcome", "ignore": ("who",), "steps": 8,
        "model": "linear",
    }  # fmt: skip
    visits = {**own, "dataset": _table(folder / "visits.csv"), "ignore": (), "person": "who"}
    options: dict[str, dict[str, Any]] = {
        "sound": DIGITS,
        "dpsgd": {**DIGITS, "algorithm": "dpsgd"},
        "lot": {**DIGITS, "reading": "lot"},
        "sgd": {**DIGITS, "algorithm": "sgd", "epsilon": None},
        "agd": {**DIGITS, "algorithm": "agd"},
        "paid": {**DIGITS, "paid_metrics": True},
        "first": own,
        "second": {**own, "algorithm": "dpsgd"},
        "person": visits,
        "number": {
            **own, "dataset": _table(folder / "numbers.csv"), "label": "amount", "task": "regression",
            "target_range": "0..7",
        },
    }  # fmt: skip
    for name, given in options.items():
        train(**given, out=str(folder / name))
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError):
        run(plan(**{**DIGITS, "checkpoint_every": 60.0}, out=str(folder / "stopped")), stop=lambda: next(steps) > 7)
    return {name: folder / name for name in (*options, "stopped")}


@pytest.fixture(scope="module")
def told(runs: Runs) -> Callable[..., str]:
    """The text of a report, made once; without tags and entities where it is HTML."""
    made: dict[Any, str] = {}

    def tell(*names: str, format: str = "html", public: bool = False, plain: bool = True) -> str:
        key = (names, format, public)
        if key not in made:
            made[key] = text_of([runs[name] for name in names], format=format, public=public)
        text = made[key]
        if format == "html" and plain:
            text = unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", text, flags=re.S))
        return text

    return tell


def values(told: Callable[..., str], *names: str, **options: Any) -> dict[str, Any]:
    return dict(json.loads(told(*names, format="json", **options)))


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_a_run_is_told_in_every_format(runs: Runs, told: Callable[..., str]) -> None:
    guarantee = json.loads((runs["sound"] / "guarantee.json").read_text())
    for format in ("html", "md"):
        text = told("sound", format=format).replace("\\", "")
        assert round_up(guarantee["epsilon"]) in text
        for condition in guarantee["assumptions"]:
            assert condition[1:].rstrip(".") in text, "the guarantee's conditions, all of them"
        for said in (
            "An attacker",
            "Epsilon over time",
            "Noise and signal by layer",
            "sigma_i",
            "adadp train",
        ):
            assert said in text, (format, said)
        for name in ("model.safetensors", "metrics.jsonl", "ledger.jsonl"):
            assert name in text, "every file of the run and who may see it"
    found = values(told, "sound")["runs"][0]
    assert found["epsilon"] == found["run_epsilon"] == guarantee["epsilon"]
    assert found["epsilon_by_step"][-1] == [12, pytest.approx(guarantee["epsilon"])]
    assert [step for step, _ in found["epsilon_by_step"]] == sorted(step for step, _ in found["epsilon_by_step"])
    assert found["figures"]["curve"][-1]["accuracy"] == found["figures"]["values"]["accuracy"]
    assert found["noise_over_signal"].keys() == {"1"}


@pytest.mark.parametrize("name", ["lot", "sgd"])
def test_that_there_is_no_guarantee_cannot_be_overlooked(name: str, told: Callable[..., str]) -> None:
    for format in ("html", "md"):
        text = " ".join(told(name, format=format).replace("\\", "").split())
        assert text.index(NOTHING_PROMISED) < text.index("How well it predicts")
        assert text.index("No guarantee") < text.index(NOTHING_PROMISED)
        assert "right at most" not in text, "nothing bounds an attacker"
    found = values(told, name)["runs"][0]
    assert found["epsilon"] is None
    assert found["attacker"] is None
    assert {file["who"] for file in found["files"] if file["file"] == "model.safetensors"} == {"curator only"}
    beside = told("sound", name)
    assert f"No guarantee for {name}" in beside


def test_of_two_runs_on_one_data_set_the_number_to_publish_is_that_of_both(told: Callable[..., str]) -> None:
    first, second = values(told, "first", "second")["runs"]
    assert first["epsilon"] == second["epsilon"] > first["run_epsilon"], "also for the one that was made before"
    assert (first["dataset_runs"], second["dataset_runs"]) == (2, 2)
    assert (first["later_runs"], second["later_runs"]) == (1, None)
    assert first["dataset_epsilon_by_step"] == []
    assert second["dataset_epsilon_by_step"][-1][1] == pytest.approx(second["epsilon"])
    assert second["dataset_epsilon_by_step"][0][1] > first["run_epsilon"] * 0.9, "the first run counts from the start"
    text = told("first")
    assert "After this run 1 run was charged for the same data" in text
    assert "publish the number of the data set" in text
    assert f"epsilon of the data set (2 runs): publish this one {round_up(first['epsilon'])}" in " ".join(text.split())
    public = values(told, "first", public=True)["runs"][0]
    assert public["epsilon"] == first["epsilon"], "a page to publish does not say the smaller number of that time"


def test_a_ledger_that_is_away_is_said(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs["first"], tmp_path / "copy")
    result = json.loads((tmp_path / "copy" / "result.json").read_text())
    (tmp_path / "copy" / "result.json").write_text(json.dumps({**result, "ledger": "/nowhere/ledger.jsonl"}))
    assert "ledger is not at hand" in text_of([tmp_path / "copy"])


def test_another_ledger_in_its_place_is_not_taken_for_its_own(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs["first"], tmp_path / "copy")
    result = json.loads((tmp_path / "copy" / "result.json").read_text())
    other = str(runs["person"] / ".." / "visits.csv.adadp-ledger.jsonl")
    (tmp_path / "copy" / "result.json").write_text(json.dumps({**result, "ledger": other}))
    found = json.loads(text_of([tmp_path / "copy"], format="json"))["runs"][0]
    assert found["epsilon"] == found["run_epsilon"]
    assert any("ledger is not at hand" in text for text in found["remarks"])


def test_the_unit_is_the_one_of_the_guarantee(told: Callable[..., str]) -> None:
    assert "asks whether one person was in the data" in told("person")
    assert "The units differ" in told("person", "first")


def test_numbers_are_told_by_their_error(told: Callable[..., str]) -> None:
    assert "mean absolute error on held-out rows" in told("number")
    assert "Accuracy on held-out rows" not in told("number")


def test_a_line_search_has_no_history_and_no_epsilon_by_step(told: Callable[..., str]) -> None:
    assert "nor do line searches" in told("agd")
    assert values(told, "agd")["runs"][0]["epsilon_by_step"] == []
    assert values(told, "agd")["runs"][0]["attacker"]["right_at_most"] < 1


def test_a_run_that_was_stopped_is_told_as_far_as_it_went(told: Callable[..., str]) -> None:
    text = told("stopped")
    assert "This run has not ended: its last note is of step 8 of 12" in text
    assert "charged so far, the rest of the plan included" in text
    found = values(told, "stopped")["runs"][0]
    assert not found["finished"]
    assert 0 < found["epsilon"] <= 2
    assert [line["step"] for line in found["figures"]["curve"]] == [4, 8]


@pytest.mark.parametrize("name", ["config.json", "guarantee.json", "releases.json", "history.jsonl", "metrics.jsonl",
                                  "result.json"])  # fmt: skip
@pytest.mark.parametrize("change", ["gone", "torn", "strange"])
def test_a_folder_that_is_not_whole_is_told_and_that_is_said(
    name: str, change: str, runs: Runs, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["sound"], folder)
    if change == "gone":
        (folder / name).unlink()
    else:
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2 + 5] if change == "torn" else '{"step": [], "epsilon": "x"}\n')
    if name == "config.json" and change == "gone":
        with pytest.raises(ConfigurationError, match="not the folder of a run"):
            text_of([folder])
        return
    for format in FORMATS:
        assert text_of([folder], format=format)
    found = json.loads(text_of([folder], format="json"))["runs"][0]
    curves = name == "metrics.jsonl" and change != "torn"  # a figure that is not there
    assert found["remarks"] or curves, "what is missing is said"
    if name == "guarantee.json":
        assert found["epsilon"] is None or not found["finished"]


def test_releases_that_cost_more_than_the_guarantee_says_are_pointed_out(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["sound"], folder)
    releases = json.loads((folder / "releases.json").read_text())
    for key in ("all_releases", "own_releases"):
        releases[key][0][1] += 1
    (folder / "releases.json").write_text(json.dumps(releases))
    found = json.loads(text_of([folder], format="json"))["runs"][0]
    assert any("Do not rely on" in text for text in found["remarks"])
    assert found["attacker"] is None


@pytest.mark.parametrize("changes", [{"epsilon": 0.01}, {"unit": "one person"}])
def test_a_guarantee_that_promises_more_than_its_ledger_is_not_published(
    changes: dict[str, Any], runs: Runs, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["sound"], folder)
    said = json.loads((folder / "guarantee.json").read_text())
    (folder / "guarantee.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(ConfigurationError, match="promises more than the releases"):
        text_of([folder], public=True)
    assert any("Do not rely on" in text for text in json.loads(text_of([folder], format="json"))["runs"][0]["remarks"])


def test_an_epsilon_of_its_own_that_its_releases_do_not_allow_is_not_published(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["second"], folder)
    releases = json.loads((folder / "releases.json").read_text())
    releases["own"]["epsilon"] /= 10
    (folder / "releases.json").write_text(json.dumps(releases))
    with pytest.raises(ConfigurationError, match="promises more than the releases"):
        text_of([folder], public=True)


def test_what_a_run_released_that_did_not_end_counts(tmp_path: Path) -> None:
    settings = {**QUICK, "dataset": _table(tmp_path / "people.csv"), "label": "outcome", "steps": 4, "model": "linear"}
    first = train(**settings, out=str(tmp_path / "first"))
    before = json.loads(text_of([first.folder], format="json", public=True))["runs"][0]
    ledger = Ledger(first.ledger, neighbours=None)
    with ledger.start({"preprocessing": "scales", "unit": "one example"}) as charged:
        charged.charge(Gaussian(1.0))
    ledger.close()
    found = json.loads(text_of([first.folder], format="json", public=True))["runs"][0]
    assert found["epsilon"] > before["epsilon"] + 0.5
    assert found["dataset_runs"] == before["dataset_runs"]
    assert "After this run more was charged" in text_of([first.folder], format="md", public=True)
    with Ledger(first.ledger, neighbours=None).start({"unit": "one example"}) as charged:
        charged.charge(Uncovered("raw gradients were looked at"))
    last = json.loads(text_of([first.folder], format="json", public=True))["runs"][0]
    assert last["epsilon"] is None
    assert "model.safetensors" not in {file["file"] for file in last["files"]}, "nor may anything made of releases be"
    assert not last["noise_over_signal"]


def test_a_run_of_an_older_version_is_told(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(runs["sound"], folder)
    for name in ("releases.json", "history.jsonl"):
        (folder / name).unlink()
    found = json.loads(text_of([folder], format="json"))["runs"][0]
    assert found["attacker"]["from_releases"] is False
    whole = json.loads(text_of([runs["sound"]], format="json"))["runs"][0]
    assert found["attacker"]["right_at_most"] > whole["attacker"]["right_at_most"], "epsilon and delta alone say less"
    assert any("releases.json" in text for text in found["remarks"])


# ---- what it must not say -------------------------------------------------------------------------------------------


def test_figures_on_private_rows_mark_the_page(told: Callable[..., str]) -> None:
    text = told("first")
    assert "For the curator only" in text
    assert "It shows figures that the guarantee does not cover" in text
    assert text.count("the guarantee does not cover those people") == 2, "beside the curves of accuracy and of loss"


@pytest.mark.parametrize("format", FORMATS)
def test_a_public_page_has_nothing_that_may_not_be_published(format: str, runs: Runs, told: Callable[..., str]) -> None:
    for name in ("first", "second", "person", "number", "lot", "sgd"):
        text = told(name, format=format, public=True, plain=False)
        result = json.loads((runs[name] / "result.json").read_text())
        for figure in result["metrics"]["values"].values():
            shown = f"{figure:.4g}", f"{figure:.2%}", repr(figure)
            assert not [text for each in shown if len(each) > 5 and each in text]
        assert SECRET not in text, "no path"
        assert str(runs[name].parent) not in text
        assert "examples_per_second" not in text
        assert "loss" not in re.sub(r"row i of the losses.*?terms|losses and metrics", "", text, flags=re.I | re.S)
        for hidden in ("metrics.jsonl", "result.json", "run.json", "checkpoint", "ledger.jsonl.left"):
            assert f">{hidden}<" not in text
    assert "For the curator only" not in told("first", format=format, public=True)


def test_a_public_page_is_made_without_opening_private_files(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["first"], folder)
    before = text_of([folder], public=True)
    for name in ("metrics.jsonl", "run.json", "checkpoint.safetensors"):
        (folder / name).unlink(missing_ok=True)
    assert text_of([folder], public=True) == before


def test_what_was_paid_for_or_is_of_a_published_test_set_may_be_shown(runs: Runs, told: Callable[..., str]) -> None:
    for name in ("paid", "sound"):
        result = json.loads((runs[name] / "result.json").read_text())
        assert f"{result['accuracy']:.2%}" in told(name, public=True)
    assert "released with noise and charged" in values(told, "paid", public=True)["runs"][0]["figures"]["why"]
    assert "accuracy" not in told("lot", public=True).split("Settings")[0], "weights without a guarantee"


def test_figures_without_noise_do_not_pass_for_paid_ones(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["first"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "paid_metrics": True}))
    assert json.loads(text_of([folder], format="json", public=True))["runs"][0]["figures"] is None


def test_what_has_not_ended_is_not_published(runs: Runs) -> None:
    with pytest.raises(ConfigurationError, match="has not ended"):
        text_of([runs["stopped"]], public=True)


def test_names_are_text_and_nothing_else(runs: Runs, told: Callable[..., str]) -> None:
    page = told("first", plain=False)
    assert unescape(SCRIPT) in told("first"), "the class name is there"
    assert not re.search(r"<(script|b|i)\b", page, re.I)
    assert not re.search(r"\bon\w+\s*=", re.sub(r">[^<]*<", "><", page))
    assert "<script" not in re.sub(r"\\<", "", told("first", format="md"))


def test_a_page_needs_nothing_from_elsewhere(told: Callable[..., str]) -> None:
    page = told("sound", "first", plain=False)
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"\b(src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Path:
    shutil.copytree(runs["sound"], tmp_path / "run")
    return tmp_path / "run"


def test_the_command_writes_into_the_first_run(copied: Path, runs: Runs, tmp_path: Path) -> None:
    found = call(copied, runs["dpsgd"])
    assert found.exit_code == 0, found.output
    assert "2 runs on digits" in (copied / "report.html").read_text()
    assert "for the curator only" in found.stdout
    found = call(copied, "--public", "--format", "md")
    assert found.stdout.strip().endswith("report-public.md")
    assert (copied / "report-public.md").read_text().startswith("# adadp on digits\n")
    call(copied, "--out", tmp_path / "elsewhere.json", "--format", "json")
    assert json.loads((tmp_path / "elsewhere.json").read_text())["public"] is False
    files = {
        file["file"]: file["who"] for file in json.loads((tmp_path / "elsewhere.json").read_text())["runs"][0]["files"]
    }
    assert (files["report.html"], files["report-public.md"]) == ("curator only", "may be published")


@pytest.mark.parametrize(("name", "format"), [("ledger.jsonl", "html"), ("guarantee.json", "json"), ("my.csv", "md")])
def test_no_file_but_an_earlier_report_is_written_over(name: str, format: str, runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["sound"], folder)
    (folder / "my.csv").write_text("a,b\n")
    before = (folder / name).read_bytes()
    with pytest.raises(ConfigurationError, match="would be lost"):
        report(folder, out=folder / name, format=format)
    assert (folder / name).read_bytes() == before
    assert report(folder, format=format) == report(folder, format=format), "a report is made anew"


def test_what_cannot_be_reported_is_refused_in_one_line(copied: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([tmp_path], "is not the folder of a run"),
        ([copied, copied], "give each run once"),
        ([copied, "--format", "pdf"], "--format must be one of html, md, json"),
        ([copied, "--out", tmp_path / "no" / "such" / "place.html"], "--out must be a file that can be written"),
    ):
        found = call(*arguments)
        assert found.exit_code == 2
        assert said in found.stderr
        assert found.stderr.count("\n") == 1
