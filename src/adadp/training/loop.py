"""Training from data to a run folder: `train(dataset="mnist", epsilon=0.75, delta=1e-4)` is all of it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from adadp.accounting.events import Event, PoissonGaussian, Uncovered
from adadp.accounting.guarantee import Guarantee
from adadp.accounting.ledger import Ledger
from adadp.algorithms.algorithm import loss_of_each
from adadp.data import Dataset, Table
from adadp.distributed.agreement import ALONE, Agreement
from adadp.distributed.launched import launched, take_device
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError, DistributedError
from adadp.extras import require
from adadp.mechanism.optimizer import BudgetWarning
from adadp.sampling.loader import PrivateLoader
from adadp.shapes import InputMaker
from adadp.training import checkpoints, class_weights, held_out
from adadp.training import preparation as prepared
from adadp.training import run_folder as runs
from adadp.training.board import Board, require_tensorboard
from adadp.training.dataset_ledger import guarantee_of, on_record, runs_in
from adadp.training.history import History, history_of
from adadp.training.lot_loop import ShuffledLots, each_lot
from adadp.training.metrics import Metrics
from adadp.training.planning import Plan
from adadp.training.result import Progress, Report, Result
from adadp.training.settings import Settings, from_mapping
from adadp.training.together import refuse_unshared, settled_together


def plan(settings: Settings | None = None, **options: Any) -> Plan:
    """Settle a run of one process: `options` are those of `Settings`."""
    return Plan(_asked(settings, options))


def _asked(settings: Settings | None, options: dict[str, Any]) -> Settings:
    if settings is not None and options:
        raise ConfigurationError("give either Settings or options, not both")
    return settings if settings is not None else from_mapping(options)


def train(settings: Settings | None = None, *, report: Report | None = None, **options: Any) -> Result:
    """Train a model with privacy: `train(dataset="mnist", epsilon=0.75, delta=1e-4)`. `options` as in `Settings`.

    Under `torchrun` all processes call this, and train together (docs/distributed.md). `report` is called in process 0.
    """
    with launched() as group:
        return run(settled_together(group, lambda: Plan(_asked(settings, options), group=group)), report)


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
    with launched() as group:
        found = settled_together(group, lambda: checkpoints.plan_to_resume(path, seed=seed, group=group))
        return run(found, report, stop)


def run(plan: Plan, report: Report | None = None, stop: Callable[[], bool] = lambda: False) -> Result:
    """Spend what was planned: fit the preprocessing, train, and write the run's folder.

    Args:
        plan: of a new run, or of one that is resumed.
        report: called after each step, in process 0.
        stop: asked for each step; where it says True in any process the run stops, with a checkpoint.

    Returns:
        What came out, in every process.

    Raises:
        InterruptedRunError: `stop` said so. The message says what was spent, and how to go on.
        NotFiniteError: weights are NaN or infinite.
        DistributedError: another process ended, or does not do the same.

    """
    refuse_unshared(plan)
    if plan.settings.tensorboard:
        require_tensorboard()
    take_device(plan.device)
    execution = _Execution(plan, report, stop)
    try:
        return execution.run()
    except DistributedError as error:
        folder = execution.folder
        if folder is None or not plan.resumable:
            raise
        raise DistributedError(f"{error}. Go on with: adadp train --resume {folder}") from error


def _left_out(lots: PrivateLoader | ShuffledLots) -> bool:
    """Whether a budget ended the run with a lot out that was not released."""
    return isinstance(lots, PrivateLoader) and lots.stopped


class _Execution:
    """One run of a plan, in this process.

    Lots and steps are the work of all processes. Everything else (the folder, the ledger, what is released beside the
    steps, figures, checkpoints) is process 0's: the others get what they need of it by `Group.from_first`.
    """

    def __init__(self, plan: Plan, report: Report | None, stop: Callable[[], bool]) -> None:
        self.plan, self.settings, self.group, self.stop = plan, plan.settings, plan.group, stop
        self.report = report if self.group.first else None
        self.assumptions: list[str] = [f"public: {text}" for text in plan.public()]
        self.folder: Path | None = None
        self.engine: PrivacyEngine | None = None
        self.agreement: Agreement = ALONE
        self.history: History | None = None
        self.board: Board | None = None
        self.class_weights: Tensor | None = None
        self.charged: list[str] = []  # the ledger's ids of what this run charges, but for the engine's

    def run(self) -> Result:
        with ExitStack() as held:
            self.folder = self.group.from_first(partial(self._begin, held))
            started = time.perf_counter()
            estimator = self.group.from_first(self._fit)
            self.class_weights = self.group.from_first(self._class_weights)
            trained, steps = self._train(estimator)
            seconds = time.perf_counter() - started
            return Result(self.plan, *self.group.from_first(partial(self._finish, trained, estimator, steps, seconds)))

    # ---- the work of process 0 around the loop ----------------------------------------------------------------------

    def _begin(self, held: ExitStack) -> Path:
        """The run's folder, which is this process's alone while `held`; and its ledger."""
        plan = self.plan
        name = f"{plan.train.name}-{plan.algorithm.name}"
        self.folder = folder = Path(str(self.settings.out)) if plan.resumed else runs.create(self.settings.out, name)
        held.enter_context(checkpoints.held(folder))
        self.ledger = plan.ledger or Ledger(
            folder / "ledger.jsonl", dataset=plan.dataset_name, unit=plan.unit, delta=plan.delta
        )
        if not plan.resumed:
            plan.account.note_uncharged(f"{plan.algorithm}, {folder.name}")  # guarantees that are published name it
            if plan.noise_multiplier is not None and plan.algorithm.sound:
                self.ledger.settle_order(PoissonGaussian(plan.noise_multiplier, plan.rate))
            if plan.resumable:
                checkpoints.note_start(folder, plan)
        return folder

    def _finish(
        self, trained: nn.Module, estimator: prepared.Estimator | None, steps: int, seconds: float
    ) -> tuple[Any, ...]:
        """Write the run's folder. Returns what a `Result` has beside its plan."""
        plan, folder = self.plan, self._place
        metrics = self._metrics(trained)
        guarantee = self.guarantee()
        runs.write(folder, self._config(), plan.model, estimator)
        claimed = None if plan.algorithm.sound else plan.claimed_epsilon()
        own = guarantee_of(self.ledger, self._ids(), plan.delta, plan.accountant, guarantee)
        place = self.ledger.path or folder
        weights = self.class_weights
        named = None if weights is None else class_weights.by_name(weights, plan.train.classes)
        found = (metrics, guarantee, claimed, steps, seconds, folder, own, place, runs_in(self.ledger), named)
        runs.write_result(folder, Result(plan, *found).to_dict(), guarantee, on_record(self.ledger, self._ids(), own))
        return found

    @property
    def _place(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _fit(self) -> prepared.Estimator | None:
        estimator, fitted = self.plan.estimator, self._place / runs.FITTED
        if estimator is None:
            return None
        if self.plan.resumed and fitted.exists():
            self.charged += filter(None, [checkpoints.preprocessing_run(self._place)])
            made: prepared.Estimator = preprocessing.load(fitted)
            self.assumptions += made.assumptions_
            return made
        planned = {"preprocessing": type(estimator).__name__, "neighbours": "add-or-remove-one", "unit": self.plan.unit}
        charged = self.ledger.start(
            planned, seed=estimator.random_state, budget=self._budget(), accountant=self.plan.accountant
        )
        self.charged.append(charged.id)
        with charged:
            prepared.fit(estimator, self.plan.train, ledger=charged, keep=not self.settings.no_cache)
        if self.plan.resumable:
            checkpoints.note_preprocessing(self._place, charged.id)
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
        kept = checkpoints.class_counts(self._place) if plan.resumed else None
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
            if plan.resumable:
                checkpoints.note_class_counts(self._place, *kept)
        self.charged.append(kept[0])
        return torch.tensor(kept[1], dtype=torch.float32)

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

        def pretrain() -> str:
            lab = require("adadp_lab.pretraining", None, "the paper's net for images, with pre-trained convolutions,")
            pretrained = lab.pretrain("paper", data_dir=self.settings.data_dir, device=self.plan.device)
            lab.load_features(model, pretrained)
            return str(pretrained.assumption)

        self.assumptions.append(self.group.from_first(pretrain))
        self.group.copy_first(list(model.features.state_dict().values()))
        features = model.features.to(self.plan.device)

        @torch.no_grad()
        def of(images: Tensor) -> Tensor:
            return torch.cat([features(part.to(self.plan.device)).cpu() for part in torch.split(images, 512)])

        def probe(count: int, generator: torch.Generator) -> Tensor:
            return of(cast(Tensor, probes(count, generator)))

        return model.head, of(inputs), of(tested), probe

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _train(self, estimator: prepared.Estimator | None) -> tuple[nn.Module, int]:
        """The trained part of the model, and how many steps were made."""
        plan = self.plan
        keep = not self.settings.no_cache
        inputs, tested = (prepared.rows(part, estimator, keep=keep) for part in (plan.train, plan.test))
        probes = prepared.probes_for(plan.train, estimator)
        self.source = prepared.known_shape(estimator)
        model, inputs, tested, probes = self._features(inputs, tested, probes)
        model, self.test = model.to(plan.device), tested.to(plan.device)
        return model, self._steps(model, inputs.to(plan.device), plan.train.labels.to(plan.device), probes)

    def _steps(self, model: nn.Module, inputs: Tensor, labels: Tensor, probes: InputMaker) -> int:
        plan = self.plan
        algorithm, steps = plan.algorithm, plan.steps
        optimizer: Optimizer = algorithm.optimizer(p for p in model.parameters() if p.requires_grad)
        schedule = algorithms.schedule(algorithm.settings["schedule"], optimizer, steps, 1 / plan.rate)
        lots: PrivateLoader | ShuffledLots
        if algorithm.private:
            optimizer, lots = self._private(model, optimizer, TensorDataset(inputs, labels), probes)
            if self.group.first:
                self.history = history_of(self._place, algorithm, optimizer, steps)
        else:
            with self.ledger.start({"algorithm": algorithm.name, "steps": steps, "unit": plan.unit}) as charged:
                self.charged.append(charged.id)
                charged.charge(Uncovered(algorithm.reasons[0]))
            lots = ShuffledLots(inputs, labels, plan.lot, plan.seed_for("lots"))
        saved = checkpoints.Checkpoints(
            self._place, self.settings.checkpoint_every, self.engine, model, schedule,
            on=plan.resumable and self.group.first,
        )  # fmt: skip
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
            if self.board is not None:
                self.board.close()
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
        steps, done = self.plan.steps, self._made_before()
        every = max(1, math.ceil(steps / self.settings.evaluations))
        if self.group.first:
            runs.forget_after(self._place, done)
        if any(row[0] for row in self.group.rows([self.stop()])):
            self._interrupt(saved, done)
        note = self._noting(model, schedule, done) if self.group.first else None
        for done, _ in each_lot(lots, work, steps):
            schedule.step()
            evaluated = done % every == 0 or done == steps
            if evaluated:
                saved.refuse_unless_finite(done)
            if note is not None:
                note(done, evaluated)
            if done < steps and (self.stop() if self.group.alone else self.agreement.asked):
                self._interrupt(saved, done)
            if saved.due():
                saved.make(done)
        saved.refuse_unless_finite(done)
        if not _left_out(lots):
            saved.make(done)
        return done

    def _noting(self, model: nn.Module, schedule: LambdaLR, began: int) -> Callable[[int, bool], None]:
        """Write down and report where the run stands after each step."""
        plan, started = self.plan, time.perf_counter()
        board = self.board = Board(self._place, on=self.settings.tensorboard, step=began)
        accuracy: float | None = None
        epsilon: float | None = None

        def note(done: int, evaluated: bool) -> None:
            nonlocal accuracy, epsilon
            if self.history is not None:
                self.history.stepped(done)
            seconds = time.perf_counter() - started
            if evaluated:
                figures, epsilon = self._standing(model), self._epsilon_so_far()
                accuracy = figures.get("accuracy", figures.get("mae"))
                lr = schedule.optimizer.param_groups[0]["lr"]
                metrics = {"step": done, **figures, "epsilon": epsilon, "seconds": seconds, "lr": lr}
                runs.add_line(self._place / runs.METRICS, metrics)
                board.follow()
            if self.report is not None:
                speed = (done - began) * plan.lot / max(seconds, 1e-9)
                self.report(Progress(done, plan.steps, seconds, speed, accuracy, epsilon))

        return note

    def _made_before(self) -> int:
        return 0 if self.engine is None or self.engine.resumed is None else self.engine.resumed.lot

    def _interrupt(self, saved: checkpoints.Checkpoints, done: int) -> None:
        """Stop between two lots, by an error in every process: with a checkpoint, and what is charged."""

        def stop() -> None:
            saved.make(done)
            raise saved.interrupted(done, self.plan.steps, self.guarantee(), seeded=self.settings.seed is not None)

        self.group.from_first(stop)

    def _private(
        self, model: nn.Module, optimizer: Optimizer, examples: TensorDataset, probes: InputMaker
    ) -> tuple[Optimizer, PrivateLoader]:
        plan, seed = self.plan, self.settings.seed
        assert plan.noise_multiplier is not None

        def of_ledger() -> tuple[Budget | None, Path | dict[str, Any] | None, tuple[tuple[Event, int], ...]]:
            resume = checkpoints.source(self._place, self.ledger, seed) if plan.resumed else None
            return self._budget(), resume, tuple(plan.beside())

        budget, resume, beside = self.group.from_first(of_ledger)
        self.engine = PrivacyEngine(
            accountant=plan.accountant,
            seed=seed,
            ledger=self.ledger if self.group.first else None,
            budget=budget,
            resume=resume,
        )
        task = algorithms.Task(plan.lot, plan.steps, probes, plan.delta, beside, self.source)
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
        self.agreement = private.agreement
        if not self.group.alone:
            self.agreement.ask = self.stop
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
            {"metrics": "held-out counts", "neighbours": "add-or-remove-one", "unit": self.plan.unit},
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
