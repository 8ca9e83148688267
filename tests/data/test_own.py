"""Users' own data: what is read, what is refused, and how rows are held out."""

import numpy as np
import pytest
import torch

from adadp.data import CorruptDataError, DataError, DataNotFoundError, Dataset, Table, read, read_held_out
from adadp.preprocessing import TablePreprocessor

CSV = "age,city,income,label\n30,Rome,1.5e3,yes\n41,Oslo,2000,no\n52,Rome,,yes\n"


def csv(tmp_path, text, name="t.csv"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_csv(tmp_path):
    table = read(csv(tmp_path, CSV), missing=True)
    assert isinstance(table, Table)
    assert table.classes == ("no", "yes")
    assert table.labels.tolist() == [1, 0, 1]
    assert table.columns["age"].tolist() == [30.0, 41.0, 52.0]
    assert table.columns["city"].tolist() == ["Rome", "Oslo", "Rome"]
    assert np.isnan(table.columns["income"][2])
    assert any("types of the columns" in sentence for sentence in table.public)


def test_semicolons_and_bom(tmp_path):
    path = csv(tmp_path, "\ufeffa;b;y\n1;2;0\n3;4;1\n")
    assert list(read(path, label="y").columns) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, {}, "'income' holds NaN"),
        (CSV, {"label": "wealth"}, "no label column 'wealth'; it has age, city, income, label"),
        (CSV.replace("41", "forty"), {"missing": True}, "'age' mixes numbers and text .row 2"),
        (CSV.replace("no\n", "yes\n"), {"missing": True}, "one class only"),
        (CSV.replace("no\n", "\n"), {"missing": True}, "row 2 has no label"),
        (CSV, {"missing": True, "classes": ["yes", "maybe"]}, "'no' of row 2 is none of the classes"),
        (CSV, {"missing": True, "classes": ["yes", "yes", "no"]}, "declared twice"),
        (CSV, {"missing": True, "label": "income"}, "no label"),
        ("a,label\n1,0.5\n2,1.5\n", {}, "no class label"),
        ("a,label\ninf,0\n2,1\n", {}, "infinite"),
        ("a,a,label\n1,2,0\n1,2,1\n", {}, "names a column twice: a"),
        ("a,label\n1,0,9\n2,1\n", {}, "row 1 has 3 cells"),
        ("a,label\n", {}, "no rows"),
        ("label\n1\n2\n", {}, "no column besides the label"),
        (CSV, {"text": ["town"]}, "no column 'town'"),
    ],
)
def test_refusals_name_the_cause(tmp_path, text, options, message):
    with pytest.raises(DataError, match=message):
        read(csv(tmp_path, text), **options)


def test_a_mixed_column_can_be_declared_text(tmp_path):
    table = read(csv(tmp_path, "code,label\n17,0\nA5,1\n"), text=["code"])
    assert table.columns["code"].tolist() == ["17", "A5"]


def test_declared_classes_are_the_ones_however_few_occur(tmp_path):
    declared = read(csv(tmp_path, CSV), missing=True, classes=["maybe", "yes", "no"])
    assert declared.classes == ("maybe", "yes", "no")
    assert declared.labels.tolist() == [1, 2, 1]
    assert any("declared (maybe, yes, no)" in sentence for sentence in declared.public)
    found = read(csv(tmp_path, CSV), missing=True)
    assert any("as they occur in the data (no, yes)" in sentence for sentence in found.public)
    # One class may be missing from the data: whether it is would depend on single rows.
    assert read(csv(tmp_path, "a,label\n1,yes\n2,yes\n"), classes=["no", "yes"]).labels.tolist() == [1, 1]
    # One label that is no number does not change what the others mean.
    numbers = csv(tmp_path, "a,label\n1,0\n2,1.0\n3,1\n4,?\n")
    with pytest.raises(DataError, match=r"row 4 is none of the classes .*drop_other_labels"):
        read(numbers, classes=[0, 1])
    assert read(numbers, classes=[0, 1.0], drop_other_labels=True).labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("classes", [["no"], ["no", "no"], ["no", ""], []])
def test_declarations_that_make_no_sense(tmp_path, classes):
    with pytest.raises(DataError, match="class"):
        read(csv(tmp_path, CSV), missing=True, classes=classes)


