"""Recipes: what is chosen and from what, what wins, and runs of scattering features from start to prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from adadp import data, training
from adadp.accounting.events import Gaussian
from adadp.cli import app
from adadp.data import Dataset, outline
from adadp.data.own import HeldOut
from adadp.errors import ConfigurationError, InterruptedRunError
from adadp.features import images as made_of_images
from adadp.training import run_folder
from adadp.training.loop import resume
from adadp.training.planning import Plan
from adadp.training.recipes import FEW, RECIPES, resolve
from adadp.training.settings import Settings, from_mapping

DIGITS = data.load("digits")


def images(rows: int, *shape: int, maximum: int = 255) -> Dataset:
    """The form of images without values: whatever reads one raises."""
    return outline._images("made", rows, shape, ("a", "b"), maximum)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_auto_follows_the_form_alone_and_says_what_it_chose() -> None:
    many, few = images(60_000, 1, 28, 28), images(FEW - 1, 3, 40, 30)  # of which no value can be read
    assert resolve(Settings(recipe="auto"), many).settings.recipe == "scattering"
    found = resolve(Settings(), few)
    assert found.settings.recipe == "scattering-small"
    assert "3x40x30" in (found.said or "")
    assert f"{FEW - 1:,}" in (found.said or "")


@pytest.mark.parametrize(
    "given",
    [{"model": "mlp"}, {"algorithm": "adadp"}, {"algorithm": "dpsgd"}, {"features": "pixels"}, {"recipe": "none"},
     {"pca_noise_multiplier": 5.0}, {"settings": {"before": 0.5}}],
)  # fmt: skip
def test_who_says_how_is_given_no_recipe(given: dict[str, object]) -> None:
    asked = from_mapping(given)
    assert resolve(asked, images(1000, 1, 28, 28)).settings is asked


def test_what_is_given_wins_over_the_recipe() -> None:
    given = {
        "recipe": "scattering",
        "lot": 50,
        "epochs": 2.0,
        "lr": 0.3,
        "mean_share": 0.0,
        "settings": {"damping": 0.2},
    }
    found = resolve(from_mapping(given), images(60_000, 1, 28, 28))
    asked = found.settings
    assert (asked.lot, asked.epochs, asked.steps, asked.lr, asked.noise_walk) == (50, 2.0, None, 0.3, None)
    assert (asked.mean_share, asked.directions) == (0.0, 1500)
    assert asked.algorithm_settings == {"before": 0.375, "after": 0.125, "damping": 0.2}
    assert "given and kept" in (found.said or "")
    assert all(name in (found.said or "") for name in ("steps", "noise_walk", "mean_share"))


def test_every_recipe_makes_a_plan_of_any_images() -> None:
    for name in RECIPES:
        for shape in ((1, 8, 8), (3, 70, 90)):
            form = images(2_000, *shape)
            plan = Plan(
                from_mapping({"recipe": name, "dataset": "made", "delta": 1e-5}), outline=HeldOut(form, form, None)
            )
            assert plan.model_name == "linear"
            assert len(plan.input_shape) == 1


def test_what_has_no_recipe_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="scattering"):
        resolve(Settings(recipe="best"), images(1000, 1, 8, 8))
    table = outline.of_form("t", outline.Form(rows=100, classes=("a", "b"), shape=(3,))).train
    with pytest.raises(ConfigurationError, match="table"):
        resolve(Settings(recipe="auto"), table)
    assert resolve(Settings(), table).settings.recipe is None
    with pytest.raises(ConfigurationError, match="goes with features"):
        training.planning.Plan(Settings(dataset="digits", directions=5, model="linear"))
    with pytest.raises(ConfigurationError, match="either lr"):
        Settings(lr=1.0, noise_walk=1.0)
    with pytest.raises(ConfigurationError, match="mean_share"):
        Settings(mean_share=1.0)


def test_persons_are_counted_and_not_their_rows() -> None:
    form = images(6_000, 1, 28, 28)
    persons = Dataset(form.name, form.images, form.labels, form.classes, persons=np.arange(6_000) // 10)
    found = resolve(Settings(recipe="auto"), persons)
    assert "N = 600)" in (found.said or "")
    assert found.settings.lot == resolve(Settings(recipe="auto"), images(600, 1, 28, 28)).settings.lot


# ---- one budget -----------------------------------------------------------------------------------------------------


def test_paid_parts_come_out_of_the_same_budget() -> None:
    asked = {"features": "scattering", "model": "linear", "algorithm": "adadp", "epsilon": 1.0, "delta": 1e-4}
    plain = Plan(from_mapping(asked))
    paid = Plan(from_mapping({**asked, "mean_share": 0.03, "moments_share": 0.15}))
    assert plain.events == ()
    mean, moments = (event.noise_multiplier for event in paid.events)
    assert mean == pytest.approx(moments * 5**0.5)
    assert plain.noise_multiplier is not None
    assert paid.noise_multiplier is not None
    assert paid.noise_multiplier > 1.05 * plain.noise_multiplier


def test_a_run_is_charged_for_all_that_it_releases_and_can_be_used_afterwards() -> None:
    asked = {
        "recipe": "scattering",
        "mean_share": 0.05,
        "moments_share": 0.1,
        "directions": 40,
        "steps": 12,
        "lot": 200,
    }
    result = training.train(**asked, epsilon=2.0, delta=1e-4, seed=3, out="run")
    assert result.guarantee.epsilon is not None
    assert result.guarantee.epsilon <= 2.0
    charged = [
        event for event, _ in result.plan.composition(result.plan.noise_multiplier) if isinstance(event, Gaussian)
    ]
    assert len(charged) == 2
    lines = [json.loads(line) for line in (Path("run") / "ledger.jsonl").read_text().splitlines()]
    assert sum("12" in json.dumps(line) or "gaussian" in json.dumps(line).lower() for line in lines)
    finished = run_folder.read("run")
    tested = data.load("digits", "test")
    predicted = finished.predict(tested)
    assert float((predicted == tested.labels).double().mean()) == result.accuracy
    assert not (Path("cache") / "adadp" / "features").exists() or all(
        path.stat().st_size < 10**6 for path in (Path("cache") / "adadp" / "features").iterdir()
    )  # a few images are not kept; the directions of synthetic ones are


def test_what_is_kept_of_images_of_ones_own_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images_of_own = np.zeros((300, 8, 8), dtype=np.uint8)
    np.savez("own.npz", images=images_of_own, label=np.arange(300) % 2)
    monkeypatch.setattr(made_of_images, "_WORTH_KEEPING", 100)
    command = [
        "train",
        "--dataset",
        "own.npz",
        "--label",
        "label",
        "--epsilon",
        "3",
        "--steps",
        "2",
        "--lot",
        "50",
        "--yes",
    ]
    found = CliRunner().invoke(app, [*command, "--out", "kept"])
    assert found.exit_code == 0, found.output
    assert f"are kept in {tmp_path / 'cache'}" in found.output.replace("\n", "")
    assert list((tmp_path / "cache").rglob("*.bin"))
    found = CliRunner().invoke(app, [*command, "--no-cache", "--out", "not-kept"])
    assert found.exit_code == 0, found.output
    assert "are kept in" not in found.output


def test_an_interrupted_run_goes_on_with_the_same_features() -> None:
    asked = {"recipe": "scattering-small", "mean_share": 0.05, "steps": 8, "lot": 100, "epsilon": 1.0, "seed": 4}
    whole = training.train(**asked, out="whole", evaluations=1)
    steps = iter(range(100))
    plan = training.loop.plan(**asked, out="part", evaluations=1)
    with pytest.raises(InterruptedRunError):
        training.loop.run(plan, None, lambda: next(steps) >= 3)
    assert resume("part", seed=4).accuracy == whole.accuracy
    for one, other in zip(run_folder.read("whole").model.parameters(), run_folder.read("part").model.parameters(),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


# ---- images of one's own --------------------------------------------------------------------------------------------


def made_folder(folder: Path, size: tuple[int, int], *, colour: bool) -> None:
    """Images of stripes: across in one class, down in the other, at random phases."""
    from PIL import Image

    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[: size[0], : size[1]]
    for name, along in (("across", rows), ("down", columns)):
        (folder / name).mkdir(parents=True)
        for number in range(120):
            wave = 127 + 100 * np.sin(along * 0.8 + generator.uniform(0, 6)) + generator.normal(0, 20, size)
            pixels = np.clip(wave, 0, 255).astype(np.uint8)
            pixels = np.stack([pixels, 255 - pixels, pixels], 2) if colour else pixels
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.mark.parametrize(("size", "colour"), [((20, 28), False), ((33, 12), True), ((90, 70), True)])
def test_a_folder_of_images_of_any_size(size: tuple[int, int], colour: bool) -> None:
    pytest.importorskip("PIL")
    made_folder(Path("stripes"), size, colour=colour)
    result = training.train(dataset="stripes", epsilon=8.0, steps=40, out="run")
    assert result.plan.settings.recipe == "scattering-small"
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    from adadp.training import prediction_inputs

    finished = run_folder.read("run")
    found = finished.predict(prediction_inputs.read(Path("stripes") / "down", finished))
    assert float((found == 1).double().mean()) > 0.9
