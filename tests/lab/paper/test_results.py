"""What is committed: drawn from its records, no claim without an answer, and the beginning of it comes out again."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path

import pytest
from adadp_lab import paper as reproduce
from adadp_lab.paper import agreement, render
from adadp_lab.paper.claims import CLAIMS
from adadp_lab.paper.claims_page import collect
from adadp_lab.paper.item import Options
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.runner import run
from matplotlib.image import imread, imsave

ROOT = Path(__file__).parents[3]
RESULTS = Records(ROOT / "results" / "reproduce")
DATA = os.environ.get("ADADP_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="ADADP_DATA is not set: no real MNIST to train on")


@pytest.fixture(scope="module")
def reports():
    return {name: item.report(RESULTS.of(item)) for name, item in reproduce.load().items() if RESULTS.of(item)}


def test_every_item_has_results():
    assert [name for name, item in reproduce.load().items() if not RESULTS.of(item)] == []


def test_every_claim_has_an_answer_and_every_answer_a_claim(reports):
    findings = [finding for report in reports.values() for finding in report.findings]
    known = {claim.name for claim in CLAIMS}
    assert len(known) == len(CLAIMS)
    assert {finding.claim for finding in findings} <= known
    assert len({finding.claim for finding in findings}) == len(findings)
    answered = collect(findings)
    assert [claim.name for claim in CLAIMS if not answered.get(claim.name)] == []
    assert all(finding.readings for finding in answered.values())


def test_what_is_committed_is_what_the_records_give():
    assert render.check(reproduce.load(), RESULTS, ROOT / "CLAIMS.md") == []


def test_a_changed_number_is_found(tmp_path):
    item = reproduce.load()["accounting-example"]
    changed = Records(tmp_path)
    records = copy.deepcopy(RESULTS.of(item))
    changed.finish(item, records)
    render.render({item.name: item}, changed, tmp_path, tmp_path / "CLAIMS.md")
    assert render.check({item.name: item}, changed, tmp_path / "CLAIMS.md") == []
    page = tmp_path / "accounting-example.md"
    page.write_text(page.read_text().replace("6.92", "6.93"))
    drawn = tmp_path / "accounting-example.svg"
    drawn.write_text(drawn.read_text().replace('d="M ', 'd="M 9', 1))
    painted = tmp_path / "accounting-example.png"
    imsave(painted, 1 - imread(painted)[..., :3])
    (tmp_path / "stray.md").write_text("")
    found = render.check({item.name: item}, changed, tmp_path / "CLAIMS.md")
    assert [Path(line.split()[0]).name for line in found] == [page.name, painted.name, drawn.name, "stray.md"]


def test_records_of_other_settings_are_found(tmp_path):
    item = reproduce.load()["accounting-example"]
    changed = Records(tmp_path)
    records = copy.deepcopy(RESULTS.of(item))
    records[0]["key"] = "0" * 20
    changed.finish(item, records)
    render.render({item.name: item}, changed, tmp_path, tmp_path / "CLAIMS.md")
    found = render.check({item.name: item}, changed, tmp_path / "CLAIMS.md")
    assert found == ["accounting-example: its records were made with other settings than today's"]


def test_drawings_are_compared_to_a_tenth_of_a_point():
    one = '<g id="a"><path d="M 1.02 2"/><image href="data:image/png;base64,AB"/></g>'
    assert render.same_drawing(one, one.replace("1.02", "1.07").replace("AB", "CD").replace('id="a"', 'id="b"'))
    assert not render.same_drawing(one, one.replace("1.02", "1.2"))
    assert not render.same_drawing(one, one.replace("M", "L"))
    red = '<path style="fill: #d55e00" clip-path="url(#a)"/>'
    assert render.same_drawing(red, red.replace("#a", "#b"))
    assert not render.same_drawing(red, red.replace("d55e00", "0072b2"))


def test_records_are_small_and_say_what_they_are():
    for path in sorted(RESULTS.folder.glob("*.json")):
        assert path.stat().st_size < 3_000_000, path
        for record in json.loads(path.read_text())["records"]:
            assert {"key", "work", "settings", "seed", "seconds", "device"} <= set(record)


# ---- the beginning again --------------------------------------------------------------------------------------------


def _again(tmp_path, names):
    items = [reproduce.load()[name] for name in names]
    assert run(items, Options(1, quick=True), tmp_path, data_dir=Path(DATA)).complete
    quick = Records(tmp_path)
    return [line for item in items for line in agreement.compare(quick.of(item), RESULTS.of(item))]


@needs_data
def test_a_quick_run_is_the_beginning_of_the_full_one(tmp_path):
    found = _again(tmp_path, ["fig-mnist-high"])
    assert len(found) >= 11  # nine contenders, and the cost at two steps
    assert [str(line) for line in found if not line.agrees] == []


@needs_data
@pytest.mark.slow
def test_all_quick_runs_on_mnist_are_the_beginning_of_the_full_ones(tmp_path):
    names = [name for name, item in reproduce.load().items() if item.datasets in ((), ("mnist",)) and name != "table2"]
    found = _again(tmp_path, names)
    assert len(found) >= 300
    assert sum(line.tolerance == agreement.POINTS for line in found) >= 30
    assert [str(line) for line in found if not line.agrees] == []


def test_what_does_not_agree_is_told():
    train = {"work": "train", "seed": 0, "settings": {"who": "dpsgd/paper", "steps": 100}, "curve": [[50, 0.5]]}
    full = [{**train, "seed": seed, "curve": [[50, 0.52 + 0.1 * seed], [100, 0.9]]} for seed in range(3)]
    quick = {**train, "settings": {**train["settings"], "stop": 50}}
    (line,) = agreement.compare([quick], full)
    assert line.agrees
    assert line.full == pytest.approx(52)
    (line,) = agreement.compare([{**quick, "curve": [[50, 0.48]]}], full)
    assert not line.agrees
    (line,) = agreement.compare([{**quick, "curve": [[50, 0.6], [100, 0.82]]}], full)
    assert line.agrees  # 0.08 above and 0.08 below
    assert agreement.compare([{**quick, "settings": {"who": "dpsgd/paper", "steps": 99}}], full) == []


def test_what_diverged_is_compared_up_to_there():
    train = {"work": "train", "seed": 0, "settings": {"who": "dpopt/published", "steps": 9}}

    def found(quick, full):
        curves = [[[step, value] for step, value in enumerate(curve)] for curve in (quick, full)]
        return agreement.compare(*([{**train, "curve": curve}] for curve in curves))

    (line,) = found([0.4, 0.5, 0.61, 0.9, 0.1], [0.4, 0.5, 0.6, 0.45, 0.8])
    assert (line.step, line.full, line.agrees) == (2, pytest.approx(50), True)
    (line,) = found([0.4, 0.4, 0.6, 0.45, 0.8], [0.4, 0.5, 0.6, 0.45, 0.8])
    assert not line.agrees
    (line,) = found([0.4, 0.5, 0.6, 0.51, 0.6], [0.4, 0.5, 0.6, 0.51, 0.8])  # swings by less
    assert (line.step, line.agrees) == (4, False)
    assert found([0.4, 0.3, 0.3], [0.5, 0.3, 0.2]) == []  # at once
    (line,) = found([0.4, 0.5], [0.4, 0.5])
    assert line.agrees


def test_figures_in_the_findings_are_those_of_the_results():
    """Every number with a decimal point on the page stands in a table, in CLAIMS.md, the audit or the features."""
    page = (ROOT / "docs" / "findings.md").read_text()
    audit = ROOT / "results" / "audit" / "adadp-lot" / "audit.md"
    features = ROOT / "results" / "features" / "features.md"
    pages = [*sorted(RESULTS.folder.glob("*.md")), ROOT / "CLAIMS.md", audit, features]
    made = "\n".join(path.read_text() for path in pages)
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", page))
    known = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", made))
    assert len(numbers) > 20
    assert sorted(numbers - known - {"0.052"}) == []  # a learning rate of the paper's
    for linked in re.findall(r"\]\((\.\./[^)]*)\)", page):
        assert (ROOT / "docs" / linked).exists(), linked
