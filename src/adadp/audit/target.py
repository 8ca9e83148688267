"""What is attacked: an algorithm with every number settled, run by the real engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.calibration import calibrate_noise
from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian
from adadp.accounting.ledger import Ledger
from adadp.algorithms import Algorithm, Task
from adadp.algorithms.dpsgd import DPSGD
from adadp.clipping import Clipping
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError, UntriedWarning
from adadp.mechanism.optimizer import BudgetWarning, PrivateOptimizer
from adadp.randomness import Randomness
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.schemes import Sampling, scheme
from adadp.shapes import InputMaker
from adadp.training.lot_loop import numbered_batches


def require_noise(noise_multiplier: float) -> None:
    """Refuse what is not private to begin with."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ConfigurationError(f"the noise multiplier must be a finite number above 0, not {noise_multiplier!r}")


@dataclass(frozen=True)
class Setting:
    """Numbers of a trial. `examples` counts the canary; `watched` steps of `steps` are run and attacked.

    Attacking fewer than are claimed for is fair: whoever sees all of them sees these.
    """

    examples: int = 16
    lot: int = 16
    steps: int = 8
    delta: float = 1e-5
    noise_multiplier: float = 1.0
    watched: int | None = None

    def __post_init__(self) -> None:
        if self.examples < 2:
            raise ConfigurationError(f"examples must be at least 2, the canary and another, not {self.examples!r}")
        if not 1 <= self.lot <= self.examples:
            raise ConfigurationError(f"lot must be in 1..{self.examples} (examples), not {self.lot!r}")
        if self.steps < 1 or not 1 <= self.attacked <= self.steps:
            raise ConfigurationError(f"steps must be at least 1 and watched in 1..{self.steps}, not {self.watched!r}")
        require_noise(self.noise_multiplier)

    @property
    def attacked(self) -> int:
        """How many steps a trial runs."""
        return self.steps if self.watched is None else self.watched

    @property
    def rate(self) -> float:
        """The chance that an example is in a lot."""
        return self.lot / self.examples


class Clipped(DPSGD):
    """DPSGD with a clipping of one's own; `make` gets the task."""

    def __init__(self, make: Callable[[Task], Clipping]) -> None:
        super().__init__(lr=0.1, momentum=0.0, schedule="constant")
        self._make = make

    def clipping(self, task: Task) -> Clipping:
        return self._make(task)


@dataclass(frozen=True)
class Target:
    """An algorithm, the numbers that it is run with, and how: `options` are those of `engine.make_private`.

    `algorithm` makes a new one for each trial, and `engine` (with a `seed`) its engine.
    """

    algorithm: Callable[[], Algorithm]
    setting: Setting
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Callable[..., PrivacyEngine] = PrivacyEngine

    @property
    def neighbours(self) -> Neighbours:
        """Which pairs of datasets the guarantee compares."""
        return scheme(self.options.get("sampling", "poisson")).neighbours

    def describe(self) -> dict[str, Any]:
        """Every number of a trial."""
        return {**asdict(self.setting), "options": {key: str(value) for key, value in self.options.items()}}

    def started(self, model: nn.Module, examples: TensorDataset, probes: InputMaker, seed: int | None) -> Started:
        """One trial's engine, ready for its first lot."""
        setting, algorithm = self.setting, self.algorithm()
        _require_private(algorithm)
        weights = sum(parameter.numel() for parameter in model.parameters())
        algorithm.settle(
            lot=setting.lot, steps=setting.steps, noise_multiplier=setting.noise_multiplier, weights=weights
        )
        # In memory: what a trial on real data costs is charged once for all trials, before the first.
        ledger = Ledger(None, dataset="audit", neighbours=None)
        engine = self.engine(seed=seed, ledger=ledger, accountant=algorithm.accountant)
        _, optimizer, loader = algorithm.make_private(
            engine,
            module=model,
            optimizer=algorithm.optimizer(model.parameters()),
            data_loader=DataLoader(examples, batch_size=setting.lot),
            noise_multiplier=setting.noise_multiplier,
            task=Task(setting.lot, setting.steps, probes, setting.delta),
            **self.options,
        )
        return Started(algorithm, engine, ledger, model, optimizer, loader)


@dataclass(frozen=True)
class Started:
    """A run of the real engine: everything that a user's loop holds."""

    algorithm: Algorithm
    engine: PrivacyEngine
    ledger: Ledger
    model: nn.Module
    optimizer: PrivateOptimizer
    loader: PrivateLoader

    def leave_out(self, absent: Tensor) -> None:
        """From now on no lot holds these examples: the dataset without them, its public numbers unchanged."""
        self.loader.sampling = Without(self.loader.sampling, absent)

    @contextmanager
    def unsupervised(self) -> Iterator[None]:
        """For loops that are known, and are run a thousand times: nothing is tried on them, and no warning is given."""
        self.optimizer._step.capture.on_first_call = None  # the attacked models keep examples apart
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # a privacy filter may end a run: that is no surprise
            warnings.simplefilter("ignore", UntriedWarning)
            yield

    def lots(self, count: int) -> Iterator[tuple[int, Any]]:
        """Batches, each with the number of its lot, until `count` lots were given out or a budget ends them."""
        return numbered_batches(self.loader, count)


class Without(Sampling):
    """The lots of another sampling, some examples left out of each.

    This is what the dataset without them is under add-or-remove-one: every other example is drawn as before, at the
    same rate and for the same expected lot, both of which are public numbers.
    """

    def __init__(self, sampling: Sampling, absent: Tensor) -> None:
        super().__init__(sampling.examples, sampling.lot)
        self._sampling, self._absent = sampling, absent
        self.name, self.neighbours, self.reasons = sampling.name, sampling.neighbours, sampling.reasons

    def draw(self, lot: int, randomness: Randomness) -> Tensor:
        drawn = self._sampling.draw(lot, randomness)
        return drawn[~torch.isin(drawn, self._absent)]

    def event(self, noise_multiplier: float) -> Event:
        return self._sampling.event(noise_multiplier)


def _require_private(algorithm: Algorithm) -> None:
    if not algorithm.private:
        raise ConfigurationError(
            f"{algorithm} is not private: it has neither a guarantee nor a claim that an audit could test: dpsgd is "
            "the private one"
        )


def calibrated(target: Target, epsilon: float) -> float:
    """The noise at which `target` costs `epsilon` (or claims to, where no proof covers it)."""
    setting, algorithm = target.setting, target.algorithm()
    _require_private(algorithm)

    def event(noise_multiplier: float) -> Event:
        if target.neighbours is Neighbours.REPLACE_ONE:
            return FixedSizeGaussian(noise_multiplier, setting.examples, setting.lot)
        return PoissonGaussian(noise_multiplier, setting.rate)

    replacing = target.neighbours is Neighbours.REPLACE_ONE  # of which the paper claims nothing
    preferred = algorithm.accountant if algorithm.sound or replacing else "theorem1"
    accountant = covering_accountant([(event(1.0), setting.steps)], target.neighbours, preferred)
    found = calibrate_noise(
        lambda sigma: [(event(sigma), setting.steps)],
        epsilon,
        setting.delta,
        accountant=accountant,
        neighbours=target.neighbours,
    )
    return found.noise_multiplier


def claimed_epsilon(target: Target) -> float:
    """Theorem 1 on the steps, as the paper counts: what is claimed where no proof covers the algorithm."""
    setting = target.setting
    event = PoissonGaussian(setting.noise_multiplier, setting.rate)
    return get_accountant("theorem1").epsilon([(event, setting.steps)], setting.delta).epsilon
