"""`adadp export`: whoever has what it writes uses the model without adadp, and learns nothing that is the curator's."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from adadp import models
from adadp.cli import app
from adadp.errors import ConfigurationError, InterruptedRunError
from adadp.preprocessing.free_text import words_are_there
from adadp.training import export as exporting
from adadp.training import prediction_inputs, run_folder
from adadp.training.export import export
from adadp.training.loop import Result, plan, run, train
from adadp.training.run_files import FILES, Audience
from adadp.training.settings import Settings

QUICK: dict[str, Any] = {"steps": 3, "evaluations": 1, "epsilon": 3.0, "delta": 1e-3, "lot": 60}
SEED = 918273645
SECRET = "Zyqwxv"  # a word of one person's row alone

#: Runs as if adadp were not installed, and prints outputs, numbers and answers.
ALONE = """
import importlib.abc, json, sys

class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("adadp", "adadp_lab", "sklearn", "scipy"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuses())
sys.path.insert(0, sys.argv[1])
import predict
import torch
model = predict.load_model()
rows = predict.read_csv(sys.argv[2]) if sys.argv[2].endswith(".csv") else sys.argv[2:]
numbers = predict.inputs(rows)
with torch.no_grad():
    outputs = model(numbers)
print(json.dumps([numbers.tolist(), outputs.tolist(), predict.answers(outputs)]))
"""


def without_adadp(folder: Path, *files: Path) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """The model's inputs, its outputs and what they mean, from a process that cannot import adadp."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), *map(str, files)],
        capture_output=True, text=True, check=False, cwd=folder, env=environment,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    numbers, outputs, answers = json.loads(found.stdout)
    return torch.tensor(numbers), torch.tensor(outputs), answers


def table(path: Path, rows: int = 300) -> Path:
    random = np.random.default_rng(0)
    words = ["pain", "cough", "fever", "calm", "fine"]
    lines = ["age,income,size,job,seen,note,label,risk"]
    for i in range(rows):
        note = SECRET if i == 7 else " ".join(random.choice(words, 3))
        cells = (
            f"{random.integers(18, 90)}.25", "" if i % 9 == 0 else f"{random.integers(900, 9000)}", "SML"[i % 3],
            ("nurse", "cook", "")[i % 3], f"2024-{1 + i % 12:02}-{1 + i % 28:02}T0{i % 10}:30", note,
            ("no", "yes")[i % 2], f"{i % 11}",
        )  # fmt: skip
        lines.append(",".join(cells))
    path.write_text("\n".join(lines) + "\n")
    return path


