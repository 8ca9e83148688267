"""`adadp reproduce --quick`: what came out stands beside the full records' figures, and what differs is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from adadp_lab.paper import command
from adadp_lab.paper.agreement import POINTS
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.quick_table import Row, reasons, rows_of, verdict
from typer.testing import CliRunner

from adadp.cli import app

ROOT = Path(__file__).parents[3]


def trained(accuracy: float, *, who: str = "adadp/sound", device: str = "cpu", **said: Any) -> dict[str, Any]:
    return {
        "work": "train", "settings": {"who": who, "steps": 100, **said}, "device": device,
        "curve": [[10, accuracy - 0.1], [20, accuracy]], "key": f"{who} {accuracy}",
    }  # fmt: skip


def test_each_result_has_the_full_figure_beside_it() -> None:
    (row,) = rows_of([trained(0.72, stop=20)], [trained(0.71), trained(0.9)])
    assert row == Row("adadp/sound, to step 20", "67.00%", "66.00%", "agrees", True)  # means over both marks
    (row,) = rows_of([trained(0.8)], [trained(0.8 + (POINTS + 0.5) / 100)])
    assert (row.quick, row.full, row.agrees) == ("75.00%", "78.00%", False)
    assert row.word == "DIFFERS by 3, more than 2.5"


def test_a_result_that_nothing_stands_beside_is_shown_and_says_why() -> None:
    (row,) = rows_of([trained(0.72)], [])
    assert row == Row("adadp/sound, at step 20", "72.00%", "", "no full record of it", None)
    (row,) = rows_of([trained(0.72)], [trained(0.72, reading="other")])
    assert (row.quick, row.full, row.agrees) == ("72.00%", "", None)
    assert verdict([row], "there") == "1 results; nothing in there can be compared with them"


def test_times_are_shown_and_never_have_to_agree() -> None:
    def measured(ms: float, rounds: int) -> dict[str, Any]:
        said = {"dataset": "mnist", "on": "cpu", "rounds": rounds}
        return {"work": "measure", "settings": said, "device": "cpu", "mean_ms": {"dpsgd": 2.0, "adadp/sound": ms}}

    (row,) = rows_of([measured(3.0, 5)], [measured(8.0, 50)])
    assert (row.quick, row.full, row.agrees) == ("1.50x", "4.00x", None)


def test_the_line_below_counts_what_differs_and_what_is_only_shown() -> None:
    good, bad, alone = (Row("a", "1", "1", "", agrees) for agrees in (True, False, None))
    assert verdict([good, good], "x") == "All results agree with those in x"
    assert verdict([good, bad, alone], "x") == "1 results DIFFER with those in x; 1 more are only shown"
    said = " ".join(reasons([trained(0.7)], [trained(0.7, device="NVIDIA H200")]))
    assert "Run on cpu; full records are of NVIDIA H200" in said
    assert "Run on" not in " ".join(reasons([trained(0.7)], [trained(0.7)]))


def test_the_command_shows_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder: the full records are those of the checkout."""
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["reproduce", "toy-cosine", "accounting-example", "--quick", "--jobs", "1"])
    assert shown.exit_code == 0, shown.output
    assert "0 of 0" not in shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "exact readings mean proportional 0.470439 0.470439 agrees" in lines
    assert "epsilon, theorem1, sigma 0.9, to step 1,800 6.92141 6.92141 agrees" in lines
    assert lines[-1] == f"All results agree with those in {ROOT / command.FULL}"


def test_a_number_that_differs_is_shown_and_ends_the_command_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adadp_lab import paper

    item = paper.load()["accounting-example"]
    changed = copy.deepcopy(Records(ROOT / command.FULL).of(item))
    for way in changed[0]["ways"]["pld"]:
        way[0] += 0.5
    Records(tmp_path / "full").finish(item, changed)
    monkeypatch.setattr(command, "_kept", lambda: tmp_path / "full")
    given = ["reproduce", "accounting-example", "--quick", "--jobs", "1", "--out", str(tmp_path / "quick")]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 1
    (line,) = [line for line in shown.output.splitlines() if "DIFFERS" in line]
    assert " ".join(line.split()).startswith(
        "epsilon, pld, sigma 0.9, to step 1,800 3.06361 3.56361 DIFFERS by 0.5, more than 0.0003"
    )
    assert "1 results DIFFER" in shown.output
    monkeypatch.setattr(command, "_kept", lambda: tmp_path / "none")
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0
    assert "can be compared with them" in shown.output
