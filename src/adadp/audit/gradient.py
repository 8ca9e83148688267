"""Threat (a), the strongest: the auditor puts a gradient of its choice into one example and sees every release."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adadp.accounting.events import Neighbours
from adadp.algorithms.agd import LineSearch
from adadp.audit.attack import Transcript
from adadp.audit.canaries import CANARIES, LENGTH, OTHERS, Layers, Sizes
from adadp.audit.examples import Examples
from adadp.audit.observer import PER_STEP, GradientObserver
from adadp.audit.target import Started, Target
from adadp.errors import ConfigurationError

DEFAULT_SIZES: Sizes = ((8, 4), (8, 4))


@dataclass(frozen=True)
class GradientThreat:
    """Trials on linear layers of `sizes`, in which an example's gradient is whatever the auditor wants."""

    target: Target
    sizes: Sizes = DEFAULT_SIZES
    names: tuple[str, ...] = tuple(CANARIES)
    others: Examples | None = None

    @classmethod
    def among(cls, target: Target, others: Examples) -> GradientThreat:
        """With real examples for all others, a linear model on them, and canaries that fit one layer."""
        features = math.prod(others.inputs.shape[1:])
        fitting = tuple(name for name, canary in CANARIES.items() if not canary.opposed and canary.place == "first")
        return cls(target, ((features, others.classes),), fitting, others)

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in CANARIES:
                raise ConfigurationError(f"no gradient canary is called {name!r}; there are {', '.join(CANARIES)}")
        if not self.sizes or any(columns < 1 or rows < 1 for columns, rows in self.sizes):
            raise ConfigurationError(f"the model needs layers of at least 1 x 1, not {self.sizes!r}")
        if len(self.sizes) < 2 and {"last layer", "steering"} & set(self.names):
            raise ConfigurationError("canaries that go from layer to layer do not fit a model of one layer")
        for name in self.names if self.others is not None else ():
            if CANARIES[name].opposed:
                raise ConfigurationError(
                    f"the canary {name!r} does not fit real examples: it has all others pull against it"
                )

    @property
    def name(self) -> str:
        """As on the command line."""
        return "gradient"

    @property
    def canaries(self) -> tuple[str, ...]:
        """Every canary to try."""
        return self.names

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        """Run the real engine with the canary or without it."""
        target, setting = self.target, self.target.setting
        world = _World(canary, self.sizes, setting.attacked)
        replaced = target.neighbours is Neighbours.REPLACE_ONE
        roles = torch.zeros(setting.examples)
        roles[0] = 1.0 if inside or not replaced else -1.0
        started = target.started(Layers(self.sizes), self._examples(roles), self._probes, seed)
        if not (inside or replaced):
            started.leave_out(torch.tensor([0]))
        observer = GradientObserver(started, world, setting.rate, setting.examples - 1)
        whole = self.target.options.get("loss_reduction") == "sum"
        with started.unsupervised():
            for lot, (role, *data) in started.lots(setting.attacked):
                _step(started, world, role, data, lot, whole)
        started.engine.detach(started.model)
        return self._transcript(observer)

    def finished(self) -> Started:
        """A run of all the steps that are claimed for, not attacked: to ask the engine what it charged."""
        setting = self.target.setting
        world = _World(self.names[0], self.sizes, setting.steps)
        silent = TensorDataset(torch.zeros(setting.examples))
        started = self.target.started(Layers(self.sizes), silent, self._probes, 0)
        with started.unsupervised():
            for lot, (role,) in started.lots(setting.steps):
                _step(started, world, role, [], lot, False)
        return started

    def _transcript(self, observer: GradientObserver) -> Transcript:
        steps = self.target.setting.attacked
        rows = observer.rows + [[0.0] * (PER_STEP + 2)] * (steps - len(observer.rows))
        table = torch.tensor(rows, dtype=torch.float64)
        scores = {
            "likelihood": float(table[:, PER_STEP].sum()),
            "likelihood as stepped": float(table[:, PER_STEP + 1].sum()),
            "largest": float(table[:, 0].max()),
            "energy": float(table[:, 2].sum()),
        }
        return Transcript(scores, tuple(table[:, :PER_STEP].flatten().tolist()))

    def _examples(self, roles: Tensor) -> TensorDataset:
        if self.others is None:
            return TensorDataset(roles)
        if len(self.others.inputs) != len(roles) - 1:
            raise ConfigurationError(
                f"there are {len(self.others.inputs)} other examples where the setting says {len(roles) - 1}"
            )
        rows, labels = self.others.inputs.flatten(1), self.others.labels
        return TensorDataset(roles, torch.cat([rows[:1], rows]), torch.cat([labels[:1], labels]))

    def _probes(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, sum(columns for columns, _ in self.sizes), generator=generator)


def _step(started: Started, world: _World, role: Tensor, data: list[Tensor], lot: int, whole: bool) -> None:
    inputs, factors = world.inputs(role, lot)
    if data:
        inputs = torch.where((role == 0)[:, None], data[0], inputs)

    def losses() -> Tensor:
        outputs: Tensor = started.model(inputs)
        linear = (outputs * factors).sum(1)
        if not data:
            return linear
        # A canary's outputs are set to 0 there: the gradient of what is not chosen is 0 times it, NaN if it overflows.
        ordinary = torch.where((role == 0)[:, None], outputs, 0.0)
        own = nn.functional.cross_entropy(ordinary, data[1], reduction="none")
        return torch.where(role == 0, own, linear)

    started.optimizer.zero_grad()
    loss = losses().sum() if whole else losses().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    if isinstance(started.optimizer.original_optimizer, LineSearch):
        started.optimizer.original_optimizer.losses = losses
    started.optimizer.step()


class _World:
    """What each example's gradient is, by its role: 1 the canary, -1 its opposite, 0 all others."""

    def __init__(self, canary: str, sizes: Sizes, steps: int) -> None:
        self._canary, self._sizes, self._steps = CANARIES[canary], sizes, steps

    def inputs(self, role: Tensor, lot: int) -> tuple[Tensor, Tensor]:
        """Inputs [n, columns] and the factors [rows] of the outputs in the loss."""
        columns, factors = self._canary.direction(lot, self._steps, self._sizes)
        length = role * LENGTH - (role == 0) * (OTHERS if self._canary.opposed else 0.0)
        return length[:, None] * columns, factors

    def canary(self, lot: int) -> dict[str, Tensor]:
        return self._gradient(lot, LENGTH)

    def other(self, lot: int) -> dict[str, Tensor] | None:
        return self._gradient(lot, -OTHERS) if self._canary.opposed else None

    def _gradient(self, lot: int, length: float) -> dict[str, Tensor]:
        columns, rows = self._canary.direction(lot, self._steps, self._sizes)
        parts = zip(
            torch.split(rows, [rows for _, rows in self._sizes]),
            torch.split(columns, [columns for columns, _ in self._sizes]),
            strict=True,
        )
        return {f"layers.{index}.weight": length * torch.outer(c, x) for index, (c, x) in enumerate(parts)}
