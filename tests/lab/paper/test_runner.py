"""Running items: resumed job by job, finished items left alone, what is missing skipped with the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from adadp_lab import paper as reproduce
from adadp_lab.paper import runner
from adadp_lab.paper.item import Item, Job, Options, Report
from adadp_lab.paper.paper_records import Records
from typer.testing import CliRunner

from adadp.cli import app
from adadp.data import DataNotFoundError
from adadp.errors import ConfigurationError


def count(settings, seed, bench):
    """Leaves a mark each time it is run."""
    with open(settings["log"], "a") as log:
        log.write(f"{settings['name']} {seed}\n")
    if settings.get("die") == seed:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.get("sleep"):
        time.sleep(settings["sleep"])
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


def test_a_worker_that_dies_fails_its_job_alone(tmp_path):
    bad, good = item(tmp_path, "bad", settings={"die": 1}), item(tmp_path, "good")
    summary = runner.run([bad, good], Options(2), tmp_path / "out", workers=2)
    assert summary.outcomes == {"bad": "failed: its process died: out of memory?", "good": "finished"}


def test_workers_end_with_an_interrupted_run(tmp_path):
    slow = item(tmp_path, settings={"sleep": 60})

    def interrupt(*_):
        raise KeyboardInterrupt

    quick = item(tmp_path, "quick")
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        runner.run([quick, slow], Options(2), tmp_path / "out", workers=2, progress=interrupt)
    assert time.perf_counter() - started < 30
    _until(lambda: "spawn_main" not in _children())


def _children():
    return subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import pathlib, test_runner; from adadp_lab.paper import runner; from adadp_lab.paper.item import Options\n"
        "if __name__ == '__main__':\n"
        f" there = pathlib.Path({str(tmp_path)!r})\n"
        " runner.run([test_runner.item(there, settings={'sleep': 60})], Options(2), there / 'out', workers=2)\n"
    )
    (tmp_path / "parent.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), os.path.dirname(__file__), *sys.path])
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env={**os.environ, "PYTHONPATH": paths})
    _until(lambda: (tmp_path / "log").exists())
    children = subprocess.run(["ps", "--ppid", str(parent.pid), "-o", "pid="], capture_output=True, text=True).stdout
    parent.kill()
    parent.wait()
    _until(lambda: not any(_lives(pid) for pid in children.split()))


def _lives(pid):
    """A zombie, which waits for a parent that does not look, does not."""
    state = subprocess.run(["ps", "-p", pid, "-o", "state="], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")


def _until(done, seconds=40):
    end = time.perf_counter() + seconds
    while not done():
        assert time.perf_counter() < end
        time.sleep(0.2)


def test_force_runs_again_what_an_interrupted_run_left(tmp_path, ran):
    out, one = tmp_path / "out", item(tmp_path)

    def interrupt(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run([one], Options(3), out, progress=interrupt)
    assert runner.run([one], Options(3), out, force=True).complete
    assert len(ran()) == 2 + 3


def test_a_damaged_record_is_made_again(tmp_path, ran):
    out, one = tmp_path / "out", item(tmp_path)
    runner.run([one], Options(2), out)
    (out / "item.json").write_text('{"item": "it')
    next((out / ".jobs").iterdir()).write_text("")
    with pytest.warns(UserWarning, match="is not readable and is ignored"):
        assert runner.run([one], Options(2), out).outcomes == {"item": "finished"}
    assert len(ran()) == 3


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
