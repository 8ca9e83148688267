"""The toy items: exact cosines, verdicts that follow from the records, figures that can be drawn again."""

import copy
import json
import math

import numpy as np
import pytest
from adadp_lab.paper import beale, comparison, cosine, functions
from adadp_lab.paper.item import Options
from adadp_lab.report.figures import save


def run(item, options):
    """The records of an item, as they are read back."""
    found = [
        {"settings": dict(job.settings), "seed": job.seed, **job.work(job.settings, job.seed, None)}
        for job in item.jobs(options)
    ]
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def cosines():
    return run(cosine.ITEM, Options(seeds=2))


@pytest.fixture(scope="module")
def walks():
    return run(beale.ITEM, Options(seeds=1, quick=True))


def test_directions_have_a_density():
    angles = np.linspace(0, 2 * math.pi, 20_001)[:-1]
    for gradient, sigma in (((10.0, 5.0), (17.0, 8.5)), ((10.0, 5.0), (0.5, 3.0)), ((0.0, 0.0), (1.0, 1.0))):
        assert cosine.angle_density(angles, gradient, sigma).mean() * 2 * math.pi == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("shape", cosine.SHAPES)
@pytest.mark.parametrize("statistic", ["mean", "median", "absolute"])
def test_quadrature_agrees_with_draws(shape, statistic):
    sigma, _ = cosine.SHAPES[shape]
    draws = cosine.drawn(cosine.GRADIENT, sigma, 200_000, seed=3)
    drawn = {"mean": draws.mean(), "median": np.median(draws), "absolute": np.abs(draws).mean()}[statistic]
    assert cosine.expected(cosine.GRADIENT, sigma, statistic) == pytest.approx(drawn, abs=0.008)


def test_cosines_that_are_known():
    assert cosine.expected((1.0, 0.0), (1e-3, 1e-3)) == pytest.approx(1 - 0.5e-6, abs=1e-9)
    assert cosine.expected((1e-9, 0.0), (1.0, 1.0)) == pytest.approx(0, abs=1e-8)


def test_no_split_costs_more_than_lemma_1_allows():
    for share in (0.1, 0.5, 0.9):
        assert cosine.lemma(cosine.noise_of(share)) == pytest.approx(1)
    assert cosine.noise_of(0.5) == pytest.approx((math.sqrt(2) * 12, math.sqrt(2) * 6))


def test_the_printed_cosines_are_not_there(cosines):
    findings = {finding.claim: finding.readings["as printed"] for finding in cosine.ITEM.report(cosines).findings}
    assert [findings[f"cosine-{shape}"][0] for shape in cosine.SHAPES] == ["does not hold"] * 3
    assert findings["cosine-order"][0] == "does not hold"
    assert findings["lemma-1-example"][0] == "holds"


def test_verdicts_on_cosines_follow_the_records(cosines):
    """Records that say what the paper prints would make its claims hold."""
    altered = copy.deepcopy(cosines)
    exact = next(record for record in altered if "readings" in record)
    exact["readings"]["mean"] = {shape: printed for shape, (_, printed) in cosine.SHAPES.items()}
    exact["lemma"]["equal"] = 1.2
    report = cosine.ITEM.report(altered)
    findings = {finding.claim: finding.readings["as printed"][0] for finding in report.findings}
    assert [findings[f"cosine-{shape}"] for shape in cosine.SHAPES] == ["holds"] * 3
    assert findings["cosine-order"] == "holds"
    assert findings["lemma-1-example"] == "does not hold"
    assert "| the mean cosine, as the text says | 0.520 | 0.360 | 0.280 | yes | yes |" in report.text


def test_beale_has_every_form(walks):
    compared = [record["comparison"] for record in walks if "comparison" in record]
    assert len(compared) == 2  # the function, and as it is misprinted
    for found in compared:
        assert set(found) == {"dpsgd", "adal", "adan", "adadp", "adadp-released"}
    report = beale.ITEM.report(walks)
    assert set(report.figures) == {"toy-beale", "toy-beale-settings"}
    for needed in ("last exponent 3", "neither noised nor clipped", "released shape", "the other way round"):
        assert needed in report.text


def test_distances_of_another_seed_agree(walks):
    again = run(beale.ITEM, Options(seeds=2, quick=True))
    first, second = ([r for r in again if r["settings"].get("surface") == "beale" and r["seed"] == s] for s in (0, 1))
    for name in ("dpsgd", "adadp", "adadp-released"):
        for index in range(len(beale.SIGMAS)):
            (one, error), (other, _) = (comparison.pooled(part, name, index) for part in (first, second))
            assert one != other
            assert abs(one - other) < 6 * math.sqrt(2) * error
    assert first[0]["comparison"] == next(r for r in walks if r["settings"].get("surface") == "beale")["comparison"]


def test_verdicts_on_beale_follow_the_records(walks):
    altered = copy.deepcopy(walks)
    for record in altered:
        for entry in record.get("comparison", {}).get("adadp", ()):
            entry["distance"]["mean"] = 1e-4
    for records, word in ((walks, "does not hold"), (altered, "holds")):
        findings = {finding.claim: finding.readings for finding in beale.ITEM.report(records).findings}
        assert findings["beale-closer"]["as printed"][0] == word
        assert findings["beale-noise"]["as printed"][0] == word
        assert findings["beale-dpsgd"]["as printed"][0] == "cannot be known"
        assert findings["beale-closer"]["sound"][0] == "does not hold"


def test_the_survey_finds_the_nearest_pair():
    settings = {"starts": [[0, 0]], "sigmas": [1.0, 2.0], "bounds": [4.0], "rates": [0.1, 0.2]}
    found = {"dpsgd": [0.3, 0.9, 0.1, 0.5], "adadp": [0.05, 0.2, 0.21, 0.9]}
    assert beale.nearest(settings, found, 0.9, 0.21) == (
        0.9, 0.2, {"start": [0, 0], "sigma": 1.0, "bound": 4.0, "rates": [0.2, 0.2]},
    )  # fmt: skip


def test_functions_are_counted():
    def record(place, dpsgd, adadp, released):
        names = zip(functions.NAMES, (dpsgd, adadp, released), strict=True)
        entry = {"rate": 0.1, "gap": 0.0, "paths": [[[0.1, 0.2]]], "twin": [[[0.1, 0.2]]]}
        found = {n: [{**entry, "distance": {"mean": d, "spread": 0.1}}] * len(functions.SIGMAS) for n, d in names}
        return {"settings": {"surface": place, "walks": 10, "shown": functions.SHOWN}, "comparison": found}

    both = [record("beale", 1.0, 0.2, 2.0), record("booth", 1.0, 0.3, 0.5)]
    readings = functions.ITEM.report(both).findings[0].readings
    assert readings["as printed"][0] == "holds"
    assert readings["sound"][0] == "does not hold"
    assert "closer on 1 of 2" in readings["sound"][1]


def test_figures_are_the_same_when_drawn_again(tmp_path, cosines, walks):
    for item, records in ((cosine.ITEM, cosines), (beale.ITEM, walks)):
        for turn in ("first", "second"):
            for name, figure in item.report(records).figures.items():
                save(figure, tmp_path / turn, name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name
