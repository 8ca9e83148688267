"""Files of real texts and tables: how they are made, and what is committed of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from adadp_lab.experiments import table_class_weights, table_peers, tables
from adadp_lab.experiments.package_texts import packages

RESULTS = Path(__file__).parents[2] / "results" / "tables"
LISTING = """Package: tea
Section: main/games
Description: A game of tea
 longer text
Description-md5: 5d
Tag: a

Package: nameless
Description: no section

Package: libtea1
Section: libs
Description: Library: of tea
"""


def test_package_lists_are_read() -> None:
    assert list(packages(LISTING)) == [("games", "tea: A game of tea"), ("libs", "libtea1: Library: of tea")]
    assert list(packages(LISTING, "line")) == [("games", "A game of tea"), ("libs", "Library: of tea")]
    assert list(packages(LISTING, "long", {"5d": "A game of tea\nwith leaves"})) == [
        ("games", "A game of tea\nwith leaves")
    ]


def test_a_split_is_the_same_for_all_learners(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,outcome\n" + "".join(f"{i},yes\n" for i in range(500)))
    train, test = (path.read_text().splitlines() for path in tables.split(tmp_path / "t.csv", 3, tmp_path))
    assert train[0] == test[0] == "a,outcome"
    assert sorted(train[1:] + test[1:]) == sorted(f"{i},yes" for i in range(500))
    assert 60 < len(test) < 140
    again = tables.split(tmp_path / "t.csv", 3, tmp_path)[1].read_text().splitlines()
    assert again == test


def test_the_committed_page_follows_from_its_records() -> None:
    records = json.loads((RESULTS / "tables.json").read_text())
    assert tables.page(records) == (RESULTS / "tables.md").read_text()
    assert {record["table"] for record in records} == set(table_peers.TABLES)
    assert len(records) == 3 * len(tables.EPSILONS) * len(table_peers.TABLES) * len({r["seed"] for r in records})


def test_texts_reach_their_goals() -> None:
    means = json.loads((RESULTS / "package-texts.json").read_text())["name"]["mean_accuracy"]
    assert means["1.0"] >= 0.82
    assert means["0.3"] >= 0.78


def test_the_page_on_class_weights_follows_from_its_records() -> None:
    records = json.loads((RESULTS / "class-weights.json").read_text())
    assert table_class_weights.page(records) == (RESULTS / "class-weights.md").read_text()
    assert {record["table"] for record in records} == set(table_peers.OTHERS)
    assert not set(table_peers.OTHERS) & set(table_peers.TABLES)


def test_tables_are_learnt_best_in_the_mean() -> None:
    records = json.loads((RESULTS / "tables.json").read_text())
    for epsilon in tables.EPSILONS:
        mean = {
            who: statistics.mean(r["accuracy"] for r in records if r["who"] == who and r["epsilon"] == epsilon)
            for who in {r["who"] for r in records}
        }
        assert max(mean, key=mean.__getitem__) == tables.OURS


def test_private_learners_of_others_do_not_learn_the_same_at_every_epsilon() -> None:
    """As they do where their noise is lost: the figures would be those of an ordinary model."""
    records = [r for r in json.loads((RESULTS / "tables.json").read_text()) if r["who"].startswith("diffprivlib")]
    for table in table_peers.TABLES:
        areas = {r["epsilon"]: r["auc"] for r in records if r["table"] == table and r["seed"] == 0}
        assert len(set(areas.values())) == len(tables.EPSILONS)
