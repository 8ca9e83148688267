"""Every example and notebook of `examples/` runs in its short form, and notebooks hold the outputs of a run."""

from __future__ import annotations

import json
import re
import runpy
import traceback
from contextlib import chdir
from pathlib import Path

import notebooks
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name != "digits.py"]  # `make demo` runs that one
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
#: Packages of extras: where one is missing, examples that import it are skipped.
EXTRAS = ("transformers", "peft", "trl", "accelerate", "lightning", "pytorch_lightning", "sklearn", "PIL")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notebooks.SHORT, "1")


def needed(source: str) -> None:
    for package in re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE):
        if package in EXTRAS:
            pytest.importorskip(package, reason=f"this example needs {package}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    needed(path.read_text())
    with chdir(tmp_path):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_and_holds_the_outputs_of_a_run(path: Path) -> None:
    assert notebooks.problems(path) == []
    needed("\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]))
    notebooks.run(path)


def notebook(folder: Path, *sources: str) -> Path:
    """A notebook with a page of text and these cells of code, none of them run."""
    code = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# a page"]}]
    cells += [{**code, "source": source.splitlines(keepends=True)} for source in sources]
    path = folder / "some.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_the_runner_keeps_outputs_and_sees_what_was_not_run(tmp_path: Path) -> None:
    path = notebook(tmp_path, "a = 2\nprint(a)", "a + 1")
    assert len(notebooks.problems(path)) == 2
    notebooks.write_outputs(path)
    assert notebooks.problems(path) == []
    _, first, second = json.loads(path.read_text())["cells"]
    assert first["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    assert second["outputs"][0]["data"] == {"text/plain": ["3"]}


def test_an_error_in_a_cell_is_raised_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        notebooks.run(notebook(tmp_path, "a = 2", "1 / 0"))
    assert "some.ipynb, code cell 2" in "".join(traceback.format_exception(raised.value))
