"""Training from data to a run folder: `train(dataset="mnist", epsilon=0.75, delta=1e-4)` is all of it."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from adadp import algorithms, models, preprocessing
from adadp.accounting.accountants import get_accountant
from adadp.accounting.budget import Budget
from adadp.accounting.events import PoissonGaussian, Uncovered
from adadp.accounting.guarantee import Guarantee, round_up
from adadp.accounting.ledger import Ledger
from adadp.algorithms.algorithm import loss_of_each
from adadp.data import HELD_OUT_NOTE, Dataset, Table
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError, InterruptedRunError
from adadp.extras import require
from adadp.mechanism.optimizer import BudgetWarning
from adadp.sampling.loader import PrivateLoader
from adadp.shapes import InputMaker
from adadp.training import checkpoints, class_weights, held_out
from adadp.training import preparation as prepared
from adadp.training import run_folder as runs
from adadp.training.dataset_ledger import guarantee_of, on_record, runs_in
from adadp.training.history import History, history_of
from adadp.training.lot_loop import ShuffledLots, each_lot
from adadp.training.metrics import Metrics
from adadp.training.planning import Plan
from adadp.training.settings import Settings, from_mapping


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `accuracy` and `epsilon` are those of the last evaluation, None before the first."""

    step: int
    steps: int
    seconds: float
    examples_per_second: float
    accuracy: float | None
    epsilon: float | None


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Result:
    """What came out. `to_dict` is what `adadp train --json` prints.

    `guarantee` is for everything in the ledger, which all `runs` on this data are charged to: the one to publish.
    `run_guarantee` is for this run as if there had been no other.
    """

    plan: Plan
    metrics: Metrics
    guarantee: Guarantee
    claimed_epsilon: float | None
    steps: int
    seconds: float
    folder: Path
    run_guarantee: Guarantee
    ledger: Path
    runs: int
    class_weights: dict[str, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """Part of held-out rows whose class is right; None where a number is predicted."""
        return self.metrics.values.get("accuracy")

    @property
    def remark(self) -> str | None:
        """What to say of a run that learnt nothing; None for others."""
        balanced = self.class_weights is not None
        return held_out.remark(self.metrics, self.plan.train.classes, balanced=balanced)

    def sentence(self) -> str:
        """The guarantee in one sentence."""
        found = self.guarantee
        if found.epsilon is None:
            return "none: " + "; ".join(found.reasons)
        return (
            f"({round_up(found.epsilon)}, {round_up(found.delta)})-differential privacy for {found.unit} under "
            f"{found.neighbours} neighbours ({found.accountant} accountant)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `epsilon` is None where the guarantee is none."""
        plan = self.plan
        return {
            "accuracy": self.accuracy,
            "metrics": self.metrics.to_dict(),
            "epsilon": self.guarantee.epsilon,
            "run_epsilon": self.run_guarantee.epsilon,
            "dataset_epsilon": self.guarantee.epsilon,
            "dataset_name": plan.dataset_name,
            "dataset_runs": self.runs,
            "ledger": str(self.ledger),
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.guarantee.delta,
            "guarantee": self.sentence(),
            "steps": self.steps,
            "algorithm": plan.algorithm.name,
            "seconds": self.seconds,
            "reading": plan.algorithm.reading or None,
            "dataset": plan.train.name,
            "model": plan.model_name,
            "examples": plan.population,
            "class_weights": self.class_weights,
            "unit": self.guarantee.unit,
            "lot": plan.lot,
            "noise_multiplier": plan.noise_multiplier,
            "gaussian": [event.noise_multiplier for event in plan.events],
            "note": held_out.COVERED if plan.settings.paid_metrics else HELD_OUT_NOTE,
            "run": str(self.folder),
        }


def plan(settings: Settings | None = None, **options: Any) -> Plan:
    """Settle a run: `options` are those of `Settings`."""
    if settings is not None and options:
        raise ConfigurationError("give either Settings or options, not both")
    return Plan(settings if settings is not None else from_mapping(options))


def train(settings: Settings | None = None, *, report: Report | None = None, **options: Any) -> Result:
    """Train a model with privacy: `train(dataset="mnist", epsilon=0.75, delta=1e-4)`. `options` as in `Settings`."""
    return run(plan(settings, **options), report)


def resume(
    path: str | Path, *, seed: int | None = None, report: Report | None = None, stop: Callable[[], bool] = lambda: False
) -> Result:
    """Go on with the run in a folder that was interrupted, with its settings.

    Args:
        path: the folder.
        seed: the run's, if it had one: on a CPU it then ends in the model of an uninterrupted run, bit for bit.
        report, stop: as in `run`.

    Returns:
        As `run`.

    Raises:
        ConfigurationError: the run has ended, another process works on it, or there is nothing to go on from.
        NotTheSameRunError: with the seed, data or code are not what they were. Resume again: lots are drawn anew.

    Guarantee:
        That of `PrivacyEngine(resume=)`: lots that are run again are charged again, unless they are the very same
        releases.

    """
    return run(checkpoints.plan_to_resume(path, seed=seed), report, stop)


def run(plan: Plan, report: Report | None = None, stop: Callable[[], bool] = lambda: False) -> Result:
    """Spend what was planned: fit the preprocessing, train, and write the run's folder.

    Args:
        plan: of a new run, or of one that is resumed.
        report: called after each step.
        stop: asked after each step; where it says True the run stops, with a checkpoint.

    Raises:
        InterruptedRunError: `stop` said so. The message says what was spent, and how to go on.
        NotFiniteError: weights are NaN or infinite.

    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            "adadp train runs in one process, and WORLD_SIZE says that this is one of several: each would spend by "
            "itself. Start it without torchrun; for several processes write a script with PrivacyEngine "
            "(docs/distributed.md)"
        )
    return _Execution(plan, report, stop).run()


def _left_out(lots: PrivateLoader | ShuffledLots) -> bool:
    """Whether a budget ended the run with a lot out that was not released."""
    return isinstance(lots, PrivateLoader) and lots.stopped


class _Execution:
    """One run of a plan."""

    def __init__(self, plan: Plan, report: Report | None, stop: Callable[[], bool]) -> None:
        self.plan, self.settings, self.report, self.stop = plan, plan.settings, report, stop
        self.assumptions: list[str] = [f"public: {text}" for text in plan.public()]
        self.engine: PrivacyEngine | None = None
        self.history: History | None = None
        self.charged: list[str] = []  # the ledger's ids of what this run charges, but for the engine's

    def run(self) -> Result:
        plan = self.plan
        name = f"{plan.train.name}-{plan.algorithm.name}"
        resumed = plan.resumed
        self.folder = Path(str(self.settings.out)) if resumed else runs.create(self.settings.out, name)
        with checkpoints.held(self.folder):
            self.ledger = plan.ledger or Ledger(
                self.folder / "ledger.jsonl", dataset=plan.dataset_name, unit=plan.unit, delta=plan.delta
            )
            if not resumed:
                plan.account.note_uncharged(
                    f"{plan.algorithm}, {self.folder.name}"
                )  # guarantees that are published name it
                if plan.noise_multiplier is not None and plan.algorithm.sound:
                    self.ledger.settle_order(PoissonGaussian(plan.noise_multiplier, plan.rate))
                if self._resumable:
                    checkpoints.note_start(self.folder, plan)
            return self._run()

    def _run(self) -> Result:
        plan = self.plan
        started = time.perf_counter()
        estimator = self._fit()
        inputs = prepared.rows(plan.train, estimator)
        tested = prepared.rows(plan.test, estimator)
        probes = prepared.probes_for(plan.train, estimator)
        trained, inputs, tested, probes = self._features(inputs, tested, probes)
        self.test = tested.to(plan.device)
        self.class_weights = self._class_weights()
        steps = self._train(trained.to(plan.device), inputs.to(plan.device), plan.train.labels.to(plan.device), probes)
        seconds = time.perf_counter() - started
        metrics = self._metrics(trained)
        guarantee = self.guarantee()
        runs.write(self.folder, self._config(), plan.model, estimator)
        claimed = None if plan.algorithm.sound else plan.claimed_epsilon()
        own = guarantee_of(self.ledger, self._ids(), plan.delta, plan.accountant, guarantee)
        place = self.ledger.path or self.folder
        result = Result(
            plan, metrics, guarantee, claimed, steps, seconds, self.folder, own, place, runs_in(self.ledger),
            None if self.class_weights is None else class_weights.by_name(self.class_weights, plan.train.classes),
        )  # fmt: skip
        runs.write_result(self.folder, result.to_dict(), guarantee, on_record(self.ledger, self._ids(), own))
        return result

    def _fit(self) -> prepared.Estimator | None:
        estimator, fitted = self.plan.estimator, self.folder / runs.FITTED
        if estimator is None:
            return None
        if self.plan.resumed and fitted.exists():
            self.charged += filter(None, [checkpoints.preprocessing_run(self.folder)])
            made: prepared.Estimator = preprocessing.load(fitted)
            self.assumptions += made.assumptions_
            return made
        planned = {"preprocessing": type(estimator).__name__, "neighbours": "add-or-remove-one", "unit": self.plan.unit}
        charged = self.ledger.start(
            planned, seed=estimator.random_state, budget=self._budget(), accountant=self.plan.accountant
        )
        self.charged.append(charged.id)
        with charged:
            estimator.fit(prepared.raw(self.plan.train), ledger=charged, persons=self.plan.train.persons)
        if self._resumable:
            checkpoints.note_preprocessing(self.folder, charged.id)
            preprocessing.save(fitted, estimator)
        self.assumptions += estimator.assumptions_
        return estimator

    def _class_weights(self) -> Tensor | None:
        """The weights of classes: declared, or paid for; a run that is resumed keeps those that it paid for."""
        plan, sigma = self.plan, self.plan.counts_noise
        if sigma is None:
            if plan.class_weights is not None:
                self.assumptions.append("weights of classes were declared without looking at the data")
            return plan.class_weights
        kept = checkpoints.class_counts(self.folder) if plan.resumed else None
        if kept is None:
            seed = plan.seed_for("class counts")
            planned = {"class_weights": "noised class counts", "neighbours": "add-or-remove-one", "unit": plan.unit}
            charged = self.ledger.start(planned, seed=seed, budget=self._budget(), accountant=plan.accountant)
            with charged:
                found = class_weights.paid(
                    plan.train.labels, len(plan.train.classes), sigma,
                    persons=plan.train.persons, seed=seed, ledger=charged,
                )  # fmt: skip
            kept = charged.id, found.tolist()
            if self._resumable:
                checkpoints.note_class_counts(self.folder, *kept)
        self.charged.append(kept[0])
        return torch.tensor(kept[1], dtype=torch.float32)

    @property
    def _resumable(self) -> bool:
        return bool(self.settings.checkpoint_every) and self.plan.algorithm.private and not self.plan.algorithm.looks

    def _budget(self) -> Budget | None:
        """What the engine holds everything in the ledger to. An epsilon for the run alone is kept by its plan."""
        plan = self.plan
        if plan.epsilon is None or not plan.algorithm.sound or (plan.ledger is not None and plan.account.of_run):
            return None
        return Budget(plan.epsilon, plan.delta)

    def _ids(self) -> list[str]:
        return [*self.charged, *(() if self.engine is None else self.engine.run_ids)]

    def _features(
        self, inputs: Tensor, tested: Tensor, probes: InputMaker
    ) -> tuple[nn.Module, Tensor, Tensor, InputMaker]:
        """Where convolutions are frozen, their features are computed once and only the head is trained."""
        model = self.plan.model
        if not isinstance(model, models.PaperCifarNet):
            return model, inputs, tested, probes
        lab = require("adadp_lab.pretraining", None, "the paper's net for images, whose convolutions are pre-trained,")
        pretrained = lab.pretrain("paper", data_dir=self.settings.data_dir, device=self.plan.device)
        lab.load_features(model, pretrained)
        self.assumptions.append(pretrained.assumption)
        features = model.features.to(self.plan.device)

        @torch.no_grad()
        def of(images: Tensor) -> Tensor:
            return torch.cat([features(part.to(self.plan.device)).cpu() for part in torch.split(images, 512)])

        def probe(count: int, generator: torch.Generator) -> Tensor:
            return of(cast(Tensor, probes(count, generator)))

        return model.head, of(inputs), of(tested), probe

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _train(self, model: nn.Module, inputs: Tensor, labels: Tensor, probes: InputMaker) -> int:
        plan = self.plan
        algorithm, steps = plan.algorithm, plan.steps
        optimizer: Optimizer = algorithm.optimizer(p for p in model.parameters() if p.requires_grad)
        schedule = algorithms.schedule(algorithm.settings["schedule"], optimizer, steps, 1 / plan.rate)
        lots: PrivateLoader | ShuffledLots
        if algorithm.private:
            optimizer, lots = self._private(model, optimizer, TensorDataset(inputs, labels), probes)
            self.history = history_of(self.folder, algorithm, optimizer, steps)
        else:
            with self.ledger.start({"algorithm": algorithm.name, "steps": steps, "unit": plan.unit}) as charged:
                self.charged.append(charged.id)
                charged.charge(Uncovered(algorithm.reasons[0]))
            lots = ShuffledLots(inputs, labels, plan.lot, plan.seed_for("lots"))
        saved = checkpoints.Checkpoints(
            self.folder, self.settings.checkpoint_every, self.engine, model, schedule, resumable=not algorithm.looks
        )
        weights = None if self.class_weights is None else self.class_weights.to(plan.device)
        work = algorithm.training_step(optimizer, model, weights)
        try:
            if self.engine is not None:
                self.engine.restore(schedule)
            saved.first()
            with warnings.catch_warnings():
                # Where a filter ends the training that is no surprise; the number of steps is in the result.
                warnings.simplefilter("ignore", BudgetWarning)
                return self._loop(model, lots, work, schedule, saved)
        finally:
            if self.engine is not None:
                self.engine.close()
                self.engine.detach(model)

    def _loop(
        self,
        model: nn.Module,
        lots: PrivateLoader | ShuffledLots,
        work: Callable[[Tensor, Tensor], None],
        schedule: LambdaLR,
        saved: checkpoints.Checkpoints,
    ) -> int:
        plan, steps, done = self.plan, self.plan.steps, self._made_before()
        every, began, started = max(1, math.ceil(steps / self.settings.evaluations)), done, time.perf_counter()
        accuracy, epsilon = None, None
        runs.forget_after(self.folder, done)
        if self.stop():
            raise self._interrupted(saved, done)
        for done, _ in each_lot(lots, work, steps):
            schedule.step()
            if self.history is not None:
                self.history.stepped(done)
            seconds = time.perf_counter() - started
            if done % every == 0 or done == steps:
                saved.refuse_unless_finite(done)
                figures, epsilon = self._standing(model), self._epsilon_so_far()
                accuracy = figures.get("accuracy", figures.get("mae"))
                lr = schedule.optimizer.param_groups[0]["lr"]
                metrics = {"step": done, **figures, "epsilon": epsilon, "seconds": seconds, "lr": lr}
                runs.add_line(self.folder / runs.METRICS, metrics)
            if self.report is not None:
                speed = (done - began) * plan.lot / max(seconds, 1e-9)
                self.report(Progress(done, steps, seconds, speed, accuracy, epsilon))
            if done < steps and self.stop():
                raise self._interrupted(saved, done)
            if saved.due():
                saved.make(done)
        saved.refuse_unless_finite(done)
        if not _left_out(lots):
            saved.make(done)
        return done

    def _made_before(self) -> int:
        return 0 if self.engine is None or self.engine.resumed is None else self.engine.resumed.lot

    def _interrupted(self, saved: checkpoints.Checkpoints, done: int) -> InterruptedRunError:
        """Stop between two lots: with a checkpoint, and what is charged."""
        saved.make(done)
        return saved.interrupted(done, self.plan.steps, self.guarantee(), seeded=self.settings.seed is not None)

    def _private(
        self, model: nn.Module, optimizer: Optimizer, examples: TensorDataset, probes: InputMaker
    ) -> tuple[Optimizer, PrivateLoader]:
        plan = self.plan
        assert plan.noise_multiplier is not None
        seed = self.settings.seed
        self.engine = PrivacyEngine(
            accountant=plan.accountant,
            seed=seed,
            ledger=self.ledger,
            budget=self._budget(),
            resume=checkpoints.source(self.folder, self.ledger, seed) if plan.resumed else None,
        )
        task = algorithms.Task(plan.lot, plan.steps, probes, plan.delta, tuple(plan.beside()))
        _, private, lots = plan.algorithm.make_private(
            self.engine,
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(examples, batch_size=plan.lot),
            noise_multiplier=plan.noise_multiplier,
            task=task,
            max_physical_batch_size=self.settings.microbatch,
            pad_lots=plan.device.type == "cuda" and not plan.algorithm.looks and plan.units is None,
            unit=plan.units,
        )
        return private, lots

    # ---- what is known on the way ---------------------------------------------------------------------------------

    def _standing(self, model: nn.Module) -> dict[str, float | None]:
        """Loss and accuracy (or mean absolute error) so far; no figures where they are to be paid for, at the end."""
        figure = "accuracy" if self.plan.train.classes else "mae"
        if self.settings.paid_metrics:
            return {figure: None}
        outputs = held_out.outputs_of(model, self.test)
        values = held_out.exact(self.plan.test, outputs).values
        return {figure: values[figure], "loss": float(loss_of_each(outputs, self.plan.test.labels).mean())}

    def _metrics(self, model: nn.Module) -> Metrics:
        """Figures on the held-out rows: exact, or noised and charged."""
        outputs, sigma = held_out.outputs_of(model, self.test), self.plan.metrics_noise
        balanced = self.class_weights is not None
        if sigma is None:
            return held_out.exact(self.plan.test, outputs, balanced=balanced)
        seed = self.plan.seed_for("metrics")
        with self.ledger.start(
            {"metrics": "held-out counts", "neighbours": "add-or-remove-one"},
            seed=seed, budget=self._budget(), accountant=self.plan.accountant,
        ) as charged:  # fmt: skip
            self.charged.append(charged.id)
            return held_out.paid(self.plan.test, outputs, sigma, seed=seed, ledger=charged, balanced=balanced)

    def _epsilon_so_far(self) -> float | None:
        """An upper bound that costs no time: the Renyi bound, or what all of the plan costs if that is less."""
        if self.engine is None or not self.plan.algorithm.sound:
            return None
        releases = self.ledger.charged(self._ids() if self.plan.account.of_run else None)
        spent = get_accountant("rdp").epsilon(releases, self.plan.delta).epsilon
        return spent if self.plan.epsilon is None else min(spent, self.plan.epsilon)

    def guarantee(self) -> Guarantee:
        """What may be said about everything charged so far."""
        plan, delta = self.plan, self.plan.delta
        if self.engine is None:
            return self.ledger.guarantee(delta, reasons=plan.algorithm.reasons)
        found = self.engine.guarantee(delta)
        kept = tuple(dict.fromkeys((*found.assumptions, *self.assumptions)))
        if found.epsilon is None:
            return replace(found, assumptions=kept, accountant="theorem1", claimed_epsilon=plan.claimed_epsilon())
        return replace(found, assumptions=kept)

    def _config(self) -> dict[str, Any]:
        plan = self.plan
        return {
            **plan.describe(),
            "seed": None,  # whoever knows it can take the noise off
            "built": plan.model_name,
            "input_shape": list(plan.input_shape),
            "classes": list(plan.train.classes),
            "classes_declared": bool(plan.settings.classes),
            "kind": "table" if isinstance(plan.train, Table) else "images",
            "kinds": dict(plan.train.kinds) if isinstance(plan.train, Table) else None,
            "split_seed": None if plan.settings.seed is not None else plan.split_seed,
            "rows" if plan.units is None else "persons": plan.rows_or_persons if plan.own_data else None,
            "image_shape": list(plan.train.input_shape) if isinstance(plan.train, Dataset) else None,
            "maximum": plan.train.maximum if isinstance(plan.train, Dataset) else None,
        }
