"""The callback that makes a Trainer's training private."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from adadp.accounting.accountants import get_accountant
from adadp.accounting.budget import Budget
from adadp.accounting.guarantee import Guarantee
from adadp.accounting.ledger import Ledger
from adadp.clipping import PaidFigures
from adadp.clipping.base import clipping_of
from adadp.engine import PrivacyEngine
from adadp.errors import AccountingError, ConfigurationError, TrainingLoopError
from adadp.extras import require
from adadp.gradients.collection import LOSS
from adadp.integrations.lightning.lot_step import LotStep
from adadp.integrations.lightning.metrics import TrainingMetrics
from adadp.integrations.lightning.refusals import refuse_optimizers, refuse_trained_on, refuse_trainer
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader, sampling_of
from adadp.sampling.lot import State

#: The name under which the released mean loss is logged.
PAID_LOSS = "train_loss_paid"
#: The package that is imported already, for each has classes of its own; `lightning` where neither is.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_PACKAGE = next((name for name in _PACKAGES if name in sys.modules), _PACKAGES[0])
_Callback: Any = require(_PACKAGE, "lightning", "adadp.integrations.lightning").Callback

_PUBLIC_VALIDATION = (
    "the validation set is public, as was declared: metrics of it may decide which checkpoint is kept, when training "
    "ends and how the learning rate goes on"
)


class Private(_Callback):  # type: ignore[misc]
    """Makes `Trainer.fit` private: module, optimizer and loader stay as they are written.

        private = Private(target_epsilon=1, target_delta=1e-5)
        L.Trainer(max_epochs=20, callbacks=[private]).fit(module, data)
        print(private.guarantee)

    The train loader's `batch_size` is the lot: the number of examples of a step on average. `training_step` takes one
    batch and returns one loss for each of its rows, [n], alone or as "loss" of a dict; a scalar that is their mean (or
    sum, with `loss_reduction="sum"`) works too. Either is tried on unlike examples, together with the module. Steps,
    schedulers, `max_steps` and `global_step` count lots, however many parts a lot is worked on in.

    Args:
        target_epsilon: the epsilon of everything in the ledger together with the steps that the trainer plans
            (`max_epochs`, `max_steps`, `limit_train_batches`). Or
        target_delta: the delta of the guarantee.
        noise_multiplier: the noise itself, in place of `target_epsilon`.
        engine: a PrivacyEngine whose ledger is charged. Without one, an engine is made of the next three.
        ledger: a file (or Ledger) that keeps a durable record.
        dataset: its declared name.
        seed: for tests and papers; it must stay secret.
        public_metrics: names (or patterns) of what may be logged while training, because it holds nothing of the
            data. Anything else that is logged there is dropped, with a warning.
        public_validation: declares that the validation set is public, so that metrics of it may decide which
            checkpoint is kept, when training ends and how the learning rate goes on.
        logged_loss_most: log the training loss as "train_loss_paid", to loggers and progress bar: the mean over the lot
            of losses cut to 0..this number. It is one more coordinate of each step's release
            (`adadp.clipping.PaidFigures`); its noise has a standard deviation of 5 noise multipliers times this number
            over the lot. `training_step` must return one loss for each row then.
        settings: the other arguments of `PrivacyEngine.make_private` (`max_grad_norm`, `clipping`,
            `max_physical_batch_size`, `public_examples`, ...). `steps` takes the place of the trainer's plan.

    Attributes:
        engine: the engine. One Private charges all calls of `fit` to its ledger.
        optimizer: the private optimizer of the last fit; None before.

    Raises:
        ConfigurationError: by `fit`, for settings of the trainer, callbacks, module or data that cannot be private.

    Guarantee:
        `guarantee` says what may be said of the weights, and whatever else the engine released. What hooks and
        callbacks of your own do with batches, losses and outputs is not covered by it.

    """

    def __init__(
        self,
        *,
        target_delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        engine: PrivacyEngine | None = None,
        ledger: Ledger | str | Path | None = None,
        dataset: str | None = None,
        seed: int | None = None,
        public_metrics: Collection[str] = (),
        public_validation: bool = False,
        logged_loss_most: float | None = None,
        **settings: Any,
    ) -> None:
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ConfigurationError("give either target_epsilon= or noise_multiplier=, and not both")
        if engine is not None and not (ledger is None and dataset is None and seed is None):
            raise ConfigurationError("ledger=, dataset= and seed= are the engine's: give them to PrivacyEngine")
        if isinstance(public_metrics, str):
            raise ConfigurationError(f"public_metrics is a list of names: [{public_metrics!r}]")
        self.engine = PrivacyEngine(ledger=ledger, dataset=dataset, seed=seed) if engine is None else engine
        self.optimizer: PrivateOptimizer | None = None
        self._target_epsilon, self._target_delta = target_epsilon, target_delta
        self._noise_multiplier = noise_multiplier
        self._public_metrics, self._public_validation = tuple(public_metrics), public_validation
        self._declared: int | None = settings.pop("steps", None)
        self._settings, self._logged_loss_most = settings, logged_loss_most
        self._steps: int | None = None  # that the run which trains now has planned
        self._saved: dict[str, Any] = {}  # of the checkpoint that the next fit goes on from
        self._metrics: TrainingMetrics | None = None
        self._loader: PrivateLoader | None = None
        self._source: Any = None  # of the train loader, as the user gave it
        self._trained_on: Any = None  # its dataset
        self._step: LotStep | None = None

    @property
    def guarantee(self) -> Guarantee:
        """What may be said about everything that this callback's engine released, at the target's delta."""
        return self.engine.guarantee(self._target_delta)

    @property
    def epsilon(self) -> float | None:
        """An upper bound on the cost of the releases so far, which takes next to no time; None where there is none.

        The guarantee may be larger while a planned run is under way: its plan is charged whole from the first step on.
        """
        whole = self.guarantee.epsilon  # never the budget, which other runs on this ledger need not keep
        if whole is None:
            return None
        try:
            bound = get_accountant("rdp").epsilon(self.engine._open().charged(), self._target_delta).epsilon
        except AccountingError:
            return whole
        return min(bound, whole)

    # ---- a checkpoint carries the run ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What Lightning saves of this callback: the run's place, plan and ledger's record; no seed and no batch."""
        if self.optimizer is None or self._loader is None or self._lot_is_out():
            return {}  # nothing to go on with: what was spent goes with the optimizer's state
        return {
            "run": self.engine.state_dict(self.optimizer),
            "noise_multiplier": self.optimizer.noise_multiplier,
            "steps": self._steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning gives back what it saved, before `fit` begins: `Trainer.fit(ckpt_path=...)`."""
        self._saved = dict(state_dict)

    # ---- a fit begins and ends --------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be private before anything runs."""
        self._saved = {}  # what `validate(ckpt_path=...)` loaded is not gone on with
        if stage == "fit":
            refuse_trainer(trainer, pl_module, public_validation=self._public_validation)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the trainer's optimizer and train loader by private ones; model and optimizers are set up by now."""
        refuse_optimizers(trainer, public_validation=self._public_validation)
        self._source = trainer.fit_loop._data_source.instance
        given = trainer.fit_loop._data_source.dataloader()
        self.optimizer, self._loader = self._made_private(trainer, pl_module, given)
        if self._public_validation:
            self.optimizer._run.note(assumptions=[_PUBLIC_VALIDATION])
        self._trained_on = given.dataset
        self._step = step = LotStep(self.optimizer, pl_module, trainer.precision_plugin)
        trainer.callbacks = [self, *(other for other in trainer.callbacks if other is not self)]  # sees batches first
        results = trainer.fit_loop.epoch_loop._results
        self._metrics = TrainingMetrics(results, self._public_metrics, lambda: step.trying)
        trainer.strategy.optimizers = [self.optimizer]
        trainer.strategy.model = pl_module  # not in DistributedDataParallel: the engine adds up the processes' sums
        trainer.strategy.training_step = step.training_step
        trainer.precision_plugin.backward = step.backward
        trainer.fit_loop._data_source.instance = self._loader
        trainer.fit_loop._combined_loader = None  # of the ordinary loader, if someone asked how many batches it has

    def _made_private(self, trainer: Any, module: Any, given: Any) -> tuple[PrivateOptimizer, PrivateLoader]:
        arguments = {
            "module": module,
            "optimizer": trainer.strategy.optimizers[0],
            "data_loader": given,
            **self._settings,
        }
        if self._logged_loss_most is not None:
            arguments = _with_paid_loss(arguments, self._logged_loss_most)
        saved, self._saved = self._saved, {}
        self._steps = self._declared
        if saved:
            self._go_on_from(saved)
        elif self._target_epsilon is not None:
            self._steps = self._declared or _planned_steps(trainer, given)
            _, optimizer, loader = self.engine.make_private_with_epsilon(
                target_epsilon=self._target_epsilon, target_delta=self._target_delta, steps=self._steps, **arguments
            )
            return optimizer, loader
        noise_multiplier = saved["noise_multiplier"] if saved else self._noise_multiplier
        assert noise_multiplier is not None
        _, optimizer, loader = self.engine.make_private(
            noise_multiplier=noise_multiplier, steps=self._steps, **arguments
        )
        return optimizer, loader

    def _go_on_from(self, saved: dict[str, Any]) -> None:
        """Let the next run be the one that was saved, with its noise and its plan."""
        if self._noise_multiplier is not None and self._noise_multiplier != saved["noise_multiplier"]:
            raise ConfigurationError(
                f"the run of this checkpoint has the noise multiplier {saved['noise_multiplier']:g}, and "
                f"{self._noise_multiplier:g} was given. Go on with the same, or begin another run with its weights"
            )
        if self.optimizer is not None:  # this engine has made a run: a new one goes on with its ledger
            self.engine = PrivacyEngine(
                accountant=self.engine.accountant_name,
                ledger=self.engine._open(),
                seed=self.engine.seed,
                strict=self.engine.strict,
                secure_mode=self.engine._randomness.secure,
                budget=self.engine.budget,
            )
        self.engine.load_state_dict(saved["run"])
        self._steps = saved["steps"]
        if self._target_epsilon is not None and self.engine.budget is None:
            self.engine._open()  # before it has a budget: that would be one of the whole ledger
            self.engine.budget = Budget(self._target_epsilon, self._target_delta)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the trainer back what was replaced; the private optimizer stays, so that checkpoints carry its cost."""
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As `on_fit_end`."""
        self._finish(trainer, pl_module)

    def _finish(self, trainer: Any, module: Any) -> None:
        if self._metrics is None:
            return
        self._metrics.restore()
        self._metrics = self._step = None
        vars(trainer.strategy).pop("training_step", None)
        vars(trainer.precision_plugin).pop("backward", None)
        trainer.fit_loop._data_source.instance = self._source
        self.engine.close()
        self.engine.detach(module)

    # ---- between batches --------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remember the batch, before other hooks see it."""
        assert self._step is not None
        self._step.handed_out(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show epsilon; end training where the budget is spent."""
        assert self._loader is not None
        if self._loader.stopped:
            self._stop(trainer)
            return
        self._log_paid(pl_module)
        every = trainer.log_every_n_steps
        if trainer.is_last_batch or (every and batch_idx % every == 0):
            epsilon = self.epsilon
            if epsilon is not None:
                assert self._metrics is not None
                self._metrics.log_public(pl_module, "epsilon", epsilon)

    def _log_paid(self, module: Any) -> None:
        assert self.optimizer is not None
        assert self._metrics is not None
        clipping = self.optimizer._step.clipping
        if self._logged_loss_most is not None and isinstance(clipping, PaidFigures):
            self._metrics.log_public(module, PAID_LOSS, float(clipping.means[LOSS]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refuse an epoch that was broken off while a lot was out."""
        assert self._loader is not None
        if self._loader.stopped or not self._lot_is_out():
            return
        self._loader.lots.note(reasons=["on_train_batch_start returned -1 for a batch: its lot was skipped"])
        raise TrainingLoopError(
            "a batch was skipped: on_train_batch_start returned -1, or an optimizer_step of the module did not call "
            "optimizer.step(). Where that depends on the batch, one example decides whether all others count. Use "
            "Trainer(limit_train_batches=...) for shorter epochs. The guarantee is none from here on."
        )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse the training set: its metrics would be logged without noise."""
        refuse_trained_on(self._trained_on, trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As `on_validation_start`."""
        refuse_trained_on(self._trained_on, trainer.test_dataloaders)

    def _lot_is_out(self) -> bool:
        assert self._loader is not None
        part = self._loader.current
        return part is not None and part.of.state not in (State.RELEASED, State.LEFT)

    def _stop(self, trainer: Any) -> None:
        """End training, whatever least number of steps was asked for. The last batch was no step."""
        trainer.should_stop = True
        loop = trainer.fit_loop
        loop.min_epochs, loop.epoch_loop.min_steps = 0, None
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        for count in (steps.total, steps.current):
            count.ready, count.completed = count.ready - 1, count.completed - 1


def _with_paid_loss(arguments: dict[str, Any], most: float) -> dict[str, Any]:
    """Arguments of `make_private` whose clipping releases the mean loss, too."""
    others = dict(arguments)
    inner = clipping_of(others.pop("clipping", "flat"), others.pop("max_grad_norm", None))
    return {**others, "clipping": PaidFigures(inner, {LOSS: (0.0, most)})}


def _planned_steps(trainer: Any, loader: Any) -> int:
    """How many lots the trainer's limits allow from here on."""
    loop, limit, lots = trainer.fit_loop, trainer.limit_train_batches, len(sampling_of(loader, "poisson"))
    lots = min(lots, limit) if isinstance(limit, int) else int(lots * limit)
    bounds: list[int] = []
    if loop.max_epochs != -1:
        bounds.append((loop.max_epochs - trainer.current_epoch) * lots)
    if loop.max_steps != -1:
        bounds.append(loop.max_steps - trainer.global_step)
    if not bounds:
        raise ConfigurationError(
            "the trainer has no limit: the noise for target_epsilon follows from the number of steps. Give "
            "Trainer(max_epochs=...) or max_steps, or Private(noise_multiplier=...)"
        )
    return max(1, min(bounds))


__all__ = ["Private"]
