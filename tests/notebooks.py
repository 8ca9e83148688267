"""Runs notebooks without Jupyter: the code cells of an `.ipynb`, in order, in one namespace.

    python tests/notebooks.py examples/table.ipynb      # run it in full, and write its outputs into the file

Tests run them in their short form: where the environment variable `ADADP_SHORT` is set, an example trains on less data
for fewer steps, and reads that variable itself. A cell's output is what it printed, and the repr of its last
expression.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
import os
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

#: Set where an example is to be run in its short form.
SHORT = "ADADP_SHORT"


def run(path: Path, namespace: dict[str, Any] | None = None) -> list[list[dict[str, Any]]]:
    """Run the code cells of a notebook, in a folder of their own; returns each code cell's outputs.

    An error in a cell is raised as it is, with the notebook and the number of the cell in the traceback.
    """
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    with tempfile.TemporaryDirectory() as folder:
        cells = [_source(cell) for cell in _code_cells(json.loads(path.read_text()))]
        with chdir(folder):
            return [
                _run_cell(source, f"{path.name}, code cell {number}", number, namespace)
                for number, source in enumerate(cells, 1)
            ]


def write_outputs(path: Path) -> None:
    """Run the notebook and keep what its cells give in the file."""
    notebook = json.loads(path.read_text())
    for number, (cell, outputs) in enumerate(zip(_code_cells(notebook), run(path), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def problems(path: Path) -> list[str]:
    """What is wrong with the outputs in a notebook's file: cells that were not run, or not in order, or that failed."""
    found = []
    for number, cell in enumerate(_code_cells(json.loads(path.read_text())), 1):
        if cell["execution_count"] != number:
            found.append(f"code cell {number} was not run in order: python tests/notebooks.py examples/{path.name}")
        found += [f"code cell {number} failed" for output in cell["outputs"] if output["output_type"] == "error"]
    return found


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _run_cell(source: str, name: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # tracebacks show the cell's code
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    before = ast.Module(tree.body[:-1] if last else tree.body, [])
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(before, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
    return outputs


if __name__ == "__main__":
    os.environ.pop(SHORT, None)
    for argument in sys.argv[1:]:
        write_outputs(Path(argument).resolve())
