"""Threats (b) and (c): the canary is an example, and the auditor sees all iterates, or the final model alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adadp.accounting.events import Neighbours
from adadp.audit.attack import Transcript
from adadp.audit.target import Target
from adadp.errors import ConfigurationError

Example = tuple[Tensor, int]
"""One input, without a batch dimension, and its class."""


@dataclass(frozen=True)
class Examples:
    """What everyone else's data is: inputs [n, ...], labels [n] and the number of classes."""

    inputs: Tensor
    labels: Tensor
    classes: int

    @staticmethod
    def synthetic(count: int, features: int = 8) -> Examples:
        """Two clouds that overlap. The same for every audit: nobody's data."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(count) % 2
        inputs = torch.randn(count, features, generator=generator) + labels[:, None] - 0.5
        return Examples(inputs, labels, 2)

    def model(self) -> nn.Module:
        """A small model for such inputs, always started alike: its start is public."""
        features = math.prod(self.inputs.shape[1:])
        hidden = 8 if features <= 64 else 0
        layers: list[nn.Module] = [nn.Flatten()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if hidden:
                layers += [nn.Linear(features, hidden), nn.Tanh()]
            layers.append(nn.Linear(hidden or features, self.classes))
        return nn.Sequential(*layers)

    def canaries(self) -> dict[str, Example]:
        """Mislabelled, random, and crafted: mislabelled and so large that its gradient is always at the bound."""
        shape = self.inputs.shape[1:]
        typical, label = torch.ones(shape), self.classes - 1
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return {"crafted": (100 * typical, 0), "mislabelled": (typical, 0), "random": (noise, label)}


@dataclass(frozen=True)
class ExampleThreat:
    """Trains with and without a canary example. `white_box`: every iterate is seen; else only the last one's losses."""

    target: Target
    white_box: bool
    others: Examples
    examples: dict[str, Example] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    make_model: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        if len(self.others.inputs) != self.target.setting.examples - 1:
            raise ConfigurationError(
                f"there are {len(self.others.inputs)} other examples where the setting says "
                f"{self.target.setting.examples - 1}"
            )
        unknown = [name for name in self.names if name not in (self.examples or self.others.canaries())]
        if unknown:
            known = ", ".join(self.examples or self.others.canaries())
            raise ConfigurationError(f"no canary example is called {unknown[0]!r}; there are {known}")
        wanted = tuple(self.others.inputs.shape[1:])
        for name, (inputs, label) in self._known().items():
            if tuple(inputs.shape) != wanted:
                raise ConfigurationError(
                    f"the canary {name!r} does not fit the model: it has shape {tuple(inputs.shape)}, and inputs have "
                    f"{wanted}"
                )
            if not 0 <= label < self.others.classes:
                raise ConfigurationError(
                    f"the canary {name!r} does not fit the model: its label {label} is not one of "
                    f"0..{self.others.classes - 1}"
                )

    def _known(self) -> dict[str, Example]:
        known = self.examples or self.others.canaries()
        return {name: known[name] for name in self.names or known}

    @property
    def name(self) -> str:
        """As on the command line."""
        return "white-box" if self.white_box else "black-box"

    @property
    def canaries(self) -> tuple[str, ...]:
        """Every canary to try."""
        return tuple(self._known())

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        """Train once."""
        inputs, label = self._known()[canary]
        setting, others = self.target.setting, self.others
        replaced = self.target.neighbours is Neighbours.REPLACE_ONE
        first = (inputs, label) if inside or not replaced else (others.inputs[-1], int(others.labels[-1]))
        model = (self.make_model or others.model)()
        judge = _Judge(model, inputs, label)
        rows = torch.cat([first[0].unsqueeze(0), others.inputs])
        labels = torch.cat([torch.tensor([first[1]]), others.labels])
        started = self.target.started(model, TensorDataset(rows, labels), self._probes, seed)
        if not (inside or replaced):
            started.leave_out(torch.tensor([0]))
        seen: list[list[float]] = []
        with started.unsupervised():
            for _, (batch, targets) in started.lots(setting.attacked):
                before = judge.look(model) if self.white_box else None
                started.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), targets).backward()  # type: ignore[no-untyped-call]
                started.algorithm.see(started.optimizer, model, batch, targets)
                started.optimizer.step()
                if before is not None:
                    seen.append(judge.compare(model, before))
        started.engine.detach(model)
        confidence = judge.confidence(model)
        if not self.white_box:
            return Transcript({"confidence": confidence}, (confidence,))
        # A lot may come in several batches, and a filter may end a run: what is missing is zero.
        longest = setting.attacked * _pieces(self.target)
        table = torch.tensor((seen + [[0.0] * 3] * longest)[:longest], dtype=torch.float64)
        scores = {
            "projection": float(table[:, 0].sum()),
            "confidence": confidence,
            "energy": float(table[:, 1].sum()),
        }
        return Transcript(scores, (*table.flatten().tolist(), confidence))

    def _probes(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, *self.others.inputs.shape[1:], generator=generator)


def _pieces(target: Target) -> int:
    physical = target.options.get("max_physical_batch_size")
    return 1 if physical is None else math.ceil(target.setting.examples / physical)


class _Judge:
    """Looks at iterates with a copy of the model: what is learnt from it is post-processing."""

    def __init__(self, model: nn.Module, inputs: Tensor, label: int) -> None:
        self._copy = copy.deepcopy(model)
        self._inputs, self._label = inputs.unsqueeze(0), torch.tensor([label])

    def _loss(self, model: nn.Module) -> Tensor:
        self._copy.load_state_dict(model.state_dict())
        outputs: Tensor = self._copy(self._inputs)
        return nn.functional.cross_entropy(outputs, self._label)

    def look(self, model: nn.Module) -> tuple[Tensor, Tensor, float]:
        """The weights, the canary's gradient at them (of length 1) and its loss."""
        self._copy.zero_grad()
        loss = self._loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in self._copy.parameters() if p.grad is not None])
        return _weights(model), gradient / gradient.norm().clamp_min(1e-30), float(loss.detach())

    def compare(self, model: nn.Module, before: tuple[Tensor, Tensor, float]) -> list[float]:
        """How far a step went down the canary's gradient, how far it went, and the loss before it."""
        weights, gradient, loss = before
        moved = weights - _weights(model)
        return [float(moved @ gradient), math.log(float(moved.square().sum()) + 1e-300), loss]

    @torch.no_grad()
    def confidence(self, model: nn.Module) -> float:
        """The log odds of the canary's label, which LiRA finds to be nearly normal."""
        self._copy.load_state_dict(model.state_dict())
        logs = self._copy(self._inputs).double().log_softmax(1)[0]
        label = int(self._label)
        rest = torch.cat([logs[:label], logs[label + 1 :]]).logsumexp(0)
        return float((logs[label] - rest).nan_to_num())


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()
