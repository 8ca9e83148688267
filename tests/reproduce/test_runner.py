"""Running items: resumed job by job, finished items left alone, what is missing skipped with the reason."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from adadp import reproduce
from adadp.cli import app
from adadp.data import DataNotFoundError
from adadp.errors import ConfigurationError
from adadp.reproduce import runner
from adadp.reproduce.item import Item, Job, Options, Report
from adadp.reproduce.records import Records


def count(settings, seed, bench):
    """Leaves a mark each time it is run."""
    with open(settings["log"], "a") as log:
        log.write(f"{settings['name']} {seed}\n")
    if settings.get("fail") and os.path.exists(settings["fail"]):
        raise RuntimeError("no luck")
    return {"value": 10 * seed}


def item(tmp_path, name="item", shared=False, **more):
    def jobs(options):
        own = "shared" if shared else name
        return [
            Job(count, {"log": str(tmp_path / "log"), "name": own, **more.get("settings", {})}, seed)
            for seed in range(options.seeds)
        ]

    needs = {key: value for key, value in more.items() if key != "settings"}
    return Item(name, name, "Fig. 0", jobs, lambda records: Report(""), **needs)


@pytest.fixture
def ran(tmp_path):
    """How often each job was run so far."""
    return lambda: (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def test_a_finished_item_is_not_run_again_unless_forced(tmp_path, ran):
    out, one = tmp_path / "out", item(tmp_path)
    assert runner.run([one], Options(2), out).outcomes == {"item": "finished"}
    assert runner.run([one], Options(2), out).outcomes == {"item": "already finished"}
    assert ran() == ["item 0", "item 1"]
    assert runner.run([one], Options(2), out, force=True).outcomes == {"item": "finished"}
    assert len(ran()) == 4
    kept = json.loads((out / "item.json").read_text())
    assert [(r["seed"], r["value"], r["work"]) for r in kept["records"]] == [(0, 0, "count"), (1, 10, "count")]
    assert kept["command"] == "adadp reproduce item"


def test_more_seeds_run_only_what_is_new(tmp_path, ran):
    out, one = tmp_path / "out", item(tmp_path)
    runner.run([one], Options(1), out)
    assert runner.run([one], Options(3), out).outcomes == {"item": "finished"}
    assert ran() == ["item 0", "item 1", "item 2"]
    assert len(Records(out).of(one)) == 3


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, ran):
    out, one = tmp_path / "out", item(tmp_path)

    def interrupt(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run([one], Options(4), out, progress=interrupt)
    assert not (out / "item.json").exists()  # a half-finished item shows no results
    assert runner.run([one], Options(4), out).complete
    assert sorted(ran()) == ["item 0", "item 1", "item 2", "item 3"]


def test_equal_jobs_of_two_items_are_run_once(tmp_path, ran):
    items = [item(tmp_path, name, shared=True) for name in ("a", "b")]
    assert runner.run(items, Options(2), tmp_path / "out").complete
    assert ran() == ["shared 0", "shared 1"]
    assert [r["key"] for r in Records(tmp_path / "out").of(items[0])] == [
        r["key"] for r in Records(tmp_path / "out").of(items[1])
    ]


def test_workers_share_the_jobs(tmp_path, ran):
    assert runner.run([item(tmp_path)], Options(4), tmp_path / "out", workers=2).complete
    assert sorted(ran()) == [f"item {seed}" for seed in range(4)]


def test_a_job_that_fails_fails_its_item_alone_and_is_tried_again(tmp_path, ran):
    trouble = tmp_path / "trouble"
    trouble.touch()
    bad, good = item(tmp_path, "bad", settings={"fail": str(trouble)}), item(tmp_path, "good")
    summary = runner.run([bad, good], Options(1), tmp_path / "out")
    assert summary.outcomes == {"bad": "failed: RuntimeError: no luck", "good": "finished"}
    assert not summary.complete
    assert not (tmp_path / "out" / "bad.json").exists()
    trouble.unlink()
    again = runner.run([bad, good], Options(1), tmp_path / "out")
    assert again.outcomes == {"bad": "finished", "good": "already finished"}
    assert ran().count("good 0") == 1


def test_a_missing_data_set_skips_the_item_and_says_so(tmp_path, ran, monkeypatch):
    def missing(name, **_):
        raise DataNotFoundError(f"{name} is not here: put it there")

    monkeypatch.setattr(runner, "load", missing)
    summary = runner.run([item(tmp_path, datasets=("mnist",)), item(tmp_path, "other")], Options(1), tmp_path / "out")
    assert summary.outcomes == {"item": "skipped: mnist is not here: put it there", "other": "finished"}
    assert not summary.complete
    assert ran() == ["other 0"]
    assert not (tmp_path / "out" / "item.json").exists()


def test_quick_and_full_results_do_not_share_a_folder(tmp_path):
    out, one = tmp_path / "out", item(tmp_path)
    runner.run([one], Options(2), out)
    before = (out / "item.json").read_text()
    with pytest.raises(ConfigurationError, match="holds full results of item"):
        runner.run([one], Options(1, quick=True), out)
    assert (out / "item.json").read_text() == before


def test_measurements_of_another_machine_stay(tmp_path):
    out, one = tmp_path / "out", item(tmp_path, by_device=True)
    runner.run([one], Options(1), out)
    other = item(tmp_path, by_device=True, settings={"on": "cuda"})
    runner.run([other], Options(1), out)
    assert len(Records(out).of(one)) == 2
    assert runner.run([one], Options(1), out).outcomes == {"item": "already finished"}


# ---- the command ----------------------------------------------------------------------------------------------------

NAMES = [
    "table1-mnist", "table1-cifar10", "table2", "fig-mnist-high", "fig-mnist-medium", "fig-mnist-low",
    "fig-ablation-mnist", "fig-cifar10-high", "fig-cifar10-medium", "fig-cifar10-low", "fig-ablation-cifar10",
    "fig-estimate", "fig-sigma", "fig-lr", "fig-beta", "fig-noise", "fig-lot", "toy-cosine", "toy-beale",
    "toy-functions", "accounting-example",
]  # fmt: skip


def test_every_item_is_listed():
    result = CliRunner().invoke(app, ["reproduce", "--list"])
    assert result.exit_code == 0
    assert {line.split()[0] for line in result.output.splitlines()} == set(NAMES)


def test_unknown_names_are_refused_in_one_line():
    result = CliRunner().invoke(app, ["reproduce", "table3"])
    assert result.exit_code == 2
    assert "no item is called 'table3'; there are table1-mnist" in result.output
    assert CliRunner().invoke(app, ["reproduce", "table2", "--seeds", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["reproduce", "table2", "--jobs", "0"]).exit_code == 2


def test_skipped_items_give_a_line_and_a_non_zero_exit(tmp_path, monkeypatch):
    monkeypatch.setenv("ADADP_OFFLINE", "1")
    monkeypatch.setenv("ADADP_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["reproduce", "fig-lr", "--quick", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "fig-lr: skipped: " in result.output
    assert "1 of 1 items have no results" in result.output
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_jobs_are_plain_and_quick_ones_are_part_of_the_full(name):
    found = reproduce.load()[name]
    full, quick = found.jobs(Options()), found.jobs(Options(1, quick=True))
    assert full
    assert quick
    for job in (*full, *quick):
        assert json.loads(json.dumps(job.settings)) == dict(job.settings)
        assert job.key == Job(job.work, json.loads(json.dumps(job.settings)), job.seed).key
    assert len(full) > len(quick) or name in ("table2", "accounting-example", "fig-estimate", "fig-sigma")
