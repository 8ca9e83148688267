"""A mixed table through all of preprocessing, to disk and back."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from sklearn.base import clone

from adadp.errors import ConfigurationError
from adadp.preprocessing import DPPCA, DeclaredOneHot, HashedOneHot, TablePreprocessor, load, save
from adadp.preprocessing.encoding import bucket_of


def table(n=3_000):
    rng = np.random.default_rng(0)
    return {
        "income": rng.lognormal(10, 1, n),
        "age": rng.integers(18, 90, n),
        "member": rng.random(n) < 0.3,
        "colour": rng.choice(["red", "green", "blue"], n),
        "street": np.array([f"street {i}" for i in rng.integers(0, 1000, n)], dtype=object),
    }


def fitted(**settings):
    return TablePreprocessor(1.0, categories={"colour": ["red", "green"]}, buckets=8, random_state=9, **settings)


def test_columns_by_kind():
    p = fitted().fit(table())
    out = p.transform(table())
    names = p.get_feature_names_out().tolist()
    assert names[:5] == ["income", "age", "member", "colour=red", "colour=green"]
    assert names[5:] == [f"street#{i}" for i in range(8)]
    assert out.shape == (3_000, 13)
    assert out.dtype == np.float32
    assert (out[:, 5:].sum(axis=1) == 1).all()
    assert out[:, 3].tolist() == (table()["colour"] == "red").astype(float).tolist()
    assert len(p.events_) == 4
    assert sum(1 / e.noise_multiplier**2 for e in p.events_) == pytest.approx(1.0)


def test_text_alone_costs_nothing():
    charged = []
    ledger = type("Run", (), {"charge": lambda self, event: charged.append(event)})()
    p = TablePreprocessor(1.0).fit({"a": np.array(["x", "y"])}, ledger=ledger)
    assert p.events_ == ()
    assert charged == []


def test_missing_cells_are_zero():
    p = fitted().fit(table())
    row = {"income": [np.nan], "age": [np.nan], "member": [False], "colour": [None], "street": [""]}
    assert not p.transform(row).any()


def test_save_and_load_give_the_same_rows_and_no_seed(tmp_path):
    p = fitted().fit(table())
    save(tmp_path / "p.safetensors", p)
    again = load(tmp_path / "p.safetensors")
    assert np.array_equal(again.transform(table()), p.transform(table()))
    assert again.events_ == p.events_
    assert again.assumptions_ == p.assumptions_
    with safe_open(tmp_path / "p.safetensors", framework="numpy") as file:
        assert "random_state" not in file.metadata()["state"]
    assert [f.name for f in tmp_path.iterdir()] == ["p.safetensors"]


def test_pca_is_saved_too(tmp_path):
    rows = np.random.default_rng(0).normal(size=(50, 6))
    pca = DPPCA(3, 1.0).fit(rows)
    save(tmp_path / "p", pca)
    assert np.array_equal(load(tmp_path / "p").transform(rows), pca.transform(rows))


def test_a_damaged_file_is_refused(tmp_path):
    save(tmp_path / "p", fitted().fit(table()))
    whole = (tmp_path / "p").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-9])
    with pytest.raises(ConfigurationError, match="damaged"):
        load(tmp_path / "cut")
    (tmp_path / "text").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigurationError):
        load(tmp_path / "text")


def test_one_row_does_not_change_how_another_is_encoded():
    t = table(200)
    p = fitted().fit(t)
    first = p.transform({k: v[:1] for k, v in t.items()})
    assert np.array_equal(first[0], p.transform(t)[0])


def test_hash_is_the_same_on_every_machine():
    # A saved model must find its buckets again: these numbers may never change. Python's own hash() would
    # differ each time.
    assert bucket_of("größe", 3, 1000) == 44
    assert bucket_of("a", 0, 10**6) != bucket_of("a", 1, 10**6)


def test_buckets_are_even():
    counts = np.bincount([bucket_of(str(i), 0, 16) for i in range(16_000)], minlength=16)
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize("categories", ["auto", [["a", "a"]], [[]], ["ab"], [["a"], ["b"]], [[None]]])
def test_undeclared_vocabularies_are_refused(categories):
    with pytest.raises(ConfigurationError):
        DeclaredOneHot(categories).fit([["a"]])


def test_vocabulary_from_the_data_is_refused_by_the_table():
    with pytest.raises(ConfigurationError, match="who is in it"):
        TablePreprocessor(categories={"colour": "auto"}).fit(table())


def test_numbers_can_be_declared_values():
    encoder = DeclaredOneHot([[1, 2, 3]]).fit([[1]])
    assert encoder.transform([[2.0], [7], ["3"], [np.nan]]).tolist() == [
        [0, 1, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 0],
    ]


def test_columns_that_are_gone_or_have_changed_type():
    p = fitted().fit(table())
    t = table()
    del t["age"]
    with pytest.raises(ConfigurationError, match="'age'"):
        p.transform(t)
    t["age"] = np.array(["old"] * 3_000)
    with pytest.raises(ConfigurationError, match="'age'"):
        p.transform(t)
    with pytest.raises(ConfigurationError, match="'size'"):
        TablePreprocessor(categories={"size": ["s", "m"]}).fit(table())


def test_clone_keeps_settings():
    assert clone(fitted()).get_params() == fitted().get_params()
    assert clone(HashedOneHot(7)).buckets == 7


def test_a_file_of_version_0_2_is_read_as_it_was_meant(tmp_path):
    """It called categories text, and knew nothing of ranges, dates and free text."""
    columns = {"age": np.arange(40.0), "job": np.array(["cook", "nurse"] * 20, dtype=object)}
    table = TablePreprocessor(2.0, buckets=8, random_state=0).fit(columns)
    save(tmp_path / "now", table)
    with safe_open(tmp_path / "now", framework="numpy") as file:
        metadata, arrays = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = json.loads(metadata["state"])
    for name in ("ranges", "text", "dates", "missing", "vectors"):
        del state["params"][name]
    state["fitted"]["text_"] = state["fitted"].pop("categories_")
    for name in ("ranged_", "dates_", "free_text_", "range_middle_", "range_scale_"):
        del state["fitted"][name]
    save_file(arrays, tmp_path / "old", metadata={**metadata, "state": json.dumps(state)})
    old = load(tmp_path / "old")
    assert np.array_equal(old.transform(columns), table.transform(columns))
    assert (old.categories_, old.text_) == (["job"], [])
    assert old.get_feature_names_out().tolist() == table.get_feature_names_out().tolist()
