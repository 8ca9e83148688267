"""The accounting commands: their keys, their numbers, their manners."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adadp.accounting.accountants import ACCOUNTANTS
from adadp.cli import app
from adadp.errors import ConfigurationError

RUN = ["--examples", "60000", "--lot", "3000", "--noise-multiplier", "4", "--steps", "200"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def values(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("accountant", "epsilon", "order"), [("theorem1", 6.921, 4), ("rdp", 3.449, 5.7), ("pld", 3.064, None)]
)
def test_account_gives_the_reference_values(accountant: str, epsilon: float, order: float | None) -> None:
    run = ["--examples", "60000", "--lot", "600", "--noise-multiplier", "0.9", "--steps", "1800"]
    found = values("account", *run, "--delta", "1e-5", "--accountant", accountant)
    assert round(found["epsilon"], 3) == epsilon
    assert found["delta"] == 1e-5
    assert found["accountant"] == accountant
    assert found.get("order") == order
    assert found["assumptions"]
    if accountant == "theorem1":
        assert any("sigma / 2" in assumption for assumption in found["assumptions"])


def test_account_gives_delta_for_epsilon() -> None:
    epsilon = values("account", *RUN, "--delta", "1e-6")["epsilon"]
    assert values("account", *RUN, "--epsilon", str(epsilon))["delta"] == pytest.approx(1e-6, rel=0.02)


@pytest.mark.parametrize("accountant", list(ACCOUNTANTS))
def test_an_epsilon_beyond_all_measure_has_a_delta(accountant: str) -> None:
    assert values("account", *RUN, "--epsilon", "1e308", "--accountant", accountant)["delta"] < 1e-9


def test_gaussian_releases_are_charged() -> None:
    alone = values("account", *RUN, "--delta", "1e-6")["epsilon"]
    both = values("account", *RUN, "--delta", "1e-6", "--gaussian", "4", "--gaussian", "8")["epsilon"]
    assert both > alone


def test_lots_of_a_fixed_size_use_rdp_and_replace_one() -> None:
    found = values("account", *RUN, "--delta", "1e-6", "--sampling", "fixed")
    assert found["accountant"] == "rdp"
    assert found["neighbours"] == "replace-one"
    assert found["epsilon"] > values("account", *RUN, "--delta", "1e-6", "--accountant", "rdp")["epsilon"]


def test_a_table_and_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "profile.png"
    result = call("account", *RUN, "--delta", "1e-6", "--plot", str(plot))
    assert result.exit_code == 0
    for word in ("epsilon", "delta", "pld", "add-or-remove-one", "secure randomness"):
        assert word in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_large_delta_is_warned_about_and_json_stays_json() -> None:
    result = call("account", *RUN, "--delta", "1e-4", "--json")
    assert "1/N or more" in result.stderr
    assert json.loads(result.stdout)["warnings"]
    assert "warning" not in call("account", *RUN, "--delta", "1e-5", "--json").stderr


def test_calibrate_is_tight_and_account_agrees(tmp_path: Path) -> None:
    run = ["--examples", "60000", "--lot", "3000", "--steps", "200"]
    found = values("calibrate", *run, "--epsilon", "1", "--delta", "1e-6", "--gaussian", "16")
    assert 0.995 <= found["epsilon"] <= 1
    again = values(
        "account", *run, "--noise-multiplier", repr(found["noise_multiplier"]), "--delta", "1e-6", "--gaussian", "16"
    )
    assert again["epsilon"] == found["epsilon"]
    image = tmp_path / "profile.png"
    table = call("calibrate", *run, "--epsilon", "1", "--delta", "1e-6", "--plot", str(image)).stdout
    assert "noise multiplier" in table
    assert image.read_bytes().startswith(b"\x89PNG")


BAD = {
    "q above 1": ["--lot", "60001", "--delta", "1e-5"],
    "no lot": ["--lot", "0", "--delta", "1e-5"],
    "delta 1": ["--delta", "1"],
    "delta 0": ["--delta", "0"],
    "delta nan": ["--delta", "nan"],
    "delta inf": ["--delta", "inf"],
    "delta not a number": ["--delta", "small"],
    "no sigma": ["--noise-multiplier", "0", "--delta", "1e-5"],
    "negative sigma": ["--noise-multiplier=-1", "--delta", "1e-5"],
    "sigma nan": ["--noise-multiplier", "nan", "--delta", "1e-5"],
    "sigma inf": ["--noise-multiplier", "inf", "--delta", "1e-5"],
    "absurd sigma": ["--noise-multiplier", "1e-300", "--delta", "1e-5"],
    "absurd steps": ["--steps", "1" + "0" * 40, "--delta", "1e-5"],
    "negative steps": ["--steps=-5", "--delta", "1e-5"],
    "absurd examples": ["--examples", "1" + "0" * 40, "--delta", "1e-5"],
    "bad gaussian": ["--gaussian", "0", "--delta", "1e-5"],
    "epsilon nan": ["--epsilon", "nan"],
    "negative epsilon": ["--epsilon=-1"],
    "neither": [],
    "both": ["--delta", "1e-5", "--epsilon", "1"],
    "no such accountant": ["--accountant", "magic", "--delta", "1e-5"],
    "pld of fixed lots": ["--accountant", "pld", "--sampling", "fixed", "--delta", "1e-5"],
    "no such option": ["--sigma", "3", "--delta", "1e-5"],
    "plot without a folder": ["--delta", "1e-5", "--plot", "/no/such/folder/profile.png"],
    "plot of no kind": ["--delta", "1e-5", "--plot", "profile.nonsense"],
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_line_and_exit_code_2(name: str) -> None:
    result = call("account", *RUN, *BAD[name])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("adadp: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate", "--examples", "10", "--lot", "11", "--steps", "1", "--epsilon", "1", "--delta", "1e-5"],
        ["calibrate", "--examples", "10", "--lot", "1", "--steps", "0", "--epsilon", "1", "--delta", "1e-5"],
        ["calibrate", "--examples", "10", "--lot", "1", "--steps", "1", "--epsilon", "0", "--delta", "1e-5"],
        ["calibrate", "--examples", "10", "--lot", "1", "--steps", "1", "--epsilon", "1", "--delta", "1"],
        ["calibrate", *RUN[:4], "--steps", "5", "--epsilon", "0.1", "--delta", "1e-6", "--gaussian", "0.5"],
        ["ledger", "show", "/no/such/ledger"],
        ["ledger", "show", "/"],
        ["ledger", "add", "/dev/null/ledger", "--dataset", "mnist", "--gaussian", "1"],
        ["ledger", "check", "/no/such/ledger"],
        ["ledger", "add", "never-written.ledger", "--gaussian", "1"],
        ["unknown"],
    ],
)
def test_other_commands_have_the_same_manners(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_no_steps_cost_nothing() -> None:
    assert values("account", *RUN[:-1], "0", "--delta", "1e-5")["epsilon"] == 0


def test_a_ledger_on_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.jsonl")
    assert call("ledger", "add", path, *RUN).exit_code == 2  # a new ledger has to know its dataset
    assert call("ledger", "add", path, "--dataset", "mnist", *RUN, "--note", "tuning").exit_code == 0
    assert call("ledger", "add", path, "--gaussian", "16").exit_code == 0
    assert call("ledger", "add", path, "--dataset", "other", "--gaussian", "16").exit_code == 2
    assert call("ledger", "add", path, *RUN, "--sampling", "fixed").exit_code == 2
    found = values("ledger", "show", path, "--delta", "1e-6")
    assert found["dataset"] == "mnist"
    assert len(found["runs"]) == 2
    expected = values("account", *RUN, "--delta", "1e-6", "--gaussian", "16")
    assert found["epsilon"] == expected["epsilon"]
    shown = call("ledger", "show", path)
    assert "mnist" in shown.stdout
    assert "200 steps" in shown.stdout
    assert call("ledger", "check", path, "--dataset", "mnist").exit_code == 0
    assert call("ledger", "check", path, "--dataset", "other").exit_code == 2
    assert values("ledger", "check", path, "--epsilon", "5")["within_budget"] is True
    assert call("ledger", "check", path, "--epsilon", "0.01").exit_code == 1
    for bad in (["--epsilon", "nan"], ["--epsilon", "inf"], ["--epsilon=-1"], ["--delta", "2"]):
        refused = call("ledger", "check", path, *bad)
        assert (refused.exit_code, refused.stdout) == (2, "")
    content = Path(path).read_bytes()
    Path(path).write_bytes(content.replace(b'"count":200', b'"count":100'))
    broken = call("ledger", "check", path)
    assert broken.exit_code == 2
    assert "edited" in broken.stderr


def test_which_delta_a_ledger_is_shown_at(tmp_path: Path) -> None:
    from adadp.accounting.events import PoissonGaussian
    from adadp.accounting.ledger import Budget, Ledger

    path, step = str(tmp_path / "ledger.jsonl"), PoissonGaussian(4.0, 0.05)

    def run(delta: float | None = None, budget: Budget | None = None) -> None:
        with Ledger(path, dataset="mnist", delta=delta).start({}, budget=budget) as charged:
            charged.charge(step, 10)

    def shown(*more: str) -> tuple[float, str]:
        text = " ".join(call("ledger", "show", path, *more).stdout.split())
        return values("ledger", "show", path, *more)["delta"], text

    run()
    assert shown()[0] == 1e-5
    assert "at delta 1e-05 (no run declared one; --delta takes another)" in shown()[1]
    run(delta=1e-4)
    assert shown()[0] == 1e-4
    assert "at delta 0.0001 (as declared)" in shown()[1]
    run(budget=Budget(9.0, 1e-6))
    assert shown()[0] == 1e-6
    assert "at delta 1e-06 (the smallest of those declared: 1e-06, 0.0001)" in shown()[1]
    assert [row["delta"] for row in values("ledger", "show", path)["runs"]] == [None, 1e-4, 1e-6]
    assert shown("--delta", "0.001")[0] == 1e-3
    assert "at delta 0.001 (as given)" in shown("--delta", "0.001")[1]
    found = values("ledger", "check", path, "--epsilon", "5")
    assert (found["delta"], found["epsilon"]) == (1e-6, values("ledger", "show", path)["epsilon"])
    assert "at delta 1e-06" in call("ledger", "check", path, "--epsilon", "5").stdout
    with pytest.raises(ConfigurationError, match="delta must be"):
        Ledger(path, delta=1.5)


def test_a_ledger_is_added_to_in_its_own_unit(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.jsonl")
    added = ["--dataset", "visits", "--gaussian", "16"]
    assert call("ledger", "add", path, *added, "--unit", "one person").exit_code == 0
    assert "one person, add-or-remove-one neighbours" in " ".join(call("ledger", "show", path).stdout.split())
    refused = call("ledger", "add", path, *added)
    assert refused.exit_code == 2
    assert "it protects 'one person', and the plan 'one example'" in refused.stderr
    assert len(values("ledger", "show", path)["runs"]) == 1


def test_a_ledger_shows_what_its_runs_rest_on_and_what_came_with_weights(tmp_path: Path) -> None:
    from adadp.accounting.events import PoissonGaussian
    from adadp.accounting.ledger import Budget, Ledger

    path, step = tmp_path / "ledger.jsonl", PoissonGaussian(4.0, 0.05)
    ledger = Ledger(path, dataset="mnist", budget=Budget(3.0, 1e-5))
    for dataset in ("mnist", "letters"):
        other = Ledger(None, dataset=dataset)
        with other.start({}, assumptions=[f"{dataset} is curated"]) as run:
            run.charge(step, 11)
        ledger.inherit(other.spending())
    with ledger.start({"steps": 10}, assumptions=["N is public"], untried=["the loss"]) as run:
        run.charge(step, 4)
        run.note(notes=["a slow disk"])
    found = values("ledger", "show", str(path))
    assert found["shared_budget"] == [3.0, 1e-5]
    assert found["epsilon"] <= 3.0
    assert found["untried"] == ["the loss"]
    assert {"N is public", "mnist is curated"} <= set(found["assumptions"])
    assert "letters is curated" not in found["assumptions"]
    assert "4 of 10 planned steps were made: charged as planned (run-1)" in found["notes"]
    assert found["runs"][0]["charged"][0][1] == 10
    assert found["runs"][0]["uid"] == run.uid
    assert [row["events"][0][1] for row in found["inherited"]] == [11]
    assert found["elsewhere"][0]["dataset"] == "letters"
    shown = " ".join(call("ledger", "show", str(path)).stdout.split())
    for text in ("N is public", "Not tried: - The loss", "slow disk", "shared budget", "'letters'", "4 of 10 planned"):
        assert text in shown
    run.note(reasons=["raw norms were logged"])
    assert values("ledger", "show", str(path))["epsilon"] is None
    assert "aw norms were logged" in " ".join(call("ledger", "show", str(path)).stdout.split())
    assert call("ledger", "check", str(path), "--epsilon", "3").exit_code == 1
