"""Data sets by name: where they are looked for, what is refused, what comes out."""

import dataclasses
import gzip
import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from adadp.data import (
    CorruptDataError,
    DataError,
    DataNotFoundError,
    MissingExtraError,
    cifar,
    decoded,
    load,
    standard,
)
from adadp.data.catalogue import CATALOGUE

TRAIN = CATALOGUE["mnist"].content["train"]


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


@pytest.fixture
def tiny_mnist(monkeypatch):
    """MNIST's entry with the digests of eight small images, and their files' contents."""
    images = np.arange(8 * 4, dtype=np.uint8).reshape(8, 2, 2)
    labels = np.arange(8, dtype=np.uint8)
    contents = {TRAIN.images.file: idx_bytes(images), TRAIN.labels.file: idx_bytes(labels)}
    split = dataclasses.replace(
        TRAIN,
        images=dataclasses.replace(TRAIN.images, digest=hashlib.sha256(contents[TRAIN.images.file]).hexdigest()),
        labels=dataclasses.replace(TRAIN.labels, digest=hashlib.sha256(contents[TRAIN.labels.file]).hexdigest()),
    )
    entry = dataclasses.replace(CATALOGUE["mnist"], content={"train": split})
    monkeypatch.setitem(standard.CATALOGUE, "mnist", entry)
    return contents


def put(contents, folder, compress=True):
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content)) if compress else (folder / name).write_bytes(
            content
        )


def test_digits_are_embedded():
    train, test = load("digits"), load("digits", "test")
    assert len(train) + len(test) == 1797
    assert train.images.dtype == torch.uint8
    assert train.input_shape == (1, 8, 8)
    assert train.inputs().min() == 0
    assert train.inputs().max() == 1
    assert test.labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_idx_files_compressed_or_not(tiny_mnist, tmp_path, compress, folder):
    put(tiny_mnist, tmp_path / folder, compress)
    data = load("mnist", data_dir=tmp_path)
    assert data.images.tolist() == np.arange(32).reshape(8, 1, 2, 2).tolist()
    assert data.labels.tolist() == list(range(8))
    assert data.labels.dtype == torch.int64


def test_search_order(tiny_mnist, tmp_path, monkeypatch, own_cache):
    # A damaged copy is refused, so which place is named tells which one was looked at first.
    bad = {name: content + b"!" for name, content in tiny_mnist.items()}
    for place in (tmp_path / "given" / "mnist", tmp_path / "env" / "mnist", own_cache / "data" / "mnist"):
        put(bad, place)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("ADADP_DATA", str(tmp_path / "env"))
    with pytest.raises(CorruptDataError, match="given"):
        load("mnist", data_dir=tmp_path / "given")
    with pytest.raises(CorruptDataError, match="env"):
        load("mnist", data_dir=tmp_path / "empty")
    monkeypatch.delenv("ADADP_DATA")
    with pytest.raises(CorruptDataError, match="adadp"):
        load("mnist")


def test_system_folder_comes_last(tiny_mnist, tmp_path, monkeypatch):
    put(tiny_mnist, tmp_path / "system")
    entry = dataclasses.replace(standard.CATALOGUE["mnist"], system_folders=(str(tmp_path / "system"),))
    monkeypatch.setitem(standard.CATALOGUE, "mnist", entry)
    assert len(load("mnist")) == 8
    assert any("dataset-fashion-mnist" in f for f in CATALOGUE["fashion-mnist"].system_folders)


def test_missing_says_where_to_put_which_files(tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        load("mnist", data_dir=tmp_path)
    text = str(caught.value)
    assert "train-images-idx3-ubyte.gz" in text
    assert str(tmp_path / "mnist") in text
    assert "ADADP_DATA" in text
    assert "https://" in text


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-5], lambda b: b[:20], lambda b: b[:30] + b"\x00" + b[31:], lambda b: b""]
)
def test_damaged_files_are_named(tiny_mnist, tmp_path, damage):
    put(tiny_mnist, tmp_path / "mnist")
    path = tmp_path / "mnist" / f"{TRAIN.images.file}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptDataError, match=TRAIN.images.file):
        load("mnist", data_dir=tmp_path)


def test_a_changed_pixel_is_refused(tiny_mnist, tmp_path):
    content = bytearray(tiny_mnist[TRAIN.images.file])
    content[-1] ^= 1
    put({**tiny_mnist, TRAIN.images.file: bytes(content)}, tmp_path / "mnist")
    with pytest.raises(CorruptDataError, match="SHA-256"):
        load("mnist", data_dir=tmp_path)


def test_names_splits_and_folders_that_do_not_exist(tmp_path):
    with pytest.raises(DataError, match="fashion-mnist"):
        load("mnisst")
    with pytest.raises(DataError, match="split"):
        load("digits", "validation")
    with pytest.raises(DataError, match="not a folder"):
        load("mnist", data_dir=tmp_path / "nowhere")


