"""An algorithm: a named combination of a clipping and an optimizer, with what may be said about its privacy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.events import Event
from adadp.algorithms.defaults import BOUND, DEFAULTS, WIDE_BOUND, learning_rate
from adadp.algorithms.schedules import SCHEDULES
from adadp.clipping import Clipping
from adadp.distributed.group import Group
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.replay import TrainingStep
from adadp.sampling.loader import PrivateLoader
from adadp.shapes import InputMaker, Probe, Source


@dataclass(frozen=True)
class Task:
    """What an algorithm may know of the training to come: public things only."""

    lot: int
    steps: int
    probes: InputMaker | None = None
    delta: float = 1e-5
    beside: tuple[tuple[Event, int], ...] = ()  # what else is charged to the same budget
    source: Source | None = None  # of shapes, where more is known than probes show

    def probe(self, count: int, every: int) -> Probe:
        """A source of shapes from this task's probes."""
        if self.probes is None:
            raise ConfigurationError(
                "this algorithm shapes its noise with probes: give Task(probes=) synthetic inputs (adadp.shapes.probes)"
            )
        return Probe(self.probes, count=count, every=every)


class Algorithm(ABC):
    """Builds what a training run needs. `settings` are its numbers, all of them, as they will be used.

    `reading` says how the paper's text is taken, for algorithms of which there are several readings; the first of
    `readings` is the default, and the sound one.
    """

    name: ClassVar[str]
    readings: ClassVar[tuple[str, ...]] = ("",)
    private: ClassVar[bool] = True
    accountant: ClassVar[str] = "pld"
    #: Settings by reading, for an algorithm that is not in `adadp.algorithms.defaults`.
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, reading: str | None = None, **settings: Any) -> None:
        self.reading = self.readings[0] if reading is None else reading
        if self.reading not in self.readings:
            known = ", ".join(self.readings) if self.readings != ("",) else "none: leave it out"
            raise ConfigurationError(f"{self.name} has no reading {self.reading!r}; its readings are {known}")
        defaults = self.defaults.get(self.reading) or DEFAULTS[self.name, self.reading]
        self.settings: dict[str, Any] = {**defaults}
        for key, value in settings.items():
            if key not in defaults:
                raise ConfigurationError(f"{self} has no setting {key!r}; it has {', '.join(defaults)}")
            self.settings[key] = _like(key, value, defaults[key])
        if self.settings["schedule"] not in SCHEDULES:
            raise ConfigurationError(
                f"schedule must be one of {', '.join(SCHEDULES)}, not {self.settings['schedule']!r}"
            )
        if self.settings["lr"] is not None and not 0 < self.settings["lr"] < float("inf"):
            raise ConfigurationError(f"lr must be a finite number above 0, not {self.settings['lr']!r}")

    def __str__(self) -> str:
        return f"{self.name} ({self.reading} reading)" if self.reading else self.name

    def widen(self) -> None:
        """Take the wide bound on one example's gradient where the default is the small one (`defaults.WIDE_BOUND`)."""
        if self.settings.get("max_grad_norm") == BOUND:
            self.settings["max_grad_norm"] = WIDE_BOUND

    def settle(self, *, lot: int, steps: int, noise_multiplier: float, weights: int) -> None:
        """Choose the learning rate, unless it was given, from public numbers: see `defaults.learning_rate`."""
        if self.settings["lr"] is None:
            bound = self.settings["max_grad_norm"]
            self.settings["lr"] = learning_rate(bound, lot, steps, noise_multiplier, weights)

    @property
    def sound(self) -> bool:
        """Whether a proof covers it."""
        return self.private and not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no proof covers it; empty where one does."""
        return ()

    @property
    def guarantee(self) -> str:
        """What may be said before any numbers are known, in one sentence."""
        if self.reasons:
            return "none: " + "; ".join(self.reasons)
        return "(epsilon, delta)-differential privacy for one example, each step one Gaussian release on a Poisson lot"

    @abstractmethod
    def clipping(self, task: Task) -> Clipping:
        """A new clipping for one run."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """A new torch optimizer for one run."""

    def make_private(
        self, engine: PrivacyEngine, *, task: Task, **given: Any
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `engine.make_private(**given)`, with this algorithm's clipping and the task's number of steps."""
        return engine.make_private(clipping=self.clipping(task), steps=task.steps, **given)

    def see(self, optimizer: Optimizer, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:  # noqa: B027
        """Called with each lot before `optimizer.step()`. Only line searches look at it, and pay for what they see."""

    @property
    def looks(self) -> bool:
        """Whether `see` does anything: such an algorithm's steps cannot be replayed."""
        return type(self).see is not Algorithm.see

    def refuse_several(self, group: Group) -> None:
        """Raise where several processes cannot train with this algorithm together."""
        if group.alone or (self.private and not self.looks):
            return
        why = (
            "a line search looks at each lot several times, and each process has a part of it only"
            if self.private
            else "what several processes share here is a private step"
        )
        raise ConfigurationError(f"{why}: train with {self.name} in one process")

    def training_step(
        self, optimizer: Optimizer, model: nn.Module, class_weights: Tensor | None = None
    ) -> Callable[[Tensor, Tensor], None]:
        """The work for each batch of inputs and labels, replayed on a GPU where possible (`adadp.mechanism.replay`).

        `class_weights`, [k], multiply the losses of rows of each class: public or released numbers.
        """

        def losses(inputs: Tensor, targets: Tensor) -> Tensor:
            found = loss_of_each(model(inputs), targets)
            return found if class_weights is None else found * class_weights[targets]

        def step(inputs: Tensor, targets: Tensor) -> None:
            optimizer.zero_grad()
            if isinstance(optimizer, PrivateOptimizer):
                optimizer.backward(losses(inputs, targets))
            else:
                losses(inputs, targets).mean().backward()  # type: ignore[no-untyped-call]
            self.see(optimizer, model, inputs, targets)
            optimizer.step()

        replayed = isinstance(optimizer, PrivateOptimizer) and not self.looks
        return TrainingStep(cast(PrivateOptimizer, optimizer), losses) if replayed else step

    def _sgd(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.settings["lr"] is None:
            raise ConfigurationError(f"{self} has no learning rate yet: give lr, or call settle() first")
        return torch.optim.SGD(parameters, lr=self.settings["lr"], momentum=self.settings.get("momentum", 0.0))


def loss_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss for each row: cross entropy where targets are classes, squared error where they are numbers."""
    if targets.is_floating_point():
        return (outputs.squeeze(1) - targets).square()
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _like(key: str, value: Any, default: Any) -> Any:
    """`value` as the type of the setting's default; text from a command line counts as what it says."""
    wanted = float if default is None else type(default)
    try:
        if wanted is int and float(value) != int(float(value)):
            raise ValueError
        return wanted(float(value)) if wanted in (int, float) else wanted(value)
    except (TypeError, ValueError):
        kind = {int: "a whole number", float: "a number"}.get(wanted, "text")
        raise ConfigurationError(f"{key} must be {kind}, not {value!r}") from None


ALGORITHMS: dict[str, type[Algorithm]] = {}
Kind = TypeVar("Kind", bound=type[Algorithm])


def algorithm(name: str) -> Callable[[Kind], Kind]:
    """Register an algorithm under a name."""

    def register(kind: Kind) -> Kind:
        if name in ALGORITHMS:
            raise ConfigurationError(f"an algorithm is called {name!r} already")
        kind.name = name
        ALGORITHMS[name] = kind
        return kind

    return register


def create(name: str, reading: str | None = None, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm called `name`, in a reading of its own, with some settings changed."""
    if name not in ALGORITHMS:
        raise ConfigurationError(f"no algorithm is called {name!r}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](reading, **(settings or {}))
