"""Who may see which file of a run: all that runs write is in the table, and the documentation says what it says."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adadp.errors import InterruptedRunError
from adadp.training import run_files, run_folder
from adadp.training.loop import plan, resume, run, train
from adadp.training.run_files import Audience, files_of, run_file

DOCS = Path(__file__).parents[2] / "docs"
QUICK: dict[str, Any] = {"steps": 4, "lot": 60, "evaluations": 2, "model": "linear", "epsilon": 3.0, "delta": 1e-3}
DIGITS = {**QUICK, "dataset": "digits"}


def table(path: Path) -> str:
    rows = "\n".join(f"{'yes' if i % 3 else 'no'},{i % 7},{'red' if i % 2 else 'green'},p{i // 2}" for i in range(300))
    path.write_text(f"label,amount,colour,who\n{rows}\n")
    return str(path)


def has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Runs with each option that adds a file; their names and folders."""
    own: dict[str, Any] = {**QUICK, "dataset": table(folder / "data.csv")}
    persons = {**own, "dataset": table(folder / "visits.csv")}
    options: dict[str, dict[str, Any]] = {
        "digits": DIGITS,
        "seeded, with checkpoints": {**DIGITS, "seed": 1, "checkpoint_every": 1e-9},
        "projected": {**DIGITS, "pca_noise_multiplier": 20.0},
        "metrics are paid": {**DIGITS, "paid_metrics": True},
        "no proof": {**DIGITS, "reading": "lot"},
        "with curves": {**DIGITS, "tensorboard": has_tensorboard()},
        "not private": {**DIGITS, "algorithm": "sgd", "epsilon": None},
        "searches": {**DIGITS, "algorithm": "agd"},
        "table": {**own, "ignore": ("who",)},
        "seeded table": {**own, "seed": 2, "ignore": ("who",), "checkpoint_every": 1e-9},
        "persons": {**persons, "person": "who", "seed": 3},
        "table without proof": {**own, "ignore": ("who",), "reading": "lot"},
        "a ledger of another name": {**DIGITS, "ledger": str(folder / "other.jsonl")},
        "regression": {
            **own, "label": "amount", "task": "regression", "target_range": "0..7", "ignore": ("who",),
            "paid_metrics": True,
        },
    }  # fmt: skip
    for number, (name, given) in enumerate(options.items()):
        out = folder / str(number)
        train(**given, out=str(out))
        yield name, out
    out = folder / "interrupted"
    with pytest.raises(InterruptedRunError):
        run(plan(**DIGITS, out=str(out)), stop=lambda: True)
    yield "interrupted", out
    resume(out)
    yield "resumed", out


def test_every_file_that_a_run_writes_is_in_the_table(tmp_path: Path) -> None:
    seen = set()
    for name, folder in runs(tmp_path):
        found = list(files_of(folder))
        assert len(found) == len(list(folder.iterdir())) > 4
        unlisted = [file for file, line in found if line is run_files.UNKNOWN]
        assert not unlisted, f"{name}: add a line to adadp.training.run_files.FILES"
        seen |= {line.name for _, line in found}
    written = {file.name for file in run_files.FILES if not file.passing}
    elsewhere = {file.name for file in run_files.FILES if file.name.startswith("report")}
    if not has_tensorboard():
        elsewhere.add("tensorboard")
    assert seen == written - elsewhere, "and the table has no line that no run writes"


def test_an_unknown_file_is_for_the_curator() -> None:
    assert run_file("notes.txt") is run_files.UNKNOWN
    assert run_file("notes.txt").audience_with(True) is Audience.CURATOR


def test_without_a_guarantee_nothing_that_follows_from_releases_is_public() -> None:
    hidden = {file.name for file in run_files.FILES if file.audience_with(True) != file.audience_with(False)}
    assert hidden == {"model.safetensors", "preprocessing.safetensors", "history.jsonl"}
    for name in hidden:
        assert "no guarantee" in run_file(name).why_with(False)
        assert run_file(name).why_with(True) == run_file(name).why


def test_the_threat_model_shows_the_table() -> None:
    shown = (DOCS / "threat-model.md").read_text()
    assert run_files.to_markdown() in shown, "paste adadp.training.run_files.to_markdown() into docs/threat-model.md"
    rest = shown.replace(run_files.to_markdown(), "")
    again = [file.name for file in run_files.FILES if re.search(rf"^\|[^|]*`{re.escape(file.name)}`", rest, re.M)]
    assert not again, "said once, in the table of a run's files"


def test_what_the_page_on_data_protection_says_of_files_is_so() -> None:
    text = (DOCS / "data-protection.md").read_text().split("## Which files may be published")[1].split("\n## ")[0]
    kept = next(line for line in text.splitlines() if line.startswith("4."))
    for name in re.findall(r"`([\w.-]+\.(?:jsonl?|md|safetensors|html))`", text):
        expected = Audience.CURATOR if f"`{name}`" in kept else Audience.PUBLIC
        assert run_file(name).audience is expected, name


@pytest.mark.skipif(os.name == "nt", reason="folders have no such modes")
@pytest.mark.parametrize("path", [None, "mine"])
def test_a_run_is_for_its_owner_alone(path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder.create(path, "digits").stat().st_mode & 0o077 == 0
