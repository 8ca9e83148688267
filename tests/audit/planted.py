"""Bugs that are planted in the real engine, one at a time, and what finds each.

python tests/audit/planted.py        # writes results/audit/planted.json and planted.md
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, Flat, Local, PrivacyEngine, Released, audit
from adadp.audit import Setting, Target
from adadp.gradients import Gradients
from adadp.mechanism.step import PrivateStep
from adadp.randomness import Randomness
from adadp.sampling.lot import Lot, Microbatch
from adadp.sampling.schemes import Poisson, Sampling, Shuffle

# ---- the bugs -------------------------------------------------------------------------------------------------------


class HalfTheNoise(Flat):
    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        return super().stddev(noise_multiplier / 2)


class ClippedAfterAveraging(Flat):
    def bound(self, gradients: Gradients) -> dict[str, Tensor]:
        sums = self._sums(gradients, gradients.finite().double())
        length = torch.cat([value.flatten() for value in sums.values()]).norm() / gradients.count
        return {name: value * min(1.0, float(self.max_grad_norm / length)) for name, value in sums.items()}


class NoRootOfCoordinates(Local):
    def _gradient_radii(self, scale: float) -> dict[str, float | Tensor]:
        if not self.local:
            return super()._gradient_radii(scale)
        return {name: scale * bound for name, bound in self.bounds.items()}


class LocalCalledSound(Local):
    """The paper's clipping with its raw E', which says nothing of it."""

    reasons = ()


class EllipsoidCalledSound(Ellipsoid):
    """A shape from raw gradients that says nothing of it."""

    reasons = ()


class OneLayerForgotten(Flat):
    def weights(self, gradients: Gradients) -> Tensor:
        return super().weights(gradients.only(list(self.parameters)[1:]))


class Silence(Randomness):
    def normal(self, like: Tensor) -> Tensor:
        return torch.zeros_like(super().normal(like))


class EverySecondStep(PrivateStep):
    def release(self, lot: Lot) -> dict[str, Tensor]:
        noisy = self._randomness
        if lot.number % 2:
            self._randomness = Silence(0)
        try:
            return super().release(lot)
        finally:
            self._randomness = noisy


class _Repeating(Randomness):
    """Gives out what another one drew, twice."""

    def __init__(self, source: Randomness) -> None:
        super().__init__(0)
        self.source, self.kept, self.again = source, [], False

    def normal(self, like: Tensor) -> Tensor:
        if self.again:
            return self.kept.pop(0)
        self.kept.append(self.source.normal(like))
        return self.kept[-1].clone()


class NoiseUsedTwice(PrivateStep):
    def __init__(self, *args: Any, randomness: Randomness, **rest: Any) -> None:
        super().__init__(*args, randomness=_Repeating(randomness), **rest)

    def release(self, lot: Lot) -> dict[str, Tensor]:
        assert isinstance(self._randomness, _Repeating)
        self._randomness.again = bool(lot.number % 2)
        return super().release(lot)


class RealisedLot(PrivateStep):
    realised = 0

    def add(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        super().add(microbatch, keep)
        self.realised += microbatch.real

    def release(self, lot: Lot) -> dict[str, Tensor]:
        size, self.realised = max(1, self.realised), 0
        return {name: value * (self.expected_lot / size) for name, value in super().release(lot).items()}


class NoisedMicrobatches(PrivateStep):
    """Each microbatch gets noise of its own, and the lot's release is their average."""

    def _bounded(self, microbatch: Microbatch, keep: Tensor | None) -> dict[str, Tensor]:
        bounded = super()._bounded(microbatch, keep)
        stddev = self.clipping.stddev(self.noise_multiplier)
        return {name: value + stddev[name] * self._randomness.normal(value) for name, value in bounded.items()}

    def release(self, lot: Lot) -> dict[str, Tensor]:
        noisy = self._randomness
        lot.sums = {name: value / lot.added for name, value in lot.sums.items()}
        self._randomness = Silence(0)
        try:
            return super().release(lot)
        finally:
            self._randomness = noisy


class SameSeed(Randomness):
    """Starts again at every draw, whatever the lot."""

    def begin_lot(self, number: int, attempt: int = 0) -> None:
        super().begin_lot(0)

    def normal(self, like: Tensor) -> Tensor:
        self._generators.clear()
        return super().normal(like)


