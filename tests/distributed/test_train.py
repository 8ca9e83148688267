"""`adadp train` in several processes: the run of one, everything beside the steps released once, and one voice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adadp.accounting.events import Gaussian
from adadp.accounting.ledger import Ledger
from adadp.training import run_folder
from distributed.commanded import BUGS, STEPS, Seen, commanded, one, table, trained
from distributed.team import values

PAID = {"paid_metrics": True, "class_weights": "paid"}
#: In pieces for AdaDP, whose norms are bounded in another way for whole lots: tighter, by 1e-4 of them.
SEEDED: dict[str, dict[str, Any]] = {
    "whole lots": {"epsilon": 2.0, "seed": 3, "algorithm": "dpsgd", "model": "mlp"},
    "images": {"epsilon": 2.0, "seed": 3, "model": "mlp", "microbatch": 30},
    "principal components": {
        "epsilon": 2.0, "seed": 4, "microbatch": 30, "pca_noise_multiplier": 10.0, "pca_components": 20,
    },
    "a schedule": {"algorithm": "dpsgd", "noise_multiplier": 2.0, "seed": 5, "microbatch": 20, "schedule": "cosine"},
    "a table": {"epsilon": 3.0, "seed": 6, "dataset": "TABLE", "lot": 40, "microbatch": 10, **PAID},
    "persons": {"epsilon": 3.0, "seed": 7, "dataset": "TABLE", "lot": 20, "person": "year", "microbatch": 40},
}  # fmt: skip
TABLE: dict[str, Any] = {"dataset": "TABLE", "lot": 40, "epsilon": 3.0, **PAID}


def placed(cases: dict[str, dict[str, Any]], folder: Path, *, ledgers: bool = True) -> dict[str, dict[str, Any]]:
    """The cases with files and folders of their own."""
    found = {}
    for name, case in cases.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        given = {**case, "out": str(place / "run")}
        if given.get("dataset") == "TABLE":
            given["dataset"] = table(place / "table.csv")
        found[name] = given
    return found


def check_released_once(folder: Path, found: list[Seen]) -> None:
    """What a run releases beside its steps is drawn by one process, once, charged once, and the same in all."""
    for seen in found:
        assert isinstance(seen, Seen), seen
    first, *others = found
    pairs = Ledger(first.result["ledger"]).composition()
    charged = [event.noise_multiplier for event, count in pairs for _ in range(count) if isinstance(event, Gaussian)]
    assert sorted(charged) == sorted(first.result["gaussian"]), "charged"
    assert first.noise == len(charged), "noised in process 0"
    assert all(other.noise == 0 for other in others), "noised elsewhere"
    assert all(other.rows == first.rows for other in others), "the rows"
    assert all(torch.equal(other.weights, first.weights) for other in others), "the weights"
    assert all(other.result == first.result for other in others), "what is said"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("team")
    return folder, values(2, folder, trained, placed(SEEDED, folder))


@pytest.mark.parametrize("name", SEEDED)
def test_two_processes_make_the_run_of_one(
    seeded: tuple[Path, list[dict[str, Any]]], tmp_path: Path, name: str
) -> None:
    folder, found = seeded
    several = [each[name] for each in found]
    check_released_once(folder, several)
    alone = one(**placed({name: SEEDED[name]}, tmp_path)[name])
    assert isinstance(alone, Seen), alone
    assert alone.rows == several[0].rows  # the same rows are held out, and prepared alike
    assert alone.noise == several[0].noise
    lots = [sorted(row for seen in several for row in seen.lots[number]) for number in range(STEPS)]
    assert lots == [sorted(lot) for lot in alone.lots]
    torch.testing.assert_close(several[0].weights, alone.weights, rtol=0, atol=1e-5)
    for key in ("epsilon", "noise_multiplier", "gaussian", "steps", "examples", "unit"):
        assert several[0].result[key] == alone.result[key]


# ---- without a seed --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unseeded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("team")
    cases: dict[str, dict[str, Any]] = {
        "sound": TABLE,
        "images": {"epsilon": 1.0, "pca_noise_multiplier": 10.0, "pca_components": 20},
        "features": {"epsilon": 2.0, "features": "scattering", "no_cache": True, "directions": 40},
    }
    cases |= {bug: {**TABLE, "bug": bug} for bug in BUGS}
    return folder, values(2, folder, trained, placed(cases, folder))


@pytest.mark.parametrize("name", ["sound", "images", "features"])
def test_what_is_paid_for_is_released_once(unseeded: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, found = unseeded
    check_released_once(folder, [each[name] for each in found])
    assert found[0][name].result["epsilon"] <= 3.0


@pytest.mark.parametrize(
    ("bug", "seen_by"),
    {
        "each fits": "the dataset",  # and so the engine
        "each splits": "the dataset",
        "each counts": "noised elsewhere",
        "fits twice": "charged",
        "fits uncharged": "noised in process 0",
        "each measures": "noised elsewhere",
    }.items(),
)
def test_planted_bugs_are_caught(unseeded: tuple[Path, list[dict[str, Any]]], bug: str, seen_by: str) -> None:
    folder, found = unseeded
    with pytest.raises(AssertionError, match=seen_by):
        check_released_once(folder, [each[bug] for each in found])


def test_processes_that_find_other_data_are_refused(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for number, folder in enumerate(folders):
        Path(folder).mkdir()
        table(Path(folder) / "fewer.csv", rows=400 - number)
        table(Path(folder) / "others.csv", seed=number)
    cases: dict[str, dict[str, Any]] = {
        name: {**TABLE, "dataset": f"{name}.csv", "folders": folders, "out": str(tmp_path / name)}
        for name in ("fewer", "others")
    }
    for found in values(2, tmp_path, trained, cases):
        for name in cases:
            assert "process 1 and process 0 were not given the same: the dataset" in str(found[name])
    assert not (tmp_path / "fewer").exists()  # and nothing was spent
    steps = [event for event, _ in Ledger(Path(folders[0]) / "others.csv.adadp-ledger.jsonl").charged()]
    assert all(isinstance(event, Gaussian) for event in steps)  # what was released before training, and no lot


# ---- one voice -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[int, str, str]]]]:
    folder = tmp_path_factory.mktemp("team")
    digits = ["--dataset", "digits", "--model", "linear", "--steps", "4", "--lot", "60", "--evaluations", "1"]
    full = folder / "full"
    full.mkdir()
    (full / "file").write_text("")
    rows = table(folder / "table.csv")
    own = ["--dataset", rows, "--model", "linear", "--steps", "4", "--lot", "30"]
    lines = {
        "json": ["train", *digits, "--epsilon", "2", "--out", str(folder / "json"), "--json"],
        "table": ["train", *digits, "--epsilon", "2", "--out", str(folder / "table")],
        "line search": ["train", *digits, "--algorithm", "agd"],
        "not private": ["train", *digits, "--algorithm", "sgd"],
        "lot": ["train", *digits[:-4], "--lot", "100000"],
        "folder": ["train", *digits, "--out", str(full)],
        "unconfirmed": ["train", *own, "--epsilon", "2", "--out", str(folder / "own")],
        "confirmed": ["train", *own, "--epsilon", "2", "--out", str(folder / "own"), "--yes", "--json"],
        "spent": ["train", *own, "--epsilon", "2", "--budget", "3", "--yes", "--json"],
        "restarted": ["train", *digits, "--out", str(folder / "restarted")],
        "nothing to go on from": ["train", "--resume", str(folder / "nowhere")],
    }
    return folder, values(2, folder, commanded, lines)


def test_json_is_printed_once(said: tuple[Path, list[dict[str, tuple[int, str, str]]]]) -> None:
    folder, (first, second) = said
    code, out, _ = first["json"]
    assert code == 0
    assert len(out.splitlines()) == 1
    assert json.loads(out)["steps"] == 4
    assert second["json"] == (0, "", "")
    assert first["table"][1].count("Trained") == 1
    assert second["table"] == (0, "", "")
    assert run_folder.read(folder / "json").config["steps"] == 4


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "line search": "a line search looks at each lot several times",
        "not private": "train with sgd in one process",
        "lot": "--lot must be in 1..",
        "folder": "no run is written over another",
        "unconfirmed": "confirm them with --yes",
        "spent": "--budget cannot be set now",
        "restarted": "torchrun started this command again",
        "nothing to go on from": "has no run.json",
    }.items(),
)
def test_what_process_0_refuses_ends_all(
    said: tuple[Path, list[dict[str, tuple[int, str, str]]]], name: str, says: str
) -> None:
    _, (first, second) = said
    code, _, complained = first[name]
    assert code == 2
    assert says in complained
    assert complained.splitlines()[-1].startswith("adadp: ")
    assert second[name] == (2, "", "")
