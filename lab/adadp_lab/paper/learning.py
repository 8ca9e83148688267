"""One training run and its test accuracy along the way: the work behind most of the paper's figures.

It goes through the engine and the algorithms as `adadp train` does, without a run folder and without accounting: what
a run cost follows from its settings (`adadp_lab.paper.accounts`), so it is computed once and not in every run.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms
from adadp.accounting.events import PoissonGaussian
from adadp.algorithms import Algorithm
from adadp.clipping import Clipping, Ellipsoid, Flat, Grouped
from adadp.engine import PrivacyEngine
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.randomness import derived
from adadp.sampling.loader import PrivateLoader
from adadp.shapes import Kronecker, Public
from adadp.training.lot_loop import ShuffledLots, each_lot
from adadp_lab.paper.accounts import Theorem1, noise_for
from adadp_lab.paper.distributions import look
from adadp_lab.paper.tasks import Prepared, prepare
from adadp_lab.paper.workbench import Workbench


def train(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """Train, and note the test accuracy at `marks(...)`.

    `settings`: task, algorithm, reading, set (the algorithm's own settings), lot, steps, delta, and noise_multiplier
    or target_epsilon (by PLD; neither: no privacy); optionally pca_noise_multiplier, clipping, rate_times_noise (the
    learning rate follows), marks, stop (end there, of a run planned for `steps`), epsilon (where the cost depends on
    the run, delta_* at this epsilon), snapshots (steps at which gradients are looked at).
    """
    task = prepare(settings, seed, bench)
    run = _Run(settings, seed, task, bench.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a filter that ends training, a small lot: all of it is in the record
        run.go()
    return run.record()


def marks(settings: Mapping[str, Any]) -> list[int]:
    """The steps after which accuracy is taken: 40 of them, evenly, or 60 in proportion ("geometric")."""
    steps = int(settings["steps"])
    if settings.get("marks") == "geometric":
        found = {round(10 * (steps / 10) ** (i / 59)) for i in range(60)} if steps > 10 else {steps}
    elif settings.get("marks") == "end":
        found = {steps}
    else:
        every = max(1, math.ceil(steps / 40))
        found = {*range(every, steps + 1, every), steps}
    stop = int(settings.get("stop", steps))
    return sorted(step for step in found | {stop} if step <= stop)


class _Run:
    def __init__(self, settings: Mapping[str, Any], seed: int, task: Prepared, device: str) -> None:
        self.settings, self.task, self.device = settings, task, device
        self.lot, self.steps = int(settings["lot"]), int(settings["steps"])
        self.noise: float | None = settings.get("noise_multiplier")
        if "target_epsilon" in settings:
            rate = self.lot / len(task.split[0])
            self.noise = noise_for(settings["target_epsilon"], settings["delta"], rate=rate, steps=self.steps)
        self.seed = seed
        torch.manual_seed(derived(seed, "initial weights"))
        self.model = task.model().to(device)
        own = dict(settings.get("set") or {})
        if "rate_times_noise" in settings and self.noise is not None:
            own["lr"] = settings["rate_times_noise"] / self.noise
        self.algorithm: Algorithm = algorithms.create(settings["algorithm"], settings.get("reading"), own)
        if self.noise is not None:
            weights = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            self.algorithm.settle(lot=self.lot, steps=self.steps, noise_multiplier=self.noise, weights=weights)
        self.curve: list[tuple[int, float]] = []
        self.noted: dict[str, Any] = {}
        self.spent: list[list[float]] = []
        self.local_from: int | None = None
        self.seconds = 0.0

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def go(self) -> None:
        inputs, labels, _, _ = self.task.split
        optimizer = self.algorithm.optimizer(self.model.parameters())
        schedule = algorithms.schedule(
            self.algorithm.settings["schedule"], optimizer, self.steps, len(inputs) / self.lot
        )
        used: Optimizer = optimizer
        engine, private = None, None
        lots: PrivateLoader | ShuffledLots = ShuffledLots(inputs, labels, self.lot, derived(self.seed, "lots"))
        if self.noise is not None:
            engine = PrivacyEngine(seed=derived(self.seed, "training"), accountant=self.algorithm.accountant)
            private, lots = self._private(engine, optimizer)
            used = private
        work = self.algorithm.training_step(used, self.model)
        wanted, looked = marks(self.settings), set(self.settings.get("snapshots", ()))
        started, done = time.perf_counter(), 0
        before = self._state() if 1 in looked else None
        for done, (batch, targets) in each_lot(lots, work, wanted[-1]):
            schedule.step()
            if private is not None:
                self._note(private, done)
                if before is not None and isinstance(lots, PrivateLoader) and lots.lots.whole is not None:
                    drawn = slice(0, int(lots.lots.whole.real))
                    self.noted[str(done)] = self._look(private, batch[drawn], targets[drawn], before)
            before = self._state() if done + 1 in looked else None
            if done == wanted[len(self.curve)]:
                self.curve.append((done, self._accuracy()))
        if not self.curve or self.curve[-1][0] != done:
            self.curve.append((done, self._accuracy()))  # a privacy filter ended it between two marks
        self.seconds = time.perf_counter() - started
        if engine is not None:
            engine.close()
            engine.detach(self.model)

    def _private(self, engine: PrivacyEngine, optimizer: Optimizer) -> tuple[PrivateOptimizer, PrivateLoader]:
        inputs, labels, _, _ = self.task.split
        assert self.noise is not None
        given: dict[str, Any] = {
            "module": self.model,
            "optimizer": optimizer,
            "data_loader": DataLoader(TensorDataset(inputs, labels), batch_size=self.lot),
            "noise_multiplier": self.noise,
            "pad_lots": self.device.startswith("cuda") and not self.algorithm.looks,
        }
        clipping = self._clipping()
        if clipping is None:
            task = algorithms.Task(self.lot, self.steps, self.task.probes, float(self.settings["delta"]))
            _, private, loader = self.algorithm.make_private(engine, task=task, **given)
        else:
            _, private, loader = engine.make_private(clipping=clipping, steps=self.steps, **given)
        return private, loader

    def _clipping(self) -> Clipping | None:
        """One of its own, where the settings ask for it: a bound for each layer, or a shape from public data."""
        asked = self.settings.get("clipping")
        if asked is None:
            return None
        own = self.algorithm.settings
        if asked == "public":
            assert self.task.public is not None
            batches = list(torch.split(self.task.public, own["probes"]))
            shape = Kronecker(own["before"], own["after"], damping=own["damping"], rank=own["rank"])
            return Ellipsoid(
                own["max_grad_norm"], shape=shape, source=Public(batches, count=own["probes"], every=own["refresh"])
            )
        return Grouped({pattern: Flat(bound) for pattern, bound in asked.items()})

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def _note(self, private: PrivateOptimizer, step: int) -> None:
        if self.local_from is None and getattr(private._step.clipping, "local", False):
            self.local_from = step
        if self.algorithm.name == "agd":  # its noise depends on how the search went
            event = private._step.event
            assert isinstance(event, PoissonGaussian)
            sigma = event.noise_multiplier
            if self.spent and self.spent[-1][1] == sigma:
                self.spent[-1][0] += 1
            else:
                self.spent.append([1, sigma])

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _look(
        self, private: PrivateOptimizer, batch: Tensor, targets: Tensor, state: dict[str, Tensor]
    ) -> dict[str, Any]:
        twin = self.task.model().to(self.device)
        twin.load_state_dict(state)
        return look(private._step.clipping, twin, batch, targets, self.lot, float(self.noise or 0.0))

    @torch.no_grad()
    def _accuracy(self) -> float:
        _, _, inputs, labels = self.task.split
        guesses = torch.cat([self.model(part).argmax(1) for part in torch.split(inputs, 5000)])
        return float((guesses == labels).double().mean())

    def record(self) -> dict[str, Any]:
        """Everything that came out, in plain JSON."""
        found: dict[str, Any] = {
            "accuracy": round(self.curve[-1][1], 5),
            "steps_done": self.curve[-1][0],
            "curve": [[step, round(value, 5)] for step, value in self.curve],
            "noise_multiplier": self.noise,
            "used": {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in self.algorithm.settings.items()},
            "ms_per_step": round(1e3 * self.seconds / max(1, self.curve[-1][0]), 3),
        }
        if self.local_from is not None:
            found["local_from"] = self.local_from
        if self.noted:
            found["snapshots"] = self.noted
        if self.spent:
            examples = len(self.task.split[0])
            cost = Theorem1(self.lot / examples, float(self.settings["delta"]))
            found["spent"] = [[int(count), float(f"{sigma:.8g}")] for count, sigma in self.spent]
            steps = [step for step, _ in self.curve]
            found["claimed"] = cost.along(self.spent, steps, self.settings.get("epsilon"))
        return found
