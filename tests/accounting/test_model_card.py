"""The part of a model card on privacy: once in a card, with its conditions, and unmistakable where there is none."""

from pathlib import Path

import pytest

from adadp.accounting.events import PoissonGaussian, Uncovered
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.accounting.model_card import front_matter, privacy_section, write_into

STEP = PoissonGaussian(2.0, 0.01)


def guarantee(steps: int) -> Guarantee:
    return make_guarantee([(STEP, steps)], 1e-5, assumptions=["rows are\n---\napart"], notes=["a note"])


def test_a_card_holds_the_last_guarantee_once_and_all_else_stays(tmp_path: Path) -> None:
    write_into(tmp_path, guarantee(10))
    path = tmp_path / "README.md"
    assert path.read_text().startswith("---\ntags:\n- differential-privacy\n---\n")
    path.write_text(path.read_text().replace("---\n\n", "---\n\n# Mine\n\n", 1) + "\nMore of mine\n")
    write_into(tmp_path, guarantee(500))
    text = path.read_text()
    assert text.count("## Privacy") == 1
    assert guarantee(500).sentence() in text
    assert guarantee(10).sentence() not in text
    assert "# Mine" in text
    assert "More of mine" in text
    assert "- rows are --- apart" in text


def test_the_epsilon_of_the_run_stands_beside_that_of_the_data() -> None:
    text = privacy_section(guarantee(500), guarantee(10))
    assert text.index(guarantee(500).sentence()) < text.index("This run alone")
    assert "This run alone" not in privacy_section(guarantee(500))


def test_a_model_without_a_guarantee_says_so_before_anything_else() -> None:
    none = make_guarantee([(Uncovered("raw shapes", STEP), 5)], 1e-5)
    text = privacy_section(none, guarantee(10))
    assert text.index("This model has no privacy guarantee") < text.index("Guarantee: none")
    assert "do not publish" in text
    assert "This run alone" not in text


def test_front_matter_is_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="reading front matter takes a reader of YAML")
    text = front_matter({"library_name": "pytorch", "tags": ["a", "b"]})
    assert yaml.safe_load(text.strip().strip("-")) == {"library_name": "pytorch", "tags": ["a", "b"]}
