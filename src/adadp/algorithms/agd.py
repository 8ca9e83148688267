"""AGD (Lee and Kifer, 2018): a noisy gradient, then a noisy choice of how far to go along it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.events import PoissonGaussian
from adadp.accounting.filter import RenyiFilter
from adadp.algorithms.algorithm import Algorithm, Task, algorithm, loss_of_each
from adadp.algorithms.search import Rules, SearchStep
from adadp.clipping import Clipping, Flat
from adadp.distributed.group import group_of
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.sums import ReleasedGradient
from adadp.sampling.loader import PrivateLoader, check_loader


class LineSearch(Optimizer):
    """Tries step sizes 0..lr along the normalised gradient and takes the one whose noised objective is least.

    When 0 wins, the gradient is drawn again with more information and averaged with what is there. Every `window`
    steps the largest step size becomes `stretch` times the largest that was chosen lately.
    """

    window, stretch = 10, 1.1

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.search: SearchStep | None = None
        self.losses: Callable[[], Tensor] | None = None
        self._reach = 1.0
        self._chosen: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """Take one step from the private gradients that are set."""
        search, losses = self.search, self.losses
        if search is None or losses is None:
            raise ConfigurationError("a line search has to see its lot: use AGD.make_private and AGD.see")
        names = {id(parameter): name for name, parameter in search.capture.module.named_parameters()}
        moved = {names[id(p)]: p for group in self.param_groups for p in group["params"] if p.grad is not None}
        gradient = ReleasedGradient({name: p.grad.clone() for name, p in moved.items() if p.grad is not None})
        start = {name: parameter.clone() for name, parameter in moved.items()}
        reach = self._reach * float(self.param_groups[0]["lr"])
        sizes = torch.linspace(0, reach, search.rules.candidates).tolist()

        def go(size: float) -> None:
            length = torch.stack([value.square().sum() for value in gradient.values()]).sum().sqrt()
            for name, parameter in moved.items():
                parameter.copy_(start[name] - gradient[name] * (size / length.clamp_min(1e-30)))

        best = 0
        for draw in range(search.rules.redraws + 1):
            if draw:
                gradient = search.redraw(gradient)
            rows = []
            for size in sizes:
                go(size)
                rows.append(losses())
            best = int(search.objectives(torch.stack(rows)).argmin())
            if best:
                break
        search.end(lost=best == 0)
        go(sizes[best])
        self.losses = None
        self._adapt(sizes[best] / max(float(self.param_groups[0]["lr"]), 1e-30))

    def _adapt(self, chosen: float) -> None:
        self._chosen.append(chosen)
        if len(self._chosen) == self.window:
            largest = max(self._chosen)
            self._reach = self.stretch * largest if largest else self._reach / 2
            self._chosen = []


@algorithm("agd")
class AGD(Algorithm):
    """Gradient, objectives and redraws of a lot are one event; lots run under a privacy filter (`search`)."""

    accountant = "rdp"

    def clipping(self, task: Task) -> Clipping:
        return Flat(self.settings["max_grad_norm"])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return LineSearch(parameters, self.settings["lr"])

    def make_private(
        self, engine: PrivacyEngine, *, task: Task, **given: Any
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `engine.make_private`; `task.steps` lots at `noise_multiplier` are the budget, fewer may run."""
        optimizer = given["optimizer"]
        if not isinstance(optimizer, LineSearch):
            raise ConfigurationError("agd brings its own optimizer: pass what AGD.optimizer returns")
        if given.get("max_physical_batch_size") is not None or given.get("pad_lots"):
            raise ConfigurationError("agd looks at a lot several times, so it cannot come in parts: no microbatch")
        if given.get("normalize_clipping"):
            raise ConfigurationError("agd steps along the normalised gradient already: leave normalize_clipping out")
        if given.get("sampling", "poisson") != "poisson":
            raise ConfigurationError("agd's filter is proven for Poisson lots: leave sampling out")
        self.refuse_several(group_of(given["module"]))
        examples, lot = check_loader(given["data_loader"])
        event = PoissonGaussian(given["noise_multiplier"], lot / examples)
        filter = RenyiFilter.for_releases(event, task.steps, task.delta, beside=task.beside)
        search = partial(SearchStep, rules=self._rules(), rate=event.rate, filter=filter)
        made = super().make_private(engine, task=task, step_class=search, **given)
        step = made[1]._step
        assert isinstance(step, SearchStep)
        optimizer.search = step
        return made

    def _rules(self) -> Rules:
        settings = self.settings
        if settings["candidates"] < 2 or not 0 < settings["share"] < 1 or settings["growth"] <= 0:
            raise ConfigurationError("agd needs candidates >= 2, a share in (0, 1) and a growth above 0")
        if settings["objective"] not in ("improvement", "loss"):
            raise ConfigurationError(f"objective must be improvement or loss, not {settings['objective']!r}")
        if settings["redraws"] < 0 or not settings["objective_bound"] > 0:
            raise ConfigurationError("agd needs redraws >= 0 and an objective_bound above 0")
        return Rules(
            settings["candidates"], settings["objective_bound"], settings["share"], settings["growth"],
            settings["redraws"], settings["objective"] == "improvement",
        )  # fmt: skip

    def see(self, optimizer: Optimizer, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        line = getattr(optimizer, "original_optimizer", optimizer)
        assert isinstance(line, LineSearch)
        line.losses = lambda: loss_of_each(model(inputs), targets)