def test_rows_of_other_labels_are_left_out_by_a_declared_rule(tmp_path):
    """The rule looks at each row by itself: what is kept of the others is the same with such a row and without."""
    rows = "a,b,label\n1,x,no\n2,y,yes\n3,x,no\n"
    options = {"classes": ["no", "yes"], "drop_other_labels": True}
    without = read(csv(tmp_path, rows), **options)
    for more in ("9,z,perhaps\n", "9,z,\n", "9,z,17\n", ",z,other\n", "inf,z,other\n"):
        kept = read(csv(tmp_path, rows + more), **options)
        assert kept.columns["a"].tolist() == without.columns["a"].tolist() == [1.0, 2.0, 3.0]
        assert kept.columns["b"].tolist() == ["x", "y", "x"]
        assert torch.equal(kept.labels, without.labels)
        assert kept.public == without.public
    assert any("left out, by a rule declared beforehand" in sentence for sentence in kept.public)
    with pytest.raises(DataError, match="no row"):
        read(csv(tmp_path, rows), classes=["a", "b"], drop_other_labels=True)
    with pytest.raises(DataError, match="declare those"):
        read(csv(tmp_path, rows), drop_other_labels=True)


def test_folders_of_other_names_are_left_out_by_a_declared_rule(tmp_path):
    pets = folder_of_images(tmp_path / "pets", classes=("cat", "dog", "newt"))
    kept = read(pets, classes=["dog", "cat"], drop_other_labels=True)
    assert kept.classes == ("dog", "cat")
    assert sorted(kept.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(DataError, match=r"'newt' is none of the classes .*drop_other_labels"):
        read(pets, classes=["dog", "cat"])
    with pytest.raises(DataError, match="no image"):
        read(pets, classes=["cow", "hen"], drop_other_labels=True)


def test_parquet_and_npz_labels_beside_declared_classes(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.ones((3, 2)), label=np.array([1.0, 0.0, np.nan]))
    options = {"classes": [0, 1], "drop_other_labels": True}
    assert read(tmp_path / "t.npz", **options).labels.tolist() == [1, 0]
    np.savez(tmp_path / "i.npz", x=np.zeros((3, 5, 5), dtype=np.uint8), label=np.array([1, 0, 7]))
    images = read(tmp_path / "i.npz", **options)
    assert images.images.shape == (2, 1, 5, 5)
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": [1, 2, 3], "label": [1, None, 0]}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", **options).columns["a"].tolist() == [1.0, 3.0]


def test_numbers_as_labels_are_sorted_as_numbers(tmp_path):
    table = read(csv(tmp_path, "a,label\n1,10\n2,2\n3,10.0\n"))
    assert table.classes == ("2", "10")
    assert table.labels.tolist() == [1, 0, 1]


def test_wrong_files(tmp_path):
    with pytest.raises(DataNotFoundError, match="does not exist"):
        read(tmp_path / "none.csv")
    (tmp_path / "a.xls").write_bytes(b"x")
    with pytest.raises(DataError, match=r"\.csv, \.parquet, \.npz"):
        read(tmp_path / "a.xls")
    for suffix in ("csv", "npz", "parquet"):
        if suffix == "parquet":
            pytest.importorskip("pyarrow")
        (tmp_path / f"a.{suffix}").write_bytes(b"\xff\xfe\x00PAR1" * 9)
        with pytest.raises(CorruptDataError, match=f"a.{suffix}"):
            read(tmp_path / f"a.{suffix}")


