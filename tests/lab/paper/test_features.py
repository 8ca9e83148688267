"""Public features for Table 1's CIFAR-10: scaled row by row by public constants, chosen without the test set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from adadp_lab import paper as reproduce
from adadp_lab.paper import runner, table1
from adadp_lab.paper import workbench as benches
from adadp_lab.paper.feature_scaling import scaled
from adadp_lab.paper.item import Item, Job, Options, Report
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.tasks import prepare
from adadp_lab.paper.workbench import Workbench
from adadp_lab.pretraining import Recipe, WideResNet, features

from adadp.data import Dataset

ROOT = Path(__file__).parents[3]
KINDS = ("length", "unit", "standard", "whitened")


# ---- scaling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def public():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(12, 12, generator=generator) * torch.linspace(0.1, 3, 12)
    return torch.randn(4000, 12, generator=generator) @ mixed + 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_scaled_by_itself(kind, public):
    rows = scaled(kind, public)
    other = 100 * torch.rand(5, 12)
    other[2] = public[0]
    assert torch.allclose(rows(other)[2], rows(public[:1])[0], atol=1e-5)


def test_lengths(public):
    assert float(scaled("length", public)(public).norm(dim=1).mean()) == pytest.approx(1, abs=1e-4)
    for kind in KINDS[1:]:
        assert torch.allclose(scaled(kind, public)(public).norm(dim=1), torch.ones(4000), atol=1e-5)
    assert torch.equal(scaled("none", public)(public), public)


def test_directions_come_out_more_alike_from_each_scaling_to_the_next(public):
    def spread(kind):
        rows = scaled(kind, public)(public)
        values = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
        return float(values.max() / values.clamp(min=1e-9).median())

    assert spread("whitened") < 2 < spread("unit")


# ---- the net's features ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Coloured noise for both data sets, and a narrow net that has seen it for one epoch."""
    generator = torch.Generator().manual_seed(0)

    def load(name, split="train", **_):
        count = {"train": 200, "test": 60}[split]
        labels = torch.arange(count) % 10
        images = torch.randint(0, 80, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
        images += (17 * labels).to(torch.uint8)[:, None, None, None]
        return Dataset(name, images, labels, tuple("abcdefghij"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(features._NETS, "wide", lambda classes: WideResNet(3, classes, width=4))
    monkeypatch.setitem(features.RECIPES, "wide", Recipe(epochs=1, batch=50))
    for module in (features, benches, runner):
        monkeypatch.setattr(module, "load", load)
    return Workbench()


def test_mirror_images_have_the_same_features_and_no_batch_is_felt(small):
    split, through, public = small.features("wide", "unit", blocks=2)
    assert split[0].shape == (200, 32)
    assert public.shape == (200, 32)
    some = small.images("cifar10")[0][:8]
    assert torch.allclose(through(some), through(some.flip(3)), atol=1e-5)
    assert torch.allclose(through(some), split[0][:8], atol=1e-5)
    assert torch.allclose(through(torch.cat([some[:1], 9 * some[1:]]))[0], split[0][0], atol=1e-5)


def test_one_block_is_the_last_one(small):
    both, _, _ = small.features("wide", "none", blocks=2)
    last, through, _ = small.features("wide", "none", blocks=1)
    assert torch.equal(both[0][:, 16:], last[0])
    assert through(small.images("cifar10")[2]).shape == (60, 16)


def test_what_is_set_aside_is_neither_trained_on_nor_the_test_set(small):
    features = {"net": "wide", "scaling": "unit", "blocks": 1}
    whole = prepare({"task": "cifar10-resnet", "features": features}, 0, small).split
    part = prepare({"task": "cifar10-resnet", "features": features, "held_out": 40}, 0, small).split
    assert torch.equal(torch.cat([part[0], part[2]]), whole[0])
    assert torch.equal(torch.cat([part[1], part[3]]), whole[1])
    assert len(part[2]) == 40


def test_the_experiment_runs_and_shows_every_choice(small, tmp_path, monkeypatch):
    from adadp_lab.experiments import features as experiment

    for name, value in {"LOT": 40, "STEPS": 3, "HELD_OUT": 40, "RATES": (50.0,), "EPSILONS": (2.0,)}.items():
        monkeypatch.setattr(experiment, name, value)
    monkeypatch.setattr(experiment, "PLANS", ((80, 3),))
    given = ["--out", str(tmp_path / "out"), "--workers", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["features.py", *given])
    experiment.main()
    records = Records(tmp_path / "out").known().values()
    assert (tmp_path / "out" / "features.json").exists()
    assert {record["work"] for record in records} == {"probe", "train"}
    page = experiment.show(list(records))
    for kind in KINDS:
        assert f"{kind}, 1 blocks" in page
        assert f"{kind}, 2 blocks" in page
    assert "flat" in page


# ---- what is run again ----------------------------------------------------------------------------------------------


def test_another_recipe_leaves_the_other_blocks_of_the_table_alone(monkeypatch):
    item = reproduce.load()["table1-cifar10"]
    before = {job.key: job for job in item.jobs(Options())}
    monkeypatch.setitem(table1.BEST, "cifar10", {**table1.BEST["cifar10"], "features": {"net": "paper"}})
    after = {job.key for job in item.jobs(Options())}
    changed = [job for key, job in before.items() if key not in after]
    assert len(changed) == len(table1.TARGETS["cifar10"]) * 3
    assert {job.settings["who"] for job in changed} == {"adadp/best"}
    kept = {record["key"] for record in Records(ROOT / "results" / "reproduce").of(item)}
    assert {key for key in before if key in after} <= kept


def _note(settings, seed, bench):
    with open(settings["log"], "a") as log:
        log.write(f"{settings['name']}\n")
    return {}


def test_a_job_with_new_settings_is_run_and_the_others_are_not(tmp_path):
    log = tmp_path / "log"

    def item(last):
        jobs = [Job(_note, {"log": str(log), "name": name}) for name in ("a", "b", last)]
        return Item("table", "table", "Table 0", lambda options: jobs, lambda records: Report(""))

    runner.run([item("c")], Options(1), tmp_path / "out")
    assert runner.run([item("d")], Options(1), tmp_path / "out").outcomes == {"table": "finished"}
    assert log.read_text().split() == ["a", "b", "c", "d"]
    assert [record["settings"]["name"] for record in Records(tmp_path / "out").of(item("d"))] == ["a", "b", "d"]
