"""The worked example: epsilons that were computed elsewhere, and verdicts that follow from the records."""

import copy
import json
import math

import pytest
from adadp_lab.paper import accounting_example as example
from adadp_lab.paper.item import Options

from adadp.accounting import theorem1


@pytest.fixture(scope="module")
def records():
    return [
        json.loads(json.dumps({"settings": dict(job.settings), "seed": 0, **job.work(job.settings, 0, None)}))
        for job in example.ITEM.jobs(Options(quick=True))
    ]


def test_known_epsilons(records):
    first, second = records
    known = {"theorem1": (6.92, 0.482), "classic": (4.015, 0.260), "rdp": (3.449, 0.179), "pld": (3.064, 0.157)}
    for name, values in known.items():
        for record, value in zip((first, second), values, strict=True):
            assert example.at(record, name)[0] == pytest.approx(value, abs=0.006)
    assert example.at(first, "theorem1")[1] == 4
    assert example.at(first, "classic")[1] == 6


def test_misprinted_lemma_by_its_formula():
    """At order 2 the whole bound is the second term."""
    for sigma in (0.9, 8.0):
        inverse = 1 / sigma**2
        term = 1e-4 * min(4 * math.exp(inverse - 1), 2 * math.exp(inverse))
        assert example.misprinted(0.01, sigma, 2) == pytest.approx(math.log1p(term), rel=1e-9)
    assert example.misprinted(0.01, 0.9, 60) == theorem1.renyi_divergence(0.01, 0.9, 60)


def test_order_of_the_bounds(records):
    for record in records:
        epsilons = [example.at(record, name)[0] for name in ("pld", "rdp", "classic", "theorem1")]
        assert epsilons == sorted(epsilons)


def test_verdicts_follow_the_records(records):
    def words(these):
        return {f.claim: {reading: word for reading, (word, _) in f.readings.items()} for f in
                example.ITEM.report(these).findings}  # fmt: skip

    found = words(records)
    assert found["example-epsilon"] == {"as printed": "does not hold", "sound": "holds"}
    assert found["example-order"] == {"as printed": "does not hold"}
    assert found["subsampling-lemma"] == found["gaussian-lemma"] == {"as printed": "does not hold"}
    assert found["theorem-1"] == {"as printed": "holds"}
    altered = copy.deepcopy(records)
    altered[0]["ways"]["theorem1"] = [[4.01, 6]]
    altered[0]["ways"]["pld"] = [[4.2, None]]
    found = words(altered)
    assert found["example-epsilon"] == {"as printed": "holds", "sound": "does not hold"}
    assert found["example-order"] == {"as printed": "holds"}
    assert found["theorem-1"] == {"as printed": "does not hold"}
