"""Each bug, planted in the real engine, is caught by the audit or by the soundness test that is meant for it."""

from __future__ import annotations

import pytest

from audit import planted
from audit.planted import BY_SOUNDNESS, PLANTED, hunt, lots_are_poisson, pieces_are_the_lot

#: Those that need many trials, or many steps a trial. The others are of the same kinds: noise, bounds, lots, shapes.
MINUTES = (
    "noise 2x too small",
    "realised lot size as the denominator",
    "a missing sqrt(m)",
    "noise reused between steps",
    "the same seed for every step",
)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.slow] if bug in MINUTES else []) for bug in PLANTED]
)
def test_planted_bugs_are_caught(bug: str) -> None:
    if bug in BY_SOUNDNESS:
        target = PLANTED[bug]()
        found = {"the sampler's test": lots_are_poisson, "the equality test": pieces_are_the_lot}
        assert not found.pop(BY_SOUNDNESS[bug])(target)
        assert all(holds(target) for holds in found.values())  # and by nothing else: each test means something
        return
    # With half the noise the best attack errs in 31% of trials where 40% is promised. A second set of 500 confirms that
    # at 99.9% in 9 of 10 audits only (the others are suspicious); 1,000, the default, in 999 of 1,000.
    subtle = dict.fromkeys(("noise 2x too small", "realised lot size as the denominator", "a missing sqrt(m)"), 1000)
    caught = hunt(bug, trials=subtle.get(bug, 210), seed=3)
    assert caught.verdict == "violated"
    assert caught.epsilon_lower > caught.guaranteed_epsilon


def test_where_nothing_is_planted_nothing_is_caught() -> None:
    target = planted._flat()
    assert lots_are_poisson(target)
    assert pieces_are_the_lot(target)
    assert planted.audit.audit(target, trials=210, seed=3).verdict == "consistent"
