"""What columns hold: declared, or read off, and what looks wrong."""

import datetime

import numpy as np
import pytest

from adadp.data import DataError, read
from adadp.data.columns import declare
from adadp.dates import day_of, seasons


def csv(tmp_path, text):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    return tmp_path / "t.csv"


PEOPLE = "age,job,seen,note,label\n30,cook,2024-03-01,likes green tea,yes\n41,,1.4.2024,never came back,no\n"


def test_declared_kinds(tmp_path):
    table = read(
        csv(tmp_path, PEOPLE),
        number=["age=0..120"], category=["job=cook,nurse"], date=["seen=2020-01-01..2026-12-31"], text=["note"],
    )  # fmt: skip
    assert table.kinds == {"age": "number", "job": "category", "seen": "date", "note": "text"}
    assert table.columns["seen"].tolist() == [day_of("2024-03-01"), day_of("2024-04-01")]
    assert table.declared.ranges["age"] == (0.0, 120.0)
    assert table.declared.values == {"job": ("cook", "nurse")}
    assert "the names and the types of the columns, declared" in table.public
    assert table.doubts == ()


def test_what_is_read_off_is_said(tmp_path):
    table = read(csv(tmp_path, PEOPLE), date=["seen"])
    assert table.kinds == {"age": "number", "job": "category", "seen": "date", "note": "category"}
    assert any("declared: seen; the others as they occur" in sentence for sentence in table.public)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"number": ["age=120..0"]}, "larger"),
        ({"number": ["age=0-120"]}, r"LOW\.\.HIGH"),
        ({"date": ["seen=2020..soon"]}, "not a range"),
        ({"category": ["job=a,,b"]}, "different and not empty"),
        ({"text": ["note=a,b"]}, "takes no values"),
        ({"number": ["a"], "text": ["a"]}, "declared twice"),
        ({"number": ["a"], "ignore": ["a"]}, "declared twice"),
    ],
)
def test_declarations_that_make_no_sense(given, said):
    with pytest.raises(DataError, match=said):
        declare(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"number": ["job"]}, "'job' is declared a number, and row 1 is none"),
        ({"date": ["job"]}, "'job' is declared a date, and row 1"),
        ({"ignore": ["salary"]}, "no column 'salary'"),
        ({"ignore": ["age", "job", "seen", "note"]}, "no column besides the label"),
        ({"target": (0, 1)}, "declared a number, and row 1 is none"),
        ({"category": ["label=yes,no"]}, "'label' is declared as a feature, and is the label"),
        ({"category": ["job"], "person": "job"}, "'job' is declared as a feature, and is whose"),
        ({"target": (0, 1), "classes": ["yes", "no"]}, "not both"),
    ],
)
def test_cells_that_do_not_fit(tmp_path, given, said):
    with pytest.raises(DataError, match=said):
        read(csv(tmp_path, PEOPLE), **given)


def test_what_is_ignored_is_not_looked_at(tmp_path):
    table = read(csv(tmp_path, "a,b,label\n1,2,x\n3,four,y\n"), ignore=["b"])
    assert list(table.columns) == ["a"]


def test_a_number_to_predict_is_clipped_to_its_declared_range(tmp_path):
    table = read(csv(tmp_path, "a,price\n1,0\n2,50\n3,100\n4,900\n5,-7\n"), label="price", target=(0, 100))
    assert table.labels.tolist() == [-1, 0, 1, 1, -1]
    assert table.classes == ()
    assert table.in_units(table.labels).tolist() == [0, 50, 100, 100, 0]
    assert any("range of 'price'" in sentence for sentence in table.public)
    with pytest.raises(DataError, match="row 2 has no number"):
        read(csv(tmp_path, "a,price\n1,0\n2,\n"), label="price", target=(0, 100))


def test_decimal_commas(tmp_path):
    path = csv(tmp_path, "a;label\n1.234,5;x\n-3,25;y\n")
    assert read(path, decimal_comma=True).columns["a"].tolist() == [1234.5, -3.25]
    assert "decimal commas" in read(path).doubts[0]


@pytest.mark.parametrize(
    ("column", "cells", "said"),
    [
        ("note", [f"this is what person {i} wrote to us" for i in range(30)], "--text note"),
        ("seen", [f"2024-01-{i + 1:02d}" for i in range(30)], "--date seen"),
        ("code", [f"x{i}y" for i in range(30)], "like an id"),
        ("patient_id", [str(1000 - i) for i in range(30)], "--ignore patient_id"),
        ("customerId", [str(i) for i in range(30)], "--ignore customerId"),
        ("gap", [""] * 30, None),
    ],
)
def test_what_looks_wrong(tmp_path, column, cells, said):
    rows = "\n".join(f"{cell},{i % 2}" for i, cell in enumerate(cells))
    doubts = read(csv(tmp_path, f"{column},label\n{rows}\n"), missing=True).doubts
    assert (said is None and not doubts) or said in doubts[0]


def test_columns_that_are_fine_raise_no_doubts(tmp_path):
    rows = "\n".join(f"{1.5 * i},{i},{'ab'[i % 2]},{i % 2}" for i in range(40))
    assert read(csv(tmp_path, f"income,year,colour,label\n{rows}\n")).doubts == ()


def test_labels_that_look_wrong(tmp_path):
    rows = "\n".join(f"{i},{i}" for i in range(220))
    assert "--task regression" in read(csv(tmp_path, f"a,label\n{rows}\n")).doubts[0]
    rows = "\n".join(f"{i},{['yes', 'no', 'nan'][i % 3]}" for i in range(30))
    assert "looks like a missing label" in read(csv(tmp_path, f"a,label\n{rows}\n")).doubts[0]


def test_parquet_says_itself_what_columns_hold(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    seen = [datetime.date(2024, 3, 1), None]
    at = [datetime.datetime(2024, 3, 1, 12), datetime.datetime(2000, 1, 1)]
    columns = {"seen": seen, "at": at, "ok": [True, False], "note": ["a b", "c"], "label": ["x", "y"]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    table = read(tmp_path / "t.parquet", text=["note"], missing=True)
    assert table.kinds == {"seen": "date", "at": "date", "ok": "flag", "note": "text"}
    assert table.columns["at"].tolist() == [day_of("2024-03-01T12:00"), 0.0]
    assert np.isnan(table.columns["seen"][1])


def test_days():
    assert day_of("2000-01-02") == day_of("2.1.2000") == day_of("2000/01/02") == day_of("2000-01-02T00:00Z") == 1.0
    assert day_of("2000-01-01T01:00+01:00") == 0.0
    for wrong in ("03/01/2024", "yesterday", "31.31.2024", ""):
        with pytest.raises(ValueError, match=r".*"):
            day_of(wrong)
    assert seasons(np.array([0.25, 7.25, np.nan]))[:, [1, 2, 4, 5]].round(6)[0].tolist() == pytest.approx(
        seasons(np.array([0.25, 7.25]))[1, [1, 2, 4, 5]].round(6).tolist()
    )
