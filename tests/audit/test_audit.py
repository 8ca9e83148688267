"""The audit as a whole: it finds what is wrong, and does not find what is not there."""

from __future__ import annotations

from adadp import Flat, audit
from adadp.audit import Setting

SETTING = Setting(steps=4)


class HalfTheNoise(Flat):
    def stddev(self, noise_multiplier: float) -> dict[str, object]:
        return super().stddev(noise_multiplier / 2)


def test_noise_that_is_twice_too_small_is_found_and_right_noise_is_not() -> None:
    sound = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=SETTING)
    found = audit.audit(sound, trials=500, seed=1)
    assert found.verdict == "consistent"
    assert found.epsilon_lower <= found.promise.epsilon

    broken = audit.for_clipping(lambda task: HalfTheNoise(1.0), epsilon=2.0, setting=SETTING)
    found = audit.audit(broken, trials=500, seed=1)
    assert found.verdict == "violated"
    assert found.epsilon_lower > found.promise.guaranteed > 1.9
