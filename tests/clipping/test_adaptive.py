"""Adaptive clipping: the bound finds the quantile, from noised counts alone, and count and gradient are one event."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loop import epoch, mlp, private
from soundness.stand import distance
from testing.loops import rows, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Adaptive, PrivacyEngine, TrainingStep
from adadp.accounting.events import PoissonGaussian
from adadp.errors import ConfigurationError
from adadp.gradients import Gradients
from adadp.gradients.forms.dense import Dense
from adadp.mechanism.kept_state import KeptState
from adadp.mechanism.observation import Unnoised
from adadp.mechanism.sums import BoundedSums
from adadp.testing import influence

COUNT = "shape/weight/unclipped"
SIGMA = 0.7


class Nowhere:
    expected_lot = 4.0


def begun(clipping: Adaptive) -> Adaptive:
    clipping.begin({"weight": torch.zeros(2, dtype=torch.float64)}, Nowhere())
    return clipping


def gradients(*norms: float, keep: list[bool] | None = None) -> Gradients:
    values = torch.tensor([[0.6 * norm, 0.8 * norm] for norm in norms], dtype=torch.float64)
    return Gradients({"weight": Dense(values)}, len(norms), keep=torch.tensor(keep or [True] * len(norms)))


# ---- what is released --------------------------------------------------------------------------------------------


def test_an_example_counts_a_half_up_or_down() -> None:
    clipping = begun(Adaptive(1.0))
    for norm, counted in {0.0: 0.5, 0.9: 0.5, 1.1: -0.5, 1e100: -0.5, math.inf: 0.0, math.nan: 0.0}.items():
        assert float(clipping.bound(gradients(norm))[COUNT]) == counted, norm
    assert float(clipping.bound(gradients(0.1, 0.2, 3.0, 0.3, keep=[True, True, True, False]))[COUNT]) == 0.5


def farthest(clipping: Adaptive) -> float:
    """How far one example moves gradient and count together, in standard deviations of their noise, times sigma."""
    begun(clipping)
    near = [1 - 2.0**-19, 1 - 1e-9, 1.0, 1 + 1e-9]
    norms = [0.0, 0.5, *near, 2.0, 1e9, 1e150, 1e300, math.nan, math.inf]
    stddev = clipping.stddev(SIGMA)
    return max(distance(clipping.bound(gradients(norm * clipping.max_grad_norm)), {}, stddev) * SIGMA for norm in norms)


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.5, 0.99])
def test_gradient_and_count_together_are_one_event(share: float) -> None:
    clipping = Adaptive(0.8, share=share)
    assert 1 - 1e-5 < farthest(clipping) <= 1 + 1e-9  # and the bound is reached: no noise is wasted
    stddev = clipping.stddev(SIGMA)
    sigma_gradient, sigma_count = stddev["weight"] / 0.8, stddev[COUNT]
    assert float(1 / sigma_gradient**2 + 1 / (2 * sigma_count) ** 2) == pytest.approx(1 / SIGMA**2)


class _OneOrNothing(Adaptive):
    """Counts 1 and 0 with the noise that is meant for +1/2 and -1/2."""

    def bound(self, gradients: Gradients) -> BoundedSums:
        sums = super().bound(gradients)
        sums[self._count] = sums[self._count] + 0.5
        return sums


class _AllForTheGradient(Adaptive):
    """Noises the gradient as if nothing else were released."""

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        return super().radii(scale) | {"weight": scale * self.max_grad_norm}


@pytest.mark.parametrize("bug", [_OneOrNothing, _AllForTheGradient])
def test_planted_bugs_are_found(bug: type[Adaptive]) -> None:
    assert farthest(bug(0.8, share=0.01)) > 1 + 1e-3


class _RawCount(Adaptive):
    """Moves the bound by the count as it was before its noise."""

    def complete(self, sums: BoundedSums) -> BoundedSums:
        self._raw = sums[self._count]
        return sums

    def release(self, noisy: Any, stddev: Any) -> Any:
        noisy[self._count] = self._raw
        return super().release(noisy, stddev)


@pytest.mark.parametrize("kind", [Adaptive, _RawCount])
def test_the_bound_follows_released_values_alone(kind: type[Adaptive]) -> None:
    """Two worlds that differ in one example are given the same releases: their bounds, and weights, stay the same."""
    train = trainer(bound=None, clipping=lambda: kind(1.0, rate=2.0))
    found = influence(train, rows(), examples="huge", among="own", lots=8)
    assert found.verdict == ("within" if kind is Adaptive else "exceeded"), found


class Seen:
    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def noising(self, release: Unnoised) -> None:
        (key,) = (key for key in release.sums if key.endswith("/unclipped"))
        self.before.append(release.sums[key].clone())

    def noised(self, release: Unnoised, noisy: dict[str, Tensor]) -> None:
        self.after.append(noisy[next(key for key in noisy if key.endswith("/unclipped"))].clone())

    def stepped(self, lot: int, gradient: dict[str, Tensor]) -> None:
        assert all(not key.startswith("shape/") for key in gradient)


def test_the_count_is_noised_and_moves_the_next_bound() -> None:
    clipping = Adaptive(0.5, quantile=0.3, rate=0.4, share=0.1)
    _, model, optimizer, loader = private(clipping=clipping, noise_multiplier=1.5)
    seen, bounds = Seen(), [0.5]
    optimizer.observe(seen)
    for _ in range(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
            assert clipping.max_grad_norm == bounds[-1]  # fixed within a lot
            optimizer.step()
            bounds.append(clipping.max_grad_norm)
    noise = torch.stack(seen.after) - torch.stack(seen.before)
    assert (noise != 0).all()
    assert float(noise.std()) == pytest.approx(1.5 / (2 * math.sqrt(0.1)), rel=0.4)
    for bound, following, count in zip(bounds, bounds[1:], seen.after, strict=False):
        part = 0.5 + float(count) / 6  # of the expected lot, whatever was drawn
        assert following == pytest.approx(bound * math.exp(-0.4 * (part - 0.3)))


# ---- what it is for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantile", "start"), [(0.3, 100.0), (0.5, 0.01), (0.8, 1.0)])
@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 60}])
def test_the_bound_finds_the_quantile(quantile: float, start: float, settings: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.exp(torch.randn(2000, 1, generator=generator))  # the norm of each gradient, and it stays so
    model = nn.Linear(1, 1, bias=False)
    clipping = Adaptive(start, quantile=quantile)
    engine = PrivacyEngine(seed=1)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), clipping=clipping, noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(inputs), batch_size=200), **settings,
    )  # fmt: skip
    bounds = []
    for _ in range(18):
        for (batch,) in loader:
            optimizer.zero_grad()
            optimizer.backward(model(batch).squeeze(1))
            optimizer.step()
            bounds += [clipping.max_grad_norm] if optimizer.stepped else []
    found = math.exp(sum(map(math.log, bounds[-60:])) / 60)
    assert found == pytest.approx(float(inputs.quantile(quantile)), rel=0.1)
    assert dict(engine._open().charged()) == {PoissonGaussian(1.0, 0.1): 180}  # one event a lot, at the sigma given


def test_the_bound_stays_within_its_limits() -> None:
    clipping = begun(Adaptive(1.0, rate=1e6, least=0.1, most=3.0))
    for count, bound in ((4.0, 0.1), (-4.0, 3.0), (-1e30, 3.0), (1e30, 0.1)):
        clipping.release({"weight": torch.zeros(2), COUNT: torch.tensor(count)}, {})
        assert clipping.max_grad_norm == pytest.approx(bound)


# ---- with the rest of the engine ----------------------------------------------------------------------------------


def test_nothing_waits_for_the_host_and_only_numbers_change() -> None:
    """So that a GPU can replay the step: what the clipping keeps changes in tensors of one shape, and in no float."""
    clipping = begun(Adaptive(1.0))
    assert clipping.steady()
    before = KeptState(clipping.objects())
    sums = clipping.bound(gradients(0.5, 2.0, 0.1))
    clipping.release(dict(sums), clipping.stddev(1.0))
    after = clipping.max_grad_norm
    before.follow(KeptState(clipping.objects()))
    before.restore()
    assert clipping.max_grad_norm == after != 1.0


def test_padded_lots_in_a_training_step_move_the_bound_alike() -> None:
    found = []
    for padded in (False, True):
        clipping = Adaptive(0.3)
        _, model, optimizer, loader = private(
            mlp(), PrivacyEngine(seed=5), clipping=clipping, noise_multiplier=1e-6, pad_lots=padded
        )
        step = TrainingStep(
            optimizer, lambda x, y, model=model: nn.functional.cross_entropy(model(x), y, reduction="none")
        )
        for inputs, targets in loader:
            step(inputs, targets)
        found.append(clipping.max_grad_norm)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] != 0.3


def test_the_same_seed_gives_the_same_bounds() -> None:
    found = []
    for _ in range(2):
        clipping = Adaptive(0.3)
        _, model, optimizer, loader = private(mlp(), PrivacyEngine(seed=7), clipping=clipping)
        epoch(model, optimizer, loader)
        found.append(clipping.max_grad_norm)
    assert found[0] == found[1] != 0.3


def test_frozen_parameters_and_none_at_all() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    _, model, optimizer, loader = private(model, clipping="adaptive", max_grad_norm=0.5)
    epoch(model, optimizer, loader)
    empty = Adaptive(1.0)
    empty.begin({}, Nowhere())
    assert empty.bound(gradients(1.0)) == empty.stddev(1.0) == empty.release({}, {}) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": 1e7}, "between least and most"),
        ({"quantile": 1.0}, "quantile"),
        ({"quantile": True}, "quantile"),
        ({"share": 0.0}, "share"),
        ({"share": math.nan}, "share"),
        ({"rate": -1.0}, "rate"),
        ({"least": 2.0, "most": 1.5}, "between least and most"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Adaptive(**settings)


def test_the_bound_is_not_set_during_training() -> None:
    clipping = Adaptive(1.0)
    clipping.max_grad_norm = 2.0  # nothing has begun
    begun(clipping)
    with pytest.raises(ConfigurationError, match="sets its bound itself"):
        clipping.max_grad_norm = 3.0
    assert clipping.max_grad_norm == 2.0
