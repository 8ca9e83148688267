"""Features on disk: for their owner only, of these images only, whole or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adadp.data import Dataset
from adadp.features import cache, images
from adadp.features.images import features_of, most_directions, public_directions


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "_WORTH_KEEPING", 5)
    return tmp_path / "adadp" / "features"


def some(rows: int = 8) -> Dataset:
    pixels = torch.randint(256, (rows, 1, 9, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Dataset("some", pixels, torch.zeros(rows, dtype=torch.int64), ("a", "b"))


def test_what_was_computed_is_read_the_next_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = features_of(some())
    (file,) = home.iterdir()
    monkeypatch.setattr(images, "halves", lambda *given: pytest.fail("computed again"))
    assert np.array_equal(features_of(some()), first)
    assert file.stat().st_mode & 0o077 == 0
    assert home.stat().st_mode & 0o077 == 0


def test_changed_images_are_other_images(home: Path) -> None:
    data = some()
    first = features_of(data)
    changed = data.images.clone()
    changed[3, 0, 4, 4] ^= 1
    for other in (replace(data, images=changed), replace(data, maximum=16), data.subset(torch.arange(7))):
        found = features_of(other)
        assert found.shape != first.shape or not np.array_equal(found, first)
        assert np.array_equal(found, features_of(other, keep=False))
    assert len(list(home.iterdir())) == 4


def test_a_damaged_file_is_not_believed(home: Path) -> None:
    first = features_of(some())
    (file,) = home.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-10], b"", whole[:50] + bytes([whole[50] ^ 1]) + whole[51:]):
        file.write_bytes(damaged)
        assert np.array_equal(features_of(some()), first)
    assert file.read_bytes() == whole


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_another_users_file_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole and its digest right, as one is that was made to put a person's image into another's row."""
    first = features_of(some())
    (file,) = home.iterdir()
    swapped = np.ascontiguousarray(np.roll(first, 1, axis=0))
    planted = file.with_name(f"{file.stem.partition('-')[0]}-{cache._digest(swapped)}.bin")
    file.rename(planted)
    planted.write_bytes(swapped.tobytes())
    assert np.array_equal(features_of(some()), swapped)  # one's own file is believed
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert np.array_equal(features_of(some()), first)


def test_half_a_file_is_never_read_and_goes_away(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            features_of(some())
    assert not list(home.glob("*.bin"))
    (home / ".left.part").write_bytes(b"half")
    features_of(some())
    assert [path.suffix for path in home.iterdir()] == [".bin"]


def test_a_cache_that_cannot_be_written_is_no_error(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder would be")
    assert features_of(some()).shape[0] == 8


def test_nothing_is_kept_of_few_images_or_where_that_was_said(home: Path) -> None:
    features_of(some(4))
    features_of(some(), keep=False)
    assert not home.exists()


def test_what_was_not_used_for_longest_makes_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST", 2500)
    for number in range(4):
        cache.write(f"{number}", np.full((1, 500), number, dtype=np.float16))
        for path in home.iterdir():
            os.utime(path, (number, number) if path.name.startswith(f"{number}") else None)
    assert cache.read("3", (1, 500)) is not None
    assert sum(path.stat().st_size for path in home.iterdir()) <= 2500


def test_directions_of_synthetic_images_are_the_same_every_time_and_orthonormal() -> None:
    shape = (1, 8, 8)
    first = public_directions(shape, 50, 0.5)
    public_directions.cache_clear()
    again = public_directions(shape, 50, 0.5)  # from the cache
    for name in ("mean", "vectors", "values"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert np.allclose(first.vectors.T @ first.vectors, np.eye(50), atol=1e-5)
    assert (np.diff(first.values) <= 0).all()
    assert most_directions(shape) == 144
