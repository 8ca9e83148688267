"""A damaged checkpoint is refused by name, or is all of what was written: weights are never a mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fuzz import damaged, read_or_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adadp.checkpoint import Checkpoint, read, write
from adadp.errors import CheckpointError

TENSORS = {"weights": torch.arange(12.0).view(3, 4), "half": torch.tensor([1.5], dtype=torch.bfloat16)}
VALUES = {"number": 3, "text": "ä", "inner": {"list": [1, 2.5, None, True]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzzed") / "checkpoint.safetensors"
    write(path, Checkpoint(VALUES, TENSORS))
    return path


@pytest.fixture(scope="module")
def whole(path: Path) -> bytes:
    return path.read_bytes()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage(data: st.DataObject, path: Path, whole: bytes) -> None:
    path.write_bytes(data.draw(damaged(whole)))
    found = read_or_refused(lambda: read(path), path)
    if found is not None:
        assert found.checkpoint.values == VALUES
        assert found.checkpoint.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(found.checkpoint.tensors[name], value) for name, value in TENSORS.items())


def test_every_byte_that_is_flipped_is_noticed_or_means_nothing(path: Path, whole: bytes) -> None:
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            found = read(path).checkpoint
        except CheckpointError:
            continue
        assert found.values == VALUES
        assert all(torch.equal(found.tensors[name], value) for name, value in TENSORS.items())