def test_npz_table_and_images(tmp_path):
    rng = np.random.default_rng(0)
    y = np.array(["b", "a", "b"])
    np.savez(tmp_path / "t.npz", x=rng.normal(size=(3, 2)), flag=np.array([True, False, True]), label=y)
    table = read(tmp_path / "t.npz")
    assert list(table.columns) == ["x0", "x1", "flag"]
    assert table.classes == ("a", "b")
    pixels = rng.integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", x=pixels, label=y)
    images = read(tmp_path / "i.npz")
    assert isinstance(images, Dataset)
    assert images.input_shape == (3, 5, 4)
    assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy(), pixels)
    np.savez(tmp_path / "f.npz", x=pixels / 255, label=y)
    with pytest.raises(DataError, match="uint8"):
        read(tmp_path / "f.npz")
    np.savez(tmp_path / "n.npz", x=np.array([[1.0], [np.nan], [2.0]]), label=y)
    with pytest.raises(DataError, match="'x0' holds NaN"):
        read(tmp_path / "n.npz")
    np.savez(tmp_path / "l.npz", x=np.ones((4, 2)), label=y)
    with pytest.raises(DataError, match="3 labels"):
        read(tmp_path / "l.npz")
    np.savez(tmp_path / "o.npz", x=np.array([{}, {}, {}], dtype=object), label=y)
    with pytest.raises(CorruptDataError, match="objects"):
        read(tmp_path / "o.npz")


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1, 2, None], "b": [True, False, True], "c": ["x", None, "z"], "label": [0, 1, 0]}
    pq.write_table(pa.table({**columns, "d": pa.array(["p", "q", "p"]).dictionary_encode()}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'a' holds NaN"):
        read(tmp_path / "t.parquet")
    table = read(tmp_path / "t.parquet", missing=True)
    assert [v.dtype.kind for v in table.columns.values()] == ["f", "b", "O", "O"]
    assert table.columns["c"].tolist() == ["x", "", "z"]
    pq.write_table(pa.table({"a": [[1], [2]], "label": [0, 1]}), tmp_path / "l.parquet")
    with pytest.raises(DataError, match="'a' has type list"):
        read(tmp_path / "l.parquet")


def folder_of_images(path, sizes=((6, 5),), mode="L", classes=("cat", "dog")):
    image = pytest.importorskip("PIL.Image")
    for index, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for i in range(3):
            size = sizes[(index + i) % len(sizes)]
            image.new(mode, size, i * 40 if mode == "L" else (i, 1, 2)).save(path / name / f"{i}.png")
    return path


def test_folder_of_images(tmp_path):
    data = read(folder_of_images(tmp_path / "pets"))
    assert data.classes == ("cat", "dog")
    assert data.images.shape == (6, 1, 5, 6)
    assert data.images[:, 0, 0, 0].tolist() == [0, 40, 80] * 2
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert any("class names" in sentence for sentence in data.public)
    assert read(folder_of_images(tmp_path / "rgb", mode="RGB")).images.shape == (6, 3, 5, 6)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(DataError, match="give a size"):
        read(folder_of_images(tmp_path / "sizes", sizes=((6, 5), (7, 5))))
    assert read(tmp_path / "sizes", size=(4, 4)).input_shape == (1, 4, 4)
    with pytest.raises(DataError, match="two or more classes"):
        read(folder_of_images(tmp_path / "one", classes=("cat",)))
    with pytest.raises(DataError, match="'dog' is none of the classes"):
        read(folder_of_images(tmp_path / "wrong"), classes=["cat", "cow"])
    pets = folder_of_images(tmp_path / "broken")
    (pets / "cat" / "1.png").write_bytes((pets / "cat" / "1.png").read_bytes()[:40])
    with pytest.raises(CorruptDataError, match=r"1\.png"):
        read(pets)


def many_rows(tmp_path, n=2_000, name="many.csv", extra=""):
    rows = "".join(f"{i},{i % 3}\n" for i in range(n))
    return csv(tmp_path, f"number,label\n{rows}{extra}", name)


def test_a_fraction_is_held_out_row_by_row(tmp_path):
    pair = read_held_out(many_rows(tmp_path), test_fraction=0.25, seed=4)
    assert len(pair.train) + len(pair.test) == 2_000
    assert 400 < len(pair.test) < 600
    assert not set(pair.train.columns["number"]) & set(pair.test.columns["number"])
    assert "not covered" in pair.note
    # One row more: every other row stays on its side.
    more = read_held_out(many_rows(tmp_path, extra="77777,0\n"), test_fraction=0.25, seed=4)
    assert set(more.train.columns["number"]) - {77777.0} == set(pair.train.columns["number"])
    again = read_held_out(many_rows(tmp_path), test_fraction=0.25, seed=pair.seed)
    assert torch.equal(again.test.labels, pair.test.labels)
    assert read_held_out(many_rows(tmp_path)).seed != read_held_out(many_rows(tmp_path)).seed


def test_a_test_file_of_its_own(tmp_path):
    train = many_rows(tmp_path)
    pair = read_held_out(train, test=csv(tmp_path, "label,number\n1,5\n1,6\n", "test.csv"))
    assert pair.test.labels.tolist() == [1, 1]
    assert pair.test.classes == pair.train.classes
    for text, message in [
        ("number,label\n5,9\n", "'9' of row 1 is none of the classes"),
        ("size,label\n5,1\n", "no column 'number'"),
        ("number,label\nfive,1\n", "text in one file"),
    ]:
        with pytest.raises(DataError, match=message):
            read_held_out(train, test=csv(tmp_path, text, "bad.csv"))
    with pytest.raises(DataError, match="not both"):
        read_held_out(train, test=train, test_fraction=0.5)
    for fraction in (0.0, 1.0, -1.0):
        with pytest.raises(DataError, match="test_fraction"):
            read_held_out(train, test_fraction=fraction)
    with pytest.raises(DataError, match="too few"):
        read_held_out(csv(tmp_path, "a,label\n1,0\n2,1\n"), test_fraction=0.001, seed=0)


def test_a_table_goes_through_the_preprocessing(tmp_path):
    table = read(csv(tmp_path, CSV), missing=True)
    rows = TablePreprocessor(5.0, buckets=4).fit(table).transform(table)
    assert rows.shape == (3, 6)
    assert np.isfinite(rows).all()