COLUMNS: dict[str, Any] = {
    "number": ("age=0..120", "income"),
    "category": ("size=S,M,L", "job"),
    "date": ("seen=2020-01-01..2026-12-31",),
    "text": ("note",),
    "missing": True,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def people(place: Path) -> Result:
    """A run on a table with every kind of column, with a seed, figures that are paid for and checkpoints."""
    return train(
        **QUICK, **COLUMNS, dataset=str(table(place / "people.csv")), classes=("no", "yes"), ignore=("risk",),
        seed=SEED, paid_metrics=True, checkpoint_every=1e-9, out=str(place / "run"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def exported(people: Result, place: Path) -> Path:
    return export(people.folder, place / "exported").folder


def inside(result: Result, file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs as adadp computes them."""
    finished = run_folder.read(result.folder)
    rows = prediction_inputs.read(file, finished)
    from adadp.training.preparation import rows as inputs_of

    return inputs_of(rows, finished.estimator), finished.outputs(rows)


def assert_same(result: Result, folder: Path, file: Path) -> list[Any]:
    numbers, outputs, answers = without_adadp(folder, file)
    wanted, known = inside(result, file)
    torch.testing.assert_close(numbers, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs, known, rtol=1e-5, atol=1e-5)
    return answers


# ---- use without adadp ----------------------------------------------------------------------------------------------


def test_a_table_with_every_kind_of_column(people: Result, exported: Path, place: Path) -> None:
    answers = assert_same(people, exported, place / "people.csv")
    assert len(answers) == 300
    assert set(answers) <= {"no", "yes"}


def test_the_program_prints_what_adadp_predict_prints(people: Result, exported: Path, place: Path) -> None:
    ours = CliRunner().invoke(app, ["predict", str(people.folder), str(place / "people.csv")])
    theirs = subprocess.run(
        [sys.executable, exported / "predict.py", place / "people.csv"], capture_output=True, text=True, check=True
    )
    assert theirs.stdout == ours.stdout


def test_what_the_documentation_shows(place: Path) -> None:
    data = place / "shown.csv"
    data.write_text("age,size,label\n" + "".join(f"{i % 90},{'SML'[i % 3]},{'ab'[i % 2]}\n" for i in range(200)))
    found = train(**QUICK, dataset=str(data), classes=("a", "b"), number=("age=0..120",), out=str(place / "shown"))
    folder = export(found.folder, place / "shown-out").folder
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        code = f"import sys\nsys.modules['adadp'] = None\n{block}"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_hashed_words_in_place_of_vectors(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp.preprocessing.free_text.words_are_there", lambda: False)
    found = train(
        **QUICK,
        **COLUMNS,
        dataset=str(table(place / "hashed.csv")),
        classes=("no", "yes"),
        ignore=("risk",),
        out=str(place / "h"),
    )
    folder = export(found.folder, place / "hashed").folder
    assert '"hashed words"' in (folder / "preprocessing.json").read_text()
    assert_same(found, folder, place / "hashed.csv")


def test_a_number_is_predicted_in_its_unit(place: Path) -> None:
    found = train(
        **QUICK, number=("age", "income=0..10000"), ignore=("size", "job", "seen", "note", "label"), missing=True,
        dataset=str(table(place / "risks.csv")), label="risk", task="regression", target_range="0..10",
        out=str(place / "r"), checkpoint_every=0,
    )  # fmt: skip
    folder = export(found.folder, place / "risks").folder
    answers = assert_same(found, folder, place / "risks.csv")
    ours = CliRunner().invoke(app, ["predict", str(found.folder), str(place / "risks.csv")])
    assert answers == pytest.approx([float(line) for line in ours.stdout.split()], rel=1e-5)
    assert "a number from 0 to 10" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "none"},
        {"model": "paper", "pca_noise_multiplier": 20.0},
        {},
        {"directions": 30, "mean_share": 0.1, "moments_share": 0.1, "feature_power": 0.6},
    ],
    ids=["pixels", "projected", "recipe", "scattering"],
)
def test_images_from_files(options: dict[str, Any], place: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="images take the extra data")
    name = "-".join(options) or "plain"
    folder = place / f"photos-{name}"
    random = np.random.default_rng(0)
    for i in range(200):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        image.fromarray(random.integers(0, 256, (20, 18), dtype=np.uint8)).save(folder / "ab"[i % 2] / f"{i}.png")
    out = str(place / f"run-{name}")
    found = train(**{**QUICK, **options}, dataset=str(folder), classes=("a", "b"), image_size="16x16", out=out)
    copy = export(found.folder, place / f"out-{name}").folder
    files = [folder / "a" / "0.png", folder / "b" / "1.png"]
    numbers, outputs, answers = without_adadp(copy, *files)
    for row, file in enumerate(files):
        wanted, known = inside(found, file)
        torch.testing.assert_close(numbers[row : row + 1], wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outputs[row : row + 1], known, rtol=1e-4, atol=1e-5)
    assert set(answers) <= {"a", "b"}


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_every_model_has_plain_code(name: str) -> None:
    from adadp.training.plain_code import plain_code

    shape = (3, 32, 32)
    code = plain_code(models.build(name, shape, 4), shape, 4)  # raises where it computes something else
    assert code is not None
    assert not re.search(r"^\s*(from|import) adadp", code, re.MULTILINE)


def test_a_module_of_somebody_elses_has_weights_and_no_code(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.only(x.flatten(1))

    monkeypatch.setitem(models.MODELS, "mine", lambda shape, classes: Mine())
    found = train(**QUICK, dataset="digits", model="mine", out=str(place / "mine"))
    folder = export(found.folder, place / "mine-out").folder
    assert not (folder / "model.py").exists()
    assert "its author's" in (folder / "README.md").read_text()
    plain = Mine()
    plain.load_state_dict(load_file(folder / "model.safetensors"))


CELLS: list[tuple[str, Any]] = [
    ("age", 40), ("age", True), ("age", "1e2"), ("age", " ? "), ("age", None), ("age", math.nan), ("age", 1e300),
    ("income", np.float32(3.5)), ("income", "-1_000"), ("size", "M"), ("size", "m"), ("size", ""), ("size", None),
    ("job", 3.0), ("job", "3"), ("job", 2.5), ("job", "Köchin\ud800"), ("job", math.nan), ("job", "na"),
    ("seen", "2024/02/29"), ("seen", "1.3.2024"), ("seen", "2024-03-01T12:30+02:00"), ("seen", "20240301"),
    ("seen", datetime.date(2024, 5, 6)), ("seen", datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC)),
    ("seen", "N/A"), ("note", ""), ("note", None), ("note", "pain " * 9000), ("note", "Ärzte sagen: gut!"),
]  # fmt: skip


def test_odd_cells_become_the_same_numbers(people: Result, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adadp.data.tablefile import MISSING
    from adadp.dates import day_of, day_of_time
    from adadp.training import alone

    monkeypatch.setattr(alone, "FOLDER", exported)
    usual = {"age": 40.0, "income": 2000.0, "size": "M", "job": "cook", "seen": "2024-01-01", "note": "fever"}
    rows = [{**usual, name: cell} for name, cell in CELLS]

    def number(cell: Any) -> float:
        gone = cell is None or (isinstance(cell, str) and cell.strip().lower() in MISSING)
        return math.nan if gone else float(cell)

    def day(cell: Any) -> float:
        if isinstance(cell, str):
            return math.nan if cell.lower() in MISSING else day_of(cell)
        return day_of_time(cell)

    kept: dict[str, Callable[[Any], Any]] = {"age": number, "income": number, "seen": day}
    columns = {}
    for name in usual:
        cells = [kept.get(name, lambda cell: cell)(row[name]) for row in rows]
        columns[name] = np.empty(len(rows), dtype=np.float64 if name in kept else object)
        columns[name][:] = cells
    estimator = run_folder.read(people.folder).estimator
    assert estimator is not None
    wanted = torch.from_numpy(np.asarray(estimator.transform(columns)))
    torch.testing.assert_close(alone.inputs(rows), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("column", "cell"), [("age", "forty"), ("seen", "03/01/2024"), ("seen", "soon")])
def test_a_cell_that_does_not_fit_is_named(
    column: str, cell: str, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adadp.training import alone

    monkeypatch.setattr(alone, "FOLDER", exported)
    usual = {"age": 40.0, "income": 2000.0, "size": "M", "job": "cook", "seen": "2024-01-01", "note": "fever"}
    with pytest.raises(ValueError, match=f"column '{column}': '{cell}' is no"):
        alone.inputs([{**usual, column: cell}])


# ---- what others may have -------------------------------------------------------------------------------------------


def private_values(result: Result, place: Path) -> dict[str, str]:
    """What only the curator may see of a run, as text that would be found in a file."""
    ledger = [json.loads(line) for line in Path(result.ledger).read_text().splitlines()]
    config = json.loads((result.folder / "config.json").read_text())
    values = {
        "seed": str(SEED),
        "row": SECRET,
        "folder": str(place),
        "home": str(Path.home()),
        "seconds": f"{result.seconds}",
    }
    values["key of the ledger"] = ledger[0]["key"]
    values |= {f"hash {line['n']}": line["hash"] for line in ledger}
    values |= {f"fingerprint {i}": str(line["seed"]) for i, line in enumerate(ledger) if line.get("seed")}
    if config["split_seed"] is not None:
        values["seed of the split"] = str(config["split_seed"])
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        figures = {name: value for name, value in json.loads(line).items() if name not in ("lr", "epsilon", "step")}
        values |= {f"{name} on the way": f"{value}" for name, value in figures.items() if value is not None}
    return values


def assert_nothing_private(folder: Path, values: dict[str, str]) -> None:
    for path in folder.iterdir():
        found = path.read_bytes()
        for name, value in values.items():
            for text in (value.encode(), json.dumps(value)[1:-1].encode()):
                assert text not in found, f"{path.name} holds the {name}"


def test_nothing_that_is_the_curators_is_in_any_file(people: Result, exported: Path, place: Path) -> None:
    values = private_values(people, place)
    assert len(values) > 8
    with pytest.raises(AssertionError):  # the search finds what is there
        assert_nothing_private(people.folder, values)
    assert_nothing_private(exported, values)
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "README.md", "guarantee.json", "model.py", "model.safetensors", "predict.py", "preprocessing.json",
        "releases.json",
    }  # fmt: skip
    curators = {file.name for file in FILES if file.audience is Audience.CURATOR}
    assert not names & curators


def test_figures_that_nobody_paid_for_are_left_out_and_the_split_too(place: Path) -> None:
    settings = {**QUICK, **COLUMNS, "ignore": ("risk",)}
    settings |= {"dataset": str(table(place / "unpaid.csv")), "classes": ("no", "yes")}
    train(**settings, reading="lot", out=str(place / "uncharged"))  # it is named in the guarantee of those after it
    found = train(**settings, out=str(place / "unpaid"))
    assert "uncharged" in found.guarantee.to_json()
    folder = export(found.folder, place / "unpaid-out").folder
    values = private_values(found, place)
    values |= {name: f"{value}" for name, value in found.metrics.values.items() if value not in (0.0, 0.5, 1.0)}
    assert_nothing_private(folder, values)
    config = json.loads((found.folder / "config.json").read_text())
    (found.folder / "config.json").write_text(json.dumps({**config, "paid_metrics": True}))
    again = export(found.folder, place / "unpaid-again").folder  # figures without noise do not pass for paid ones
    assert_nothing_private(again, {name: f"{value}" for name, value in values.items()})
    assert "Left out" in (again / "README.md").read_text()
    card = (folder / "README.md").read_text()
    assert "Left out" in card.split("## How good it is")[1]
    assert "accuracy |" not in card


def test_the_card_has_the_guarantee_and_what_was_paid_for(people: Result, exported: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="reading front matter takes a reader of YAML")
    text = (exported / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "tabular-classification"
    assert people.guarantee.sentence() in body
    for condition in people.guarantee.assumptions:
        assert condition in body
    assert f"| accuracy | {people.metrics.values['accuracy']:.4g} |" in body
    assert f"{people.plan.population} rows of private data" in body
    assert json.loads((exported / "guarantee.json").read_text()) == people.guarantee.to_dict()


def test_names_from_elsewhere_are_text_in_the_card(place: Path) -> None:
    path = place / "odd|<b>name`.csv"
    rows = "\n".join(f"{i % 7},{'yes|</script>' if i % 2 else '`no`'}" for i in range(300))
    path.write_text(f"a|b`c,label\n{rows}\n")
    found = train(**QUICK, dataset=str(path), dataset_name="odd", out=str(place / "odd"), class_weights="paid")
    card = (export(found.folder, place / "odd-out").folder / "README.md").read_text()
    assert "`a\\|b'c` (number)" in card
    assert "`yes\\|</script>`" in card
    assert "| class weights | `paid` |" in card
    for text in (card, (found.folder / "guarantee.md").read_text()):  # the conditions name the classes, too
        outside = re.sub(r"<!-- adadp: [a-z ]+ -->|`[^`\n]+`", "", re.sub(r"```.*?```", "", text, flags=re.S))
        assert "</script>" not in outside
        assert "yes\\|&lt;/script&gt;" in text


# ---- later runs, no guarantee, refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"epsilon": 0.01}, {"unit": "one person"}])
@pytest.mark.parametrize("away", [False, True])
def test_a_guarantee_that_promises_more_than_was_charged_is_refused(
    changes: dict[str, Any], away: bool, people: Result, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(people.folder, run)
    if away:
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "ledger": "/nowhere/ledger.jsonl"}))
        if "unit" in changes:
            pytest.skip("no file but the ledger knows the unit")
    said = json.loads((run / "guarantee.json").read_text())
    (run / "guarantee.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(ConfigurationError, match="promise more than the releases on record allow"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_number_is_that_of_the_data_with_later_runs(place: Path) -> None:
    data = str(table(place / "twice.csv"))
    settings = {**QUICK, **COLUMNS, "ignore": ("risk",), "dataset": data, "classes": ("no", "yes")}
    first = train(**settings, out=str(place / "first"))
    second = train(**settings, out=str(place / "second"))
    assert second.guarantee.epsilon is not None
    found = export(first.folder, place / "first-out")
    assert found.guarantee.epsilon == pytest.approx(second.guarantee.epsilon)
    card = (found.folder / "README.md").read_text()
    assert "2 runs, this one included," in card
    assert "This run alone" in card
    assert json.loads((found.folder / "releases.json").read_text())["runs"] == 2
    for part in Path(first.ledger).parent.glob("twice.csv.adadp-ledger.jsonl*"):
        part.rename(part.with_name("elsewhere" + part.name))
    alone = export(first.folder, place / "first-again")
    assert alone.guarantee == first.guarantee
    assert "later ones add to it" in (alone.folder / "README.md").read_text()


def test_conditions_that_the_ledger_has_on_record_are_in_the_card(people: Result, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(people.folder, run)
    said = json.loads((run / "guarantee.json").read_text())
    (run / "guarantee.json").write_text(json.dumps({**said, "assumptions": []}))
    card = (export(run, tmp_path / "out").folder / "README.md").read_text()
    assert "all settings are public" in card


@pytest.mark.parametrize("options", [{"reading": "lot"}, {"algorithm": "sgd", "epsilon": None}], ids=["raw", "sgd"])
def test_a_run_without_a_guarantee_says_so(options: dict[str, Any], place: Path) -> None:
    name = options.get("reading", "sgd")
    found = train(**{**QUICK, **options}, dataset="digits", model="linear", out=str(place / name))
    with pytest.raises(ConfigurationError, match=r"guarantee of .* is none: .*--without-guarantee"):
        export(found.folder, place / f"{name}-out")
    called = CliRunner().invoke(app, ["export", str(found.folder), str(place / f"{name}-out"), "--without-guarantee"])
    assert called.exit_code == 0, called.output
    assert "no guarantee" in called.stderr
    card = (place / f"{name}-out" / "README.md").read_text()
    assert "**This model has no privacy guarantee.**" in card
    assert "**without a privacy guarantee**" in card
    assert "under differential privacy" not in card


def test_what_is_refused(people: Result, place: Path) -> None:
    with pytest.raises(ConfigurationError, match="is there already and is not empty"):
        export(people.folder, people.folder)
    (place / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is there already"):
        export(people.folder, place / "file")
    with pytest.raises(ConfigurationError, match="not the folder of a finished run"):
        export(place / "nowhere", place / "out")
    with pytest.raises(InterruptedRunError):
        run(plan(Settings(dataset="digits", model="linear", **QUICK, out=str(place / "stopped"))), stop=lambda: True)
    with pytest.raises(ConfigurationError, match=r"has not ended.*--resume"):
        export(place / "stopped", place / "out")
    assert not (place / "out").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "guarantee.json", "result.json", "preprocessing.safetensors"])
def test_a_damaged_run_is_refused_and_nothing_is_left(file: str, people: Result, place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in people.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / file).write_bytes((copy / file).read_bytes()[:-40])
    with pytest.raises(ConfigurationError):
        export(copy, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_run_of_an_older_version_has_its_own_guarantee(people: Result, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for path in people.folder.iterdir():
        if path.name != "releases.json":
            (old / path.name).write_bytes(path.read_bytes())
    for file, gone in (
        ("result.json", {"ledger", "metrics"}),
        ("config.json", {"paid_metrics", "settings", "reading"}),
    ):
        values = json.loads((old / file).read_text())
        (old / file).write_text(json.dumps({name: value for name, value in values.items() if name not in gone}))
    found = export(old, tmp_path / "out")
    assert found.guarantee == people.guarantee
    assert "trained on `private data`" in (found.folder / "README.md").read_text()
    values = json.loads((old / "result.json").read_text())
    (old / "result.json").write_text(json.dumps({**values, "examples": "many"}))
    with pytest.raises(ConfigurationError, match="how many examples"):
        export(old, tmp_path / "again")


def test_a_failure_leaves_no_half_of_an_export(people: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "recipe_of", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        export(people.folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_word_vectors_that_are_others_are_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not words_are_there():
        pytest.skip("there are no word vectors here (extra text)")
    from adadp.training import alone

    recipe = json.loads((exported / "preprocessing.json").read_text())
    (one,) = [each for each in recipe["features"] if each["as"] == "words"]
    with pytest.raises(ValueError, match="others than the model was trained with"):
        alone.AS["words"](["pain"], {**one, "blake2b": "0"})
    monkeypatch.setattr(alone, "FOLDER", exported)
    assert alone.recipe()["classes"] == ["no", "yes"]