@pytest.fixture
def tiny_cifar(monkeypatch):
    """CIFAR-100's entry for twelve random images (the one with two label bytes), and the images."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8), np.arange(12, dtype=np.uint8)
    content = CATALOGUE["cifar100"].content
    split = dataclasses.replace(content.splits["train"], rows=12, digest=cifar.digest(images, labels))
    content = dataclasses.replace(content, splits={"train": split})
    monkeypatch.setitem(standard.CATALOGUE, "cifar100", dataclasses.replace(CATALOGUE["cifar100"], content=content))
    return images, labels


def put_parquet(images, labels, folder, shards=2):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    for i, part in enumerate(np.array_split(np.arange(len(labels)), shards)):
        rows = []
        for index in part:
            buffer = io.BytesIO()
            image.fromarray(images[index]).save(buffer, "png")
            rows.append({"bytes": buffer.getvalue(), "path": None})
        table = pa.table(
            {"image": rows, "fine_label": labels[part].astype(np.int64), "coarse_label": labels[part] // 5}
        )
        pq.write_table(table, folder / f"train-{i:05d}-of-{shards:05d}.parquet")


def put_archive(images, labels, folder):
    folder.mkdir(parents=True)
    rows = [
        bytes([label // 5, label]) + im.transpose(2, 0, 1).tobytes() for im, label in zip(images, labels, strict=True)
    ]
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("cifar-100-binary/train.bin")
        info.size = sum(map(len, rows))
        archive.addfile(info, io.BytesIO(b"".join(rows)))


@pytest.mark.parametrize("form", [put_parquet, put_archive])
def test_cifar_from_either_form(tiny_cifar, tmp_path, form):
    images, labels = tiny_cifar
    form(images, labels, tmp_path / "cifar100")
    data = load("cifar100", data_dir=tmp_path)
    assert np.array_equal(data.images.numpy(), images.transpose(0, 3, 1, 2))
    assert data.labels.tolist() == labels.tolist()
    assert data.classes[:2] == ("apple", "aquarium_fish")


def test_a_missing_shard_is_named(tiny_cifar, tmp_path):
    put_parquet(*tiny_cifar, tmp_path / "cifar100")
    (tmp_path / "cifar100" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataNotFoundError, match="train-00000-of-00002"):
        load("cifar100", data_dir=tmp_path)


@pytest.mark.parametrize("form", [put_parquet, put_archive])
def test_damaged_cifar_is_named(tiny_cifar, tmp_path, form):
    form(*tiny_cifar, tmp_path / "cifar100")
    path = sorted((tmp_path / "cifar100").iterdir())[-1]
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CorruptDataError, match=path.name):
        load("cifar100", data_dir=tmp_path)


def test_other_images_under_the_name_are_refused(tiny_cifar, tmp_path):
    images, labels = tiny_cifar
    put_parquet(images ^ 1, labels, tmp_path / "cifar100")
    with pytest.raises(CorruptDataError, match="not the published ones"):
        load("cifar100", data_dir=tmp_path)


def test_decoded_arrays_are_cached_and_checked(tiny_cifar, tmp_path, own_cache, monkeypatch):
    put_parquet(*tiny_cifar, tmp_path / "cifar100")
    first = load("cifar100", data_dir=tmp_path)
    kept = own_cache / "decoded" / "cifar100-train.safetensors"
    assert [f.name for f in kept.parent.iterdir()] == [kept.name]
    real = cifar.read
    monkeypatch.setattr(cifar, "read", lambda *a: pytest.fail("decoded again"))
    assert torch.equal(load("cifar100", data_dir=tmp_path).images, first.images)
    # Files are not even needed while the cache holds the published content.
    shutil.rmtree(tmp_path / "cifar100")
    assert torch.equal(load("cifar100", data_dir=tmp_path).images, first.images)
    put_parquet(*tiny_cifar, tmp_path / "cifar100")
    # A flipped bit in the cache, a cut file, a file of other images: ignored, and decoded anew.
    monkeypatch.setattr(cifar, "read", real)
    whole = kept.read_bytes()
    for damaged in (whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:], whole[:-1], b""):
        kept.write_bytes(damaged)
        assert torch.equal(load("cifar100", data_dir=tmp_path).images, first.images)
        assert kept.read_bytes() == whole
    decoded.write(kept, tiny_cifar[0] ^ 1, tiny_cifar[1])
    assert torch.equal(load("cifar100", data_dir=tmp_path).images, first.images)


def test_a_cache_that_cannot_be_written_is_no_error(tiny_cifar, tmp_path, monkeypatch):
    put_archive(*tiny_cifar, tmp_path / "cifar100")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(load("cifar100", data_dir=tmp_path)) == 12


def test_a_missing_package_says_how_to_install_it(tiny_cifar, tmp_path, monkeypatch):
    put_parquet(*tiny_cifar, tmp_path / "cifar100")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'adadp\[data\]'"):
        load("cifar100", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_mnist(real_data, name):
    train, test = load(name), load(name, "test")
    assert train.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert train.labels.bincount(minlength=10).min() > 5_000
    if name == "mnist":
        assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_cifar(real_data):
    pytest.importorskip("PIL")
    pytest.importorskip("pyarrow")
    test = load("cifar10", "test")
    assert test.images.shape == (10_000, 3, 32, 32)
    assert test.labels.bincount().tolist() == [1_000] * 10
    if not list(Path(real_data, "cifar100").glob("test-*")):
        with pytest.raises(DataNotFoundError, match="cifar-100-binary"):
            load("cifar100", "test")


@pytest.mark.slow
def test_real_cifar_training_sets(real_data):
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        train = load(name)
        assert train.images.shape == (50_000, 3, 32, 32)
        assert train.labels.bincount().tolist() == [50_000 // classes] * classes
        assert len(train.classes) == classes