class EngineOfOneSeed(PrivacyEngine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._randomness = SameSeed(options.get("seed"))


class ShuffledCalledPoisson(Poisson):
    def draw(self, lot: int, randomness: Randomness) -> Tensor:
        return Shuffle(self.examples, self.lot).draw(lot, randomness)


class EngineThatShuffles(PrivacyEngine):
    def _sampling(self, *arguments: Any) -> Sampling:
        drawn = super()._sampling(*arguments)
        return ShuffledCalledPoisson(drawn.examples, drawn.lot)


# ---- what they are planted in ---------------------------------------------------------------------------------------

EPSILON = 2.0
SETTING = Setting(steps=4)
SAMPLED = Setting(examples=24, lot=4, steps=6)


def _flat(**options: Any) -> Target:
    return audit.for_clipping(lambda task: Flat(1.0), epsilon=EPSILON, setting=SETTING, **options)


def _clipping(make: Callable[[], Any]) -> Target:
    return audit.for_clipping(lambda task: make(), epsilon=EPSILON, setting=SETTING)


PLANTED: Mapping[str, Callable[[], Target]] = {
    "noise 2x too small": lambda: _clipping(lambda: HalfTheNoise(1.0)),
    "noise on every second step only": lambda: _flat(step_class=EverySecondStep),
    "noise reused between steps": lambda: _flat(step_class=NoiseUsedTwice),
    "clipping after averaging": lambda: _clipping(lambda: ClippedAfterAveraging(1.0)),
    "a missing sqrt(m)": lambda: _clipping(lambda: NoRootOfCoordinates(1.0, threshold=0.0, source=Released(decay=0.5))),
    "realised lot size as the denominator": lambda: _flat(step_class=RealisedLot),
    "shuffled batches accounted as Poisson": lambda: replace(
        audit.for_clipping(lambda task: Flat(1.0), epsilon=EPSILON, setting=SAMPLED), engine=EngineThatShuffles
    ),
    "E' from raw gradients": lambda: _clipping(lambda: LocalCalledSound(1.0, threshold=0.0)),
    "one layer left out of the clipping norm": lambda: _clipping(lambda: OneLayerForgotten(1.0)),
    "microbatches noised separately and averaged": lambda: _flat(
        step_class=NoisedMicrobatches, max_physical_batch_size=4
    ),
    "the same seed for every step": lambda: replace(_flat(), engine=EngineOfOneSeed),
}

#: Bugs that no attack on releases need find: what finds them is a property of the engine.
BY_SOUNDNESS = {
    "shuffled batches accounted as Poisson": "the sampler's test",
    "microbatches noised separately and averaged": "the equality test",
}

# ---- the soundness tests --------------------------------------------------------------------------------------------


def lots_are_poisson(target: Target, epochs: int = 400) -> bool:
    """Whether an example is in as many lots of an epoch as independent coins would put it, not once in each."""
    setting = target.setting
    engine = target.engine(seed=5)
    sampling = engine._sampling(DataLoader(TensorDataset(torch.zeros(setting.examples)), setting.lot), "poisson", None)
    lots = len(sampling)
    held = [bool((sampling.draw(lot, engine._randomness) == 0).any()) for lot in range(epochs * lots)]
    once = sum(sum(held[start : start + lots]) == 1 for start in range(0, len(held), lots))
    return bool(stats.binomtest(once, epochs, stats.binom.pmf(1, lots, setting.rate)).pvalue > 1e-6)


def pieces_are_the_lot(target: Target) -> bool:
    """Whether a lot in microbatches releases what the lot in one piece does, with the same seed."""
    released = []
    for physical in (None, 4):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        examples = TensorDataset(torch.randn(target.setting.examples, 3, generator=torch.Generator().manual_seed(1)))
        options = {**target.options, "max_physical_batch_size": physical}
        started = replace(target, options=options).started(model, examples, lambda count, generator: torch.zeros(0), 3)
        for _, (inputs,) in started.lots(1):
            model(inputs).square().sum(1).mean().backward()
            started.optimizer.step()
        released.append(model.weight.grad)
    return torch.allclose(*released, rtol=1e-4, atol=1e-6)


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caught:
    bug: str
    by: str
    epsilon_lower: float
    epsilon_lower_any_mechanism: float
    epsilon_lower_confirmed: float | None  # by the second set, at 99.9%; None where none was made
    guaranteed_epsilon: float
    verdict: str
    canary: str
    statistic: str


def hunt(bug: str, trials: int = 600, seed: int = 1) -> Caught:
    """Audit the engine with a bug in it, and ask the soundness test that is meant for it."""
    target = PLANTED[bug]()
    found = audit.audit(target, trials=trials, seed=seed)
    by = []
    if found.violated:
        by.append("the audit")
    if not lots_are_poisson(target):
        by.append("the sampler's test")
    if not pieces_are_the_lot(target):
        by.append("the equality test")
    guaranteed = found.promise.guaranteed
    assert guaranteed is not None, f"{bug}: a planted bug must go on claiming that it is private"
    return Caught(
        bug, " and ".join(by) or "nothing", found.epsilon_lower,
        found.finding.errors.epsilon(SETTING.delta),
        None if found.confirmation is None else found.confirmation["epsilon_lower"], guaranteed, found.verdict,
        found.finding.attack.canary, found.finding.attack.statistic,
    )  # fmt: skip


def table(rows: list[Caught], trials: int) -> str:
    lines = [
        f"Bugs planted in the engine, which goes on promising epsilon = {EPSILON:g} at delta = {SETTING.delta:g}, and "
        f"what found each. {trials} trials, confidence 95%; then as many fresh ones at 99.9%, which have to confirm "
        "what the audit caught. The first bound takes releases for the plain Gaussians that they are said to be, as "
        "the last does; "
        "the second takes nothing for granted.",
        "",
        "| bug | caught by | epsilon, at least | whatever the mechanism | confirmed at 99.9% | canary | statistic |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        confirmed = "" if row.epsilon_lower_confirmed is None else f"{row.epsilon_lower_confirmed:.2f}"
        bounds = f"{row.epsilon_lower:.2f} | {row.epsilon_lower_any_mechanism:.2f} | {confirmed}"
        lines.append(f"| {row.bug} | {row.by} | {bounds} | {row.canary} | {row.statistic} |")
    return "\n".join(lines) + "\n"


def main(folder: Path = Path("results/audit"), trials: int = 1000) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for bug in PLANTED:
        rows.append(hunt(bug, trials))
        print(rows[-1], file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    found = [vars(row) for row in rows]
    values = {"command": "python tests/audit/planted.py", "trials": trials, "seed": 1, "bugs": found}
    (folder / "planted.json").write_text(json.dumps(values, indent=2) + "\n")
    (folder / "planted.md").write_text(table(rows, trials))


if __name__ == "__main__":
    main()
