"""White box, black box, one run, real data: each attack finds what it is meant to find, and says what it costs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adadp import Ellipsoid, Flat, Kronecker, Raw, Released, algorithms, audit
from adadp.accounting.ledger import Ledger
from adadp.algorithms.search import SearchStep
from adadp.audit import Examples, ExampleThreat, GradientThreat, PreprocessingThreat, Setting, report
from adadp.audit.attack import Transcript
from adadp.errors import ConfigurationError
from adadp.preprocessing import pca
from adadp.randomness import Randomness
from adadp.sampling.schemes import Poisson
from adadp.shapes import Source
from audit.planted import ClippedAfterAveraging, EllipsoidCalledSound, HalfTheNoise
from audit.sound import make

SETTING = Setting(steps=4)


class Whisper(Flat):
    """A tenth of the noise."""

    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        return super().stddev(noise_multiplier / 10)


@pytest.mark.parametrize("threat", [pytest.param("white-box", marks=pytest.mark.slow), "black-box"])
def test_example_canaries_find_little_noise_and_leave_enough_noise_alone(threat: str) -> None:
    broken = audit.for_clipping(lambda task: Whisper(1.0), epsilon=2.0, setting=SETTING)
    found = audit.audit(broken, threat=threat, trials=180, seed=1)
    assert found.verdict == "violated"
    sound = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=SETTING)
    found = audit.audit(sound, threat=threat, trials=180, seed=1, confidence=0.99)
    assert found.verdict == "consistent"


@pytest.mark.parametrize("reading", ["lot", pytest.param("example", marks=pytest.mark.slow)])
def test_published_readings_do_not_keep_what_they_claim(reading: str) -> None:
    target = audit.for_algorithm("adadp", reading=reading, epsilon=0.5, setting=SETTING)
    found = audit.audit(target, trials=210, seed=1)
    assert found.promise.guaranteed is None
    assert found.promise.claimed == pytest.approx(0.5, rel=0.01)
    assert found.verdict == "violated"
    assert found.epsilon_lower > 2.5  # with so few trials hardly more can be shown


@pytest.mark.slow
def test_dpopt_as_published_is_contradicted_too() -> None:
    target = audit.for_algorithm("dpopt", reading="published", epsilon=0.5, setting=SETTING)
    assert audit.audit(target, trials=210, seed=1).verdict == "violated"


def test_the_auditor_is_kept_from_what_raw_gradients_made() -> None:
    # The same transcript whatever the box's secret state is: it is read off releases alone.
    target = audit.for_algorithm("adadp", reading="example", epsilon=0.5, setting=SETTING)
    transcript = GradientThreat(target).trial("flipping", inside=False, seed=3)
    assert transcript.scores["likelihood"] == 0  # no likelihood without knowing bounds and noise


@pytest.mark.slow
def test_a_shape_that_leaks_is_found() -> None:
    def shaped(source: Source, kind: type[Ellipsoid] = Ellipsoid) -> Ellipsoid:
        return kind(1.0, shape=Kronecker(0.25, -0.25), source=source)

    leaking = audit.for_clipping(lambda task: shaped(Raw(), EllipsoidCalledSound), epsilon=2.0, setting=SETTING)
    threat = GradientThreat(leaking, names=("steering",))
    assert audit.audit(leaking, threat=threat, trials=150, seed=1).verdict == "violated"
    released = audit.for_clipping(lambda task: shaped(Released()), epsilon=2.0, setting=SETTING)
    threat = GradientThreat(released, names=("steering",))
    assert audit.audit(released, threat=threat, trials=150, seed=1, confidence=0.99).verdict == "consistent"


class FreeObjectives(SearchStep):
    """A line search whose objectives have a hundredth of their noise."""

    def _objective_information(self) -> float:
        return 1e4 * super()._objective_information()


def test_what_a_line_search_shows_besides_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = audit.for_algorithm("agd", epsilon=2.0, setting=SETTING)
    names = ("flipping", "opposed")
    assert audit.audit(target, canaries=names, trials=150, seed=2, confidence=0.99).verdict == "consistent"
    monkeypatch.setattr(algorithms.agd, "SearchStep", FreeObjectives)
    assert audit.audit(target, canaries=names, trials=150, seed=2).verdict == "violated"


def test_pca_with_rows_that_are_not_bounded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    threat = PreprocessingThreat.for_epsilon("dp-pca", 2.0, 1e-5)
    monkeypatch.setattr(pca, "unit_rows", lambda rows: torch.as_tensor(rows * 3.0).nan_to_num(0.0).numpy())
    assert audit.audit_preprocessing(threat, 1e-5, trials=400, seed=1).verdict == "violated"


def test_the_same_seed_is_the_same_trial() -> None:
    # Probes look at the model and real examples depend on it, so its start must not come from the process's own state.
    target = make("adadp", "whole lots", 2.0)
    others = Examples(torch.rand(15, 4), torch.arange(15) % 3, 3)
    for threat in (GradientThreat(target), GradientThreat.among(target, others)):
        one, other = (threat.trial("flipping", inside=False, seed=5) for _ in range(2))
        assert one == other


@pytest.mark.parametrize("inside", [True, False])
def test_among_real_examples_a_score_is_noise_and_the_canarys_coin_and_nothing_else(inside: bool) -> None:
    # Others have nothing at the canary's coordinate, so what is seen follows from the sampler's draws and the noise.
    inputs = torch.rand(39, 6, generator=torch.Generator().manual_seed(1))
    inputs[:, 0] = 0
    target = audit.for_algorithm("dpsgd", epsilon=2.0, setting=Setting(examples=40, lot=8, steps=4))
    threat = GradientThreat.among(target, Examples(inputs, torch.arange(39) % 3, 3))
    sigma, rate = target.setting.noise_multiplier, target.setting.rate
    for seed in range(10):
        draws, expected = Randomness(seed).spawn("run 0"), 0.0
        for lot in range(4):
            hit = 0 in Poisson(40, 8).draw(lot, draws) and inside
            draws.begin_lot(lot)
            noise = float(draws.normal(torch.zeros(3, 6))[0, 0]) * (-1) ** lot
            expected += math.log1p(rate * math.expm1((noise + hit / sigma) / sigma - 1 / (2 * sigma**2)))
        assert threat.trial("flipping", inside, seed).scores["likelihood"] == pytest.approx(expected, abs=1e-4)


def test_a_real_dataset_without_a_ledger_is_told_that_nothing_remembers(tmp_path: Path) -> None:
    others = Examples(torch.rand(15, 4), torch.arange(15) % 3, 3)
    target = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=Setting(steps=1))
    found = audit.audit(target, others=others, canaries=("flipping",), trials=60, seed=1)
    assert "no ledger was given, so nothing remembers it" in found.privacy


class Undefined(GradientThreat):
    """A run with the canary breaks down: everything that is seen of it is NaN."""

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        found = super().trial(canary, inside, seed)
        if not inside:
            return found
        return Transcript(dict.fromkeys(found.scores, math.nan), (math.nan,) * len(found.seen))


def test_a_run_that_breaks_down_gives_the_canary_away_and_can_be_drawn(tmp_path: Path) -> None:
    target = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=Setting(steps=1))
    found = audit.audit(target, threat=Undefined(target, names=("flipping",)), trials=200, seed=1)
    assert found.verdict == "violated"
    assert (report.write(tmp_path, found) / "audit.png").exists()


def test_one_run_finds_a_broken_mechanism_and_bounds_a_sound_one() -> None:
    setting = Setting(examples=120, lot=120, steps=4)
    sound = audit.for_clipping(lambda task: Flat(1.0), epsilon=3.0, setting=setting)
    found = audit.audit_one_run(sound, seed=1)
    assert found.verdict == "consistent"
    assert 0.3 < found.epsilon_lower < 3
    broken = audit.for_clipping(lambda task: Whisper(1.0), epsilon=0.5, setting=setting)
    found = audit.audit_one_run(broken, seed=1)
    assert found.verdict == "violated"
    assert found.epsilon_lower > 1
    with pytest.raises(ConfigurationError, match="at least 20 canaries"):
        audit.audit_one_run(replace(sound, setting=SETTING))
    with pytest.raises(ConfigurationError, match="120 canaries are too few to contradict"):
        audit.audit_one_run(sound, confidence=0.999)
    fixed = audit.for_clipping(lambda task: Flat(1.0), setting=setting, sampling="fixed")
    with pytest.raises(ConfigurationError, match="leaves examples out"):
        audit.audit_one_run(fixed)


def test_a_real_dataset_is_charged_for_every_trial_before_the_first(tmp_path: Path) -> None:
    others = Examples(torch.rand(15, 1, 4, 4), torch.arange(15) % 3, 3)
    target = audit.for_clipping(lambda task: Flat(1.0), epsilon=2.0, setting=SETTING)
    ledger = Ledger(tmp_path / "spent.jsonl", dataset="patients")
    found = audit.audit(target, others=others, trials=120, seed=1, ledger=ledger)
    assert found.verdict == "consistent"
    charged = dict(Ledger(tmp_path / "spent.jsonl", dataset="patients").composition())
    assert list(charged.values()) == [4 * (120 + 120)]  # a second set may follow: the worst case is charged
    assert "patients" in found.privacy
    assert "charged" in found.privacy
    broken = audit.for_clipping(lambda task: ClippedAfterAveraging(1.0), epsilon=2.0, setting=SETTING)
    assert audit.audit(broken, others=others, trials=120, seed=1).verdict == "violated"


# ---- bad input ----------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_the_reason() -> None:
    target = audit.for_clipping(lambda task: HalfTheNoise(1.0), epsilon=2.0, setting=SETTING)
    with pytest.raises(ConfigurationError, match=r"30 trials are too few.*at least 201"):
        audit.audit(target, trials=30)
    with pytest.raises(ConfigurationError, match="confidence must be above"):
        audit.audit(target, trials=500, confidence=1.0)
    with pytest.raises(ConfigurationError, match="sgd is not private"):
        audit.for_algorithm("sgd", epsilon=1.0)
    with pytest.raises(ConfigurationError, match="threat must be one of"):
        audit.audit(target, threat="telepathy")
    others = Examples.synthetic(15)
    with pytest.raises(ConfigurationError, match=r"canary 'odd' does not fit the model: it has shape \(3,\)"):
        ExampleThreat(target, True, others, {"odd": (torch.zeros(3), 0)})
    with pytest.raises(ConfigurationError, match="its label 9 is not one of"):
        ExampleThreat(target, True, others, {"odd": (torch.zeros(8), 9)})
    with pytest.raises(ConfigurationError, match="do not fit a model of one layer"):
        GradientThreat(target, ((3, 3),))
    with pytest.raises(ConfigurationError, match="14 other examples where the setting says 15"):
        audit.audit(target, others=Examples.synthetic(14), trials=400)
    with pytest.raises(ConfigurationError, match="lot must be in"):
        Setting(examples=4, lot=5)
