"""Malformed configuration files and run folders: a refusal that names file and cause, or all that was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import damaged, read_or_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adadp.data import Table
from adadp.errors import ConfigurationError, PrivacyError
from adadp.training import run_folder as runs
from adadp.training.loop import run as train
from adadp.training.planning import Plan
from adadp.training.settings import Settings, from_mapping, parse_image_size, read_toml

FUZZ = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
TOML = b"""# how the survey is trained on
dataset = "survey.csv"
classes = ["no", "yes"]
epsilon = 1.0
delta = 1e-5
lot = 64
missing = false
image-size = "28x28"
[settings]
momentum = 0.9
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@FUZZ
@given(data=st.data())
def test_configuration_files(data: st.DataObject, folder: Path) -> None:
    path = folder / "train.toml"
    path.write_bytes(TOML)
    whole = from_mapping(read_toml(path), str(path))
    assert (whole.classes, whole.lot, whole.algorithm_settings) == (("no", "yes"), 64, {"momentum": 0.9})
    path.write_bytes(data.draw(damaged(TOML)))
    values = read_or_refused(lambda: read_toml(path), path)
    if values is not None:
        try:
            assert isinstance(from_mapping(values, str(path)), Settings)
        except ConfigurationError:  # names the setting: values are right as TOML
            return


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"dataset = \xff", "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"settings = 3", "settings must be a table, not 3"),
        (b"epsilon = ", "is not TOML"),
        (b"lot = 1e3", "lot must be a whole number"),
        (b"delta = nan", "delta must be above 0"),
        (b"when = 1979-05-27", "no setting 'when'"),
    ],
)
def test_configuration_that_means_nothing(content: bytes, cause: str, folder: Path) -> None:
    path = folder / "wrong.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=cause):
        from_mapping(read_toml(path), str(path))


@pytest.mark.parametrize("text", ["²x3", "28", "0x3", "x", "-1x3", "٣x٣x"])
def test_image_sizes(text: str) -> None:
    with pytest.raises(ConfigurationError, match="image_size must look like"):
        parse_image_size(text)


# ---- folders of runs -------------------------------------------------------------------------------------------------

ROWS = 60


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table: it has all three files."""
    place = tmp_path_factory.mktemp("finished")
    chance = np.random.default_rng(0)
    lines = ["age,town,label"]
    lines += [f"{chance.normal(50, 9):.1f},{('Rome', 'Oslo')[i % 2]},{('no', 'yes')[i % 2]}" for i in range(ROWS)]
    (place / "survey.csv").write_text("\n".join(lines) + "\n")
    asked = {"algorithm": "dpsgd", "noise_multiplier": 4.0, "steps": 2, "lot": 20, "classes": ("no", "yes")}
    train(Plan(Settings(dataset=str(place / "survey.csv"), out=str(place / "run"), **asked)))
    return place / "run"


def rows() -> Table:
    columns = {"age": np.linspace(20, 80, 9), "town": np.array(["Rome", "Oslo", "Bonn"] * 3, dtype=object)}
    return Table("rows", columns, torch.zeros(9, dtype=torch.int64), ("no", "yes"))


@FUZZ
@given(data=st.data(), name=st.sampled_from([runs.CONFIG, runs.WEIGHTS, runs.FITTED]))
def test_a_run_is_read_as_it_was_written_or_refused(
    data: st.DataObject, name: str, finished: Path, folder: Path
) -> None:
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(finished, place)
    whole = runs.read(place).predict(rows())
    (place / name).write_bytes(data.draw(damaged((finished / name).read_bytes())))
    run = read_or_refused(lambda: runs.read(place), place / name)
    if run is not None:
        assert run.predict(rows()).tolist() == whole.tolist()
        assert len(run.classes) == 2


@pytest.mark.parametrize("name", [runs.WEIGHTS, runs.FITTED])
def test_every_damaged_byte_of_what_predicts_is_seen(name: str, finished: Path, folder: Path) -> None:
    place = folder / "bytes"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(finished, place)
    content = (finished / name).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 50)):
        (place / name).write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(ConfigurationError, match=r"bytes cannot be read as a run: .*damaged"):
            runs.read(place)
    (place / name).unlink()
    with pytest.raises(ConfigurationError, match="bytes cannot be read as a run"):
        runs.read(place)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"input_shape": [10**9]}, "not those of config.json's model"),  # and nothing of that size was built
        ({"input_shape": [0]}, "has input_shape"),
        ({"input_shape": "7"}, "has input_shape"),
        ({"classes": ["no", "yes", "perhaps"]}, "not those of config.json's model"),
        ({"classes": "ny"}, "has classes"),
        ({"built": ["mlp"]}, "has built"),
        ({"built": "perceptron"}, "no model is called 'perceptron'"),
        ({"kind": "sound"}, "has kind 'sound'"),
        ({"text": None}, "has text None"),
        ({"image_size": "2"}, "image_size must look like"),
        ({"sha256": 3}, "damaged"),
    ],
)
def test_a_configuration_that_does_not_fit(changes: dict[str, Any], cause: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    config = json.loads((finished / runs.CONFIG).read_text())
    (tmp_path / "run" / runs.CONFIG).write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigurationError, match=f"run cannot be read as a run: .*{cause}"):
        runs.read(tmp_path / "run")
    for name in changes:
        (tmp_path / "run" / runs.CONFIG).write_text(json.dumps({key: config[key] for key in config if key != name}))
        if name != "sha256":
            with pytest.raises(PrivacyError, match=f"config.json has no {name}"):
                runs.read(tmp_path / "run")


def test_folders_of_older_versions_have_no_digests(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    config = json.loads((finished / runs.CONFIG).read_text())
    del config["sha256"]
    (tmp_path / "run" / runs.CONFIG).write_text(json.dumps(config))
    assert runs.read(tmp_path / "run").predict(rows()).tolist() == runs.read(finished).predict(rows()).tolist()
