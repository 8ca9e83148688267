"""Malformed files of data: an error that names the file and the cause, never a hang, a crash or half a table."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import damaged, read_or_refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adadp.data import Dataset, Table, cifar, idx, read, unpacking
from adadp.data.catalogue import CATALOGUE
from adadp.errors import CorruptDataError, DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image")

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
ROWS = 24
GENERATOR = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "age": GENERATOR.normal(50, 9, ROWS).round(2),
    "town": np.array(["Rome", 'the "old" town', "a, b"] * (ROWS // 3)),
    "label": np.array(["no", "yes"] * (ROWS // 2)),
}


def csv_bytes() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(zip(*COLUMNS.values(), strict=True))
    return text.getvalue().encode()


def parquet_bytes() -> bytes:
    table = pa.table({**COLUMNS, "flag": [True, False] * (ROWS // 2)})
    sink = io.BytesIO()
    parquet.write_table(table, sink, row_group_size=8, compression="zstd")
    return sink.getvalue()


def npz_bytes() -> bytes:
    sink = io.BytesIO()
    np.savez_compressed(sink, x=GENERATOR.normal(size=(ROWS, 3)), label=np.arange(ROWS) % 2)
    return sink.getvalue()


def png_bytes(size: tuple[int, int] = (32, 32)) -> bytes:
    sink = io.BytesIO()
    image.fromarray(GENERATOR.integers(0, 255, (*size, 3), dtype=np.uint8)).save(sink, "png")
    return sink.getvalue()


WRITERS: dict[str, Callable[[], bytes]] = {".csv": csv_bytes, ".parquet": parquet_bytes, ".npz": npz_bytes}
WHOLE = {suffix: write() for suffix, write in WRITERS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


def is_whole(data: Dataset | Table) -> bool:
    """Nothing is missing from one column that another has, and every label is a class."""
    labels = data.labels
    assert labels.dtype == torch.int64
    assert 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes)
    if isinstance(data, Table):
        assert all(len(column) == len(labels) for column in data.columns.values())
        assert all(np.isfinite(column).all() for column in data.columns.values() if column.dtype.kind == "f")
    else:
        assert len(data.images) == len(labels)
    return True


@pytest.mark.parametrize("suffix", WRITERS)
@FUZZ
@given(data=st.data())
def test_tables(suffix: str, data: st.DataObject, folder: Path) -> None:
    path = folder / f"damaged{suffix}"
    path.write_bytes(WHOLE[suffix])
    assert len(read(path)) == ROWS
    path.write_bytes(data.draw(damaged(WHOLE[suffix])))
    found = read_or_refused(lambda: read(path), path)
    assert found is None or is_whole(found)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_table_that_is_cut_short_is_refused(suffix: str, folder: Path) -> None:
    path = folder / f"cut{suffix}"
    for end in range(0, len(WHOLE[suffix]), max(1, len(WHOLE[suffix]) // 60)):
        path.write_bytes(WHOLE[suffix][:end])
        with pytest.raises(CorruptDataError, match=path.name):
            read(path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ('a,label\n1,x\n2,"y\n3,x\n4,y\n', "unexpected end of data"),  # the quote is never closed
        ('a,label\n1,"x" y\n2,y\n', "expected after"),
        ("a,label\n" + '1,"' + "z" * 8_000_000 + '"\n', "field larger than"),
        ("z" * 8_000_000, "field larger than"),
        ("a,label\n1,x\n2\n", "row 2 has 1 cells"),
        ("\ufeffa,label\n1,x\n2,y\n".encode("utf-16"), "UTF-8"),
        (b"a,label\n1,\xff\n2,y\n", "UTF-8"),
        (b"", "no rows"),
        (b"\0" * 4096, "no rows|no label"),
    ],
)
def test_text_that_is_no_table(content: str | bytes, cause: str, folder: Path) -> None:
    path = folder / "text.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=cause):
        read(path)


def test_files_that_claim_more_than_memory_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "huge.parquet"
    parquet.write_table(
        pa.table({"a": pa.nulls(40_000_000, pa.int8()), "label": pa.nulls(40_000_000, pa.int8())}), path
    )
    with pytest.raises(CorruptDataError, match=r"huge.parquet has .* claims to unpack to 640,000,000"):
        read(path)

    path = folder / "huge.npz"
    content = bytearray(WHOLE[".npz"])
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        start = members.start_dir
    content[start + 24 : start + 28] = (2**31).to_bytes(4, "little")  # the unpacked size of the first member
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"huge.npz has .* claims to unpack to 2,147"):
        read(path)

    path = folder / "header.npz"  # a small member whose header claims a large array
    with zipfile.ZipFile(path, "w") as members:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 9), }"
        header = header.ljust(117) + b"\n"
        members.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CorruptDataError, match=r"header.npz"):
        read(path)

    monkeypatch.setattr(unpacking, "ALWAYS", 2**16)
    source, path = CATALOGUE["mnist"].content["train"].images, folder / "huge.gz"  # type: ignore[index]
    path.write_bytes(gzip.compress(bytes(2**25)))
    with pytest.raises(CorruptDataError, match=r"huge.gz"):
        idx.read(source, path)


def test_strangers_by_the_right_name(folder: Path) -> None:
    for suffix in WRITERS:
        for other in (*WHOLE, "folder", "array"):
            path = folder / f"stranger-{other.strip('.')}{suffix}"
            if other == "folder":
                path.mkdir()
                (path / "a.csv").write_text("a,label\n1,x\n")
            elif other == "array":
                np.save(path.with_suffix(".npy"), np.zeros(3))
                path.with_suffix(".npy").rename(path)
            elif other == suffix:
                continue
            else:
                path.write_bytes(WHOLE[other])
            with pytest.raises(DataError, match=path.name):
                read(path)


def test_a_parquet_file_has_the_columns_that_are_in_it(folder: Path) -> None:
    within = folder / "label=3" / "town=Oslo"
    within.mkdir(parents=True)
    (within / "t.parquet").write_bytes(WHOLE[".parquet"])
    found = read(within / "t.parquet")
    assert isinstance(found, Table)
    assert (found.classes, found.columns["town"][0]) == (("no", "yes"), "Rome")
    table = pa.table([pa.array([1.0, 2.0]), pa.array([3.0, 4.0]), pa.array(["x", "y"])], names=["a", "a", "label"])
    parquet.write_table(table, within / "twice.parquet")
    with pytest.raises(CorruptDataError, match=r"twice.parquet"):
        read(within / "twice.parquet")


# ---- images ----------------------------------------------------------------------------------------------------------


def as_kind(kind: str) -> bytes:
    sink = io.BytesIO()
    image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(sink, kind)
    return sink.getvalue()


@FUZZ
@given(data=st.data(), whole=st.sampled_from([as_kind(kind) for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp")]))
@pytest.mark.filterwarnings("ignore:Tag data larger")
def test_folders_of_images(data: st.DataObject, whole: bytes, folder: Path) -> None:
    place = folder / "pictures"
    for name in ("no", "yes"):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "1.png").write_bytes(whole)
    assert len(read(place)) == 2
    path = place / "yes" / "1.png"
    path.write_bytes(data.draw(damaged(whole)))
    found = read_or_refused(lambda: read(place), path)
    assert found is None or is_whole(found)


def test_an_image_that_claims_any_size_is_refused(folder: Path) -> None:
    place = folder / "bombs"
    for name in ("no", "yes"):
        (place / name).mkdir(parents=True)
    header = b"P6 90000 90000 255\n"
    (place / "no" / "1.png").write_bytes(header)
    (place / "yes" / "1.png").write_bytes(header)
    with pytest.raises(CorruptDataError, match=r"1.png is damaged or is no image"):
        read(place)


# ---- published data sets: what is read has the published digest, or nothing is read -------------------------------


@FUZZ
@given(data=st.data(), compressed=st.booleans())
@example(data=None, compressed=True)
def test_idx(data: st.DataObject | None, compressed: bool, folder: Path) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(15, 2, 2)
    content = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    known = CATALOGUE["mnist"].content["train"].images  # type: ignore[index]
    source = dataclasses.replace(known, digest=hashlib.sha256(content).hexdigest())
    path = folder / ("images.gz" if compressed else "images")
    whole = gzip.compress(content, mtime=0) if compressed else content
    path.write_bytes(whole)
    assert (idx.read(source, path) == array).all()
    if data is None:  # a header that claims 2^31 images
        path.write_bytes(gzip.compress(content[:4] + (2**31 - 1).to_bytes(4, "big") + content[8:]))
        with pytest.raises(CorruptDataError, match="does not hold the published"):
            idx.read(source, path)
        return
    path.write_bytes(data.draw(damaged(whole)))
    found = read_or_refused(lambda: idx.read(source, path), path)
    assert found is None or (found == array).all()


def cifar_like(folder: Path) -> tuple[Any, Any, bytes]:
    pictures = [png_bytes() for _ in range(6)]
    rows = {"img": [{"bytes": content, "path": None} for content in pictures], "label": list(range(6))}
    sink = io.BytesIO()
    parquet.write_table(pa.table(rows), sink, row_group_size=2)
    dataset = CATALOGUE["cifar10"].content
    assert isinstance(dataset, cifar.Cifar)
    split = dataclasses.replace(dataset.splits["train"], rows=6, digest=None)
    path = folder / "train.parquet"
    path.write_bytes(sink.getvalue())
    arrays = cifar.read(dataset, split, [path])
    return dataset, dataclasses.replace(split, digest=cifar.digest(*arrays)), sink.getvalue()


@pytest.fixture(scope="module")
def small_cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, bytes]:
    return cifar_like(tmp_path_factory.mktemp("cifar"))


@FUZZ
@given(data=st.data())
def test_cifar_from_parquet(data: st.DataObject, small_cifar: tuple[Any, Any, bytes], folder: Path) -> None:
    dataset, split, whole = small_cifar
    path = folder / "train.parquet"
    path.write_bytes(data.draw(damaged(whole)))
    found = read_or_refused(lambda: cifar.read(dataset, split, [path]), path)
    assert found is None or cifar.digest(*found) == split.digest


def test_cifar_images_and_rows_that_are_too_many_are_not_decoded(
    small_cifar: tuple[Any, Any, bytes], folder: Path
) -> None:
    dataset, split, whole = small_cifar
    path = folder / "more.parquet"
    bomb = b"P6 9000 9000 255\n"
    rows = {"img": [{"bytes": bomb, "path": None}], "label": [0]}
    parquet.write_table(pa.table(rows), path)
    with pytest.raises(CorruptDataError, match=r"more.parquet.* an image of 9000x9000"):
        cifar.read(dataset, split, [path])
    path.write_bytes(whole)
    with pytest.raises(CorruptDataError, match=r"more.parquet.* 6 rows, more than the data set has"):
        cifar.read(dataset, dataclasses.replace(split, rows=5), [path])
