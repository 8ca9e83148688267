"""Free text: each row by itself, from public vectors or a public hash, and nothing is charged."""

import numpy as np
import pytest
import torch

from adadp.errors import ConfigurationError
from adadp.preprocessing import FreeText, TablePreprocessor, load, save
from adadp.preprocessing.free_text import words_are_there
from adadp.training import preparation

needs_words = pytest.mark.skipif(not words_are_there(), reason="wordllama or tokenizers is not installed")
TEXTS = np.array([["green tea and toast"], ["a compiler for C"], ["tea, green"], [None], [""]], dtype=object)


@pytest.mark.parametrize("vectors", ["hashed", pytest.param("words", marks=needs_words)])
def test_each_row_is_mapped_by_itself(vectors):
    made = FreeText(vectors).fit(TEXTS).transform(TEXTS)
    assert made.dtype == np.float32
    lengths = np.linalg.norm(made, axis=1)
    assert lengths[:3] == pytest.approx(1, abs=1e-5)
    assert lengths[3:].tolist() == [0, 0]
    for row in range(5):
        alone = FreeText(vectors).fit(TEXTS[[row]]).transform(TEXTS[[row]])
        assert alone[0] == pytest.approx(made[row], abs=1e-6)
    assert made[0] @ made[2] > made[0] @ made[1], "texts about the same are alike"


@pytest.mark.parametrize("vectors", ["hashed", pytest.param("words", marks=needs_words)])
def test_it_is_kept_without_the_data(tmp_path, vectors):
    columns = {"note": TEXTS[:, 0], "age": np.arange(5.0)}
    table = TablePreprocessor(2.0, text=["note"], vectors=vectors, random_state=0).fit(columns)
    save(tmp_path / "t.safetensors", table)
    again = load(tmp_path / "t.safetensors")
    assert np.array_equal(again.transform(columns), table.transform(columns))
    assert table.width(columns) == table.transform(columns).shape[1] == len(table.get_feature_names_out())


def test_other_word_vectors_than_those_of_training_are_refused():
    if not words_are_there():
        pytest.skip("wordllama or tokenizers is not installed")
    fitted = FreeText("words").fit(TEXTS)
    fitted.digest_ = "of another version"
    with pytest.raises(ConfigurationError, match="others than the run was trained with"):
        fitted.transform(TEXTS)


def test_without_word_vectors_words_are_hashed(monkeypatch):
    monkeypatch.setattr("adadp.preprocessing.free_text.words_are_there", lambda: False)
    assert FreeText(buckets=64).fit(TEXTS).transform(TEXTS).shape == (5, 64)


@pytest.mark.parametrize(("given", "said"), [({"vectors": "glove"}, "vectors must"), ({"buckets": 1}, "buckets must")])
def test_refusals(given, said):
    with pytest.raises(ConfigurationError, match=said):
        FreeText(**given).fit(TEXTS)


def test_ranges_dates_and_missing_cells_cost_nothing():
    columns = {"age": np.array([0.0, 120.0, np.nan, 999.0]), "seen": np.array([0.0, 365.0, np.nan, 10.0])}
    table = TablePreprocessor(
        ranges={"age": (0, 120), "seen": (0, 3650)}, dates=["seen"], missing=True, random_state=0
    ).fit(columns)
    assert table.events_ == table.planned_events(columns) == ()
    rows = table.transform(columns)
    assert rows.shape == (4, table.width(columns))
    assert rows[:, 0] == pytest.approx([-(3**0.5), 3**0.5, 0, 3**0.5], abs=1e-6)  # clipped to the range
    assert rows[:, 2].tolist() == [0, 0, 1, 0]
    assert np.isfinite(rows).all()
    assert any("ranges of columns were declared" in text for text in table.assumptions_)
    with pytest.raises(ConfigurationError, match="does not hold numbers"):
        TablePreprocessor(ranges={"word": (0, 1)}).fit({"word": np.array(["a", "b"], dtype=object)})


@pytest.mark.parametrize("vectors", ["hashed", pytest.param("words", marks=needs_words)])
def test_made_rows_look_like_the_rows(vectors):
    columns = {
        "age": np.arange(4.0), "width": np.arange(4.0), "ok": np.array([True, False] * 2), "seen": np.arange(4.0),
        "size": np.array(["S", "M", "L", "S"], dtype=object), "job": np.array(["a"] * 4, dtype=object),
        "note": np.array(["one two", "three", "four", "five"], dtype=object),
    }  # fmt: skip
    table = TablePreprocessor(
        5.0,
        categories={"size": ["S", "M", "L"]},
        ranges={"width": (0, 3)},
        dates=["seen"],
        text=["note"],
        missing=True,
        vectors=vectors,
        random_state=0,
    ).fit(columns)
    made = preparation._TableRows(table)(6, torch.Generator().manual_seed(0))
    assert made.shape == (6, table.width(columns))
    assert torch.equal(made, preparation._TableRows(table)(6, torch.Generator().manual_seed(0)))
    text = slice(made.shape[1] - table.free_text_.size_, None)
    assert made[:, text].norm(dim=1) == pytest.approx(np.full(6, 4.0), abs=1e-4)
