"""The private subclass of a trainer: what it replaces of the trainer's own, and where the engine comes in."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from adadp.accounting import model_card
from adadp.accounting.guarantee import Guarantee
from adadp.clipping import PaidFigures
from adadp.distributed.group import group_of
from adadp.errors import ConfigurationError
from adadp.extras import require
from adadp.integrations.huggingface import resuming
from adadp.integrations.huggingface.callback import PrivacyCallback
from adadp.integrations.huggingface.lots import LotNumbers, LotsInPieces, SteppedOptimizer
from adadp.integrations.huggingface.per_example import LossByHead, RowLosses, of_function, unwrapped
from adadp.integrations.huggingface.privacy import taken_from
from adadp.integrations.huggingface.refusals import (
    refuse_accelerator,
    refuse_callback,
    refuse_class,
    refuse_own_clipping,
    refuse_parts,
    refuse_settings,
)
from adadp.integrations.huggingface.state import write_into_state
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.recording import Losses
from adadp.mechanism.replay import TrainingStep
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.units import Units

#: Figures of a trainer's log that are private, and that nobody has paid for.
PRIVATE_FIGURES = (
    "loss", "grad_norm", "train_loss", "total_flos", "num_input_tokens_seen", "num_tokens", "entropy",
    "mean_token_accuracy", "aux_loss",
)  # fmt: skip
_COMPARED_ROWS = 2
_LOG = logging.getLogger(__name__)


@functools.cache
def private(trainer: type[Any]) -> type[Any]:
    """The private subclass of a trainer's class.

    Args:
        trainer: transformers' `Trainer` or `Seq2SeqTrainer`, TRL's `SFTTrainer`, or a subclass that leaves alone what
            a private trainer replaces.

    Returns:
        A subclass, the same for every call. It takes the arguments of `Privacy` beside the trainer's own.

    Raises:
        ConfigurationError: the class replaces the loop or the loss.
        MissingExtraError: transformers or accelerate is not installed.

    Guarantee:
        As for `PrivacyEngine.make_private`: `per_device_train_batch_size`, times the number of processes, is the
        expected lot, and each step is one Gaussian release on a lot, charged before it is made. The trainer's own loss,
        clipping and accumulation are not used, its training losses are not logged, and the random numbers of dropout
        and masking are not saved.

    """
    require("transformers", "huggingface", "a private trainer")
    require("accelerate", "huggingface", "a private trainer")
    if not isinstance(trainer, type):
        raise ConfigurationError(f"private() takes a trainer's class, not {type(trainer).__name__}: private(Trainer)")
    if issubclass(trainer, PrivateTraining):
        return trainer
    refuse_class(trainer)
    name = f"Private{trainer.__name__}"
    return type(name, (PrivateTraining, trainer), {"__doc__": trainer.__doc__, "__module__": __name__})


class PrivateTraining:
    """The part of a private trainer that is ours; the trainer's class follows it in the order of resolution.

    Attributes:
        engine: of this trainer; it has the ledger.
        privacy: the arguments that were given for it.

    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_class(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        above: Any = super()
        self.privacy = taken_from(kwargs)
        named = inspect.signature(above.__init__).bind_partial(*args, **kwargs).arguments
        refuse_parts(named, self.privacy.public_evaluation)
        self._given_dataset = named.get("train_dataset")  # from which TRL makes another
        self._refuse_settings(named.get("args"))
        self.engine = self.privacy.engine()
        self._private: PrivateOptimizer | None = None
        self._lots: LotsInPieces | None = None
        self._step: TrainingStep | None = None
        self._units: Units | None = None  # persons, whose rows the training set holds
        self._saved: resuming.Saved | None = None  # what train() goes on with
        self._paid: dict[str, list[float]] = {}  # means of figures that were released since the last log
        self._planned = 0  # lots of the whole run
        self._trained_model: Any = None  # as the trainer's loop gives it: with autocast, compiled
        above.__init__(*args, **kwargs)
        refuse_accelerator(self._self.accelerator)
        self._self.callback_handler.callbacks.insert(0, PrivacyCallback(self))

    def _refuse_settings(self, args: Any) -> None:
        if args is not None:
            refuse_settings(args, self.privacy.public_evaluation)
            refuse_own_clipping(args, self.privacy.max_grad_norm)

    @property
    def _self(self) -> Any:
        """The trainer, whose attributes have no types."""
        return self

    # ---- what a user asks for -----------------------------------------------------------------------------------

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee at `target_delta` for everything that the ledger holds, or *none* and why."""
        return self.engine.guarantee(self.privacy.target_delta)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's. `training_loss` is not a number: no guarantee covers a loss over private examples."""
        above: Any = super()
        trainer = self._self
        self._refuse_settings(trainer.args)  # they may have been changed
        parts = {name: getattr(trainer, name, None) for name in ("train_dataset", "eval_dataset", "data_collator")}
        refuse_parts(parts, self.privacy.public_evaluation)
        for callback in trainer.callback_handler.callbacks:
            refuse_callback(callback, self.privacy.public_evaluation)
        if self._private is not None:  # an earlier call's: the trainer's own optimizer goes on
            trainer.optimizer, self._private = self._private.original_optimizer, None
        self._saved = self._read(resume_from_checkpoint)
        if self.privacy.seed is None:
            _draw_from_the_system()
        try:
            output = above.train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.engine.detach(trainer.model)
            self.engine.close()  # the ledger is free for others, and has back what was reserved and not used
        return output._replace(training_loss=float("nan"))

    def _read(self, resume_from_checkpoint: Any) -> resuming.Saved | None:
        """The private run to go on with, if there is one. A missing checkpoint is the trainer's own error."""
        folder = resume_from_checkpoint
        if folder is True:
            utilities: Any = require("transformers.trainer_utils", "huggingface", "a private trainer")
            folder = utilities.get_last_checkpoint(self._self.args.output_dir)
        return resuming.read(folder) if folder else None

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial is a run on the private data, and the choice between them another."""
        raise ConfigurationError(
            "hyperparameter_search trains many times on the private data, and chooses by what came out. Choose on "
            "public data, or make a trainer for each trial with one ledger=, which charges them all."
        )

    # ---- lots in place of batches -------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The numbers of an epoch's lots. The lots themselves are fetched where they are trained on."""
        self._units = self.privacy.units(self._self.train_dataset)
        return LotNumbers(self.privacy.lots(self._ordinary_loader(), self._units))

    def num_examples(self, dataloader: Any) -> int:
        """As the trainer's; of training data for persons how many they are. The trainer logs it, and speeds made of it.

        How many rows persons have together is not public.
        """
        above: Any = super()
        if isinstance(dataloader, LotNumbers):
            return len(self._self.train_dataset) if self._units is None else self._units.declared
        return int(above.num_examples(dataloader))

    def _ordinary_loader(self) -> DataLoader[Any]:
        trainer = self._self
        if trainer.train_dataset is None:
            raise ConfigurationError("training needs train_dataset=")
        dataset, collate, args = trainer.train_dataset, trainer.data_collator, trainer.args
        if type(dataset).__module__.partition(".")[0] == "datasets":
            dataset = trainer._remove_unused_columns(dataset, description="Training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="Training")
        return DataLoader(
            dataset,
            batch_size=trainer._train_batch_size * args.world_size,  # the lot of all processes together
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, None]:
        """One lot's number, and no count of tokens: it would be a number about all of the lot's examples."""
        return [next(epoch_iterator)], None

    # ---- the engine in the place of the trainer's optimizer ------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, with the model in no DistributedDataParallel: the engine adds up the processes' sums."""
        above: Any = super()
        accelerator = self._self.accelerator
        if accelerator.num_processes > 1:
            accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        try:
            return above._prepare_for_training(*args, **kwargs)
        finally:
            vars(accelerator).pop("prepare_model", None)

    def create_optimizer(self, model: Any = None) -> Any:
        """The trainer's own optimizer; while it trains, made private."""
        above: Any = super()
        trainer = self._self
        above.create_optimizer(model)
        if trainer.is_in_train and self._private is None:
            trainer.optimizer = self._make_private()
        return trainer.optimizer

    def _make_private(self) -> SteppedOptimizer:
        trainer = self._self
        ordinary = self._ordinary_loader()
        processes = group_of(trainer.model)
        processes.copy_first([*trainer.model.parameters(), *trainer.model.buffers()])  # a new head is made at random
        if processes.size > 1 and processes.first:
            _LOG.warning(
                f"a lot has {ordinary.batch_size:,} {'examples' if self._units is None else 'persons'} on average: "
                f"per_device_train_batch_size={trainer._train_batch_size:,} in each of {processes.size} processes"
            )
        self._rows = self._row_losses()
        self._rows.refuse_another(trainer.model, self._single_rows(ordinary), trainer.label_smoother)
        loader: PrivateLoader
        steps, noise_multiplier = self._plan()
        _, self._private, loader = self.privacy.make_private(
            self.engine,
            steps=steps,
            noise_multiplier=noise_multiplier,
            module=trainer.model,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            data_loader=ordinary,
            unit=self._units,
        )
        if self.privacy.public_evaluation:
            self._private._run.note(assumptions=[_PUBLIC_EVALUATION])
        self._lots = LotsInPieces(loader)
        self._step = TrainingStep(self._private, self._losses)
        loader.whole_lots = self.privacy.pad_lots  # pieces are padded by themselves, unless steps are to be replayed
        return SteppedOptimizer(self._private)

    def _plan(self) -> tuple[int, float | None]:
        """How many lots are planned, and with which noise if that is settled. An interrupted run keeps its plan."""
        state, saved = self._self.state, self._saved
        self._planned = int(state.max_steps)
        if saved is None:
            return self._planned, None
        if state.global_step >= state.max_steps:
            raise ConfigurationError(
                f"all {state.max_steps} steps were made already: raise max_steps or num_train_epochs to train on"
            )
        if self.engine._runs:  # of an earlier call of train(), whose ledger the next engine goes on with
            self.engine = dataclasses.replace(self.privacy, ledger=self.engine._open()).engine()
        if saved.steps == self._planned:
            self.engine.load_state_dict(saved.engine)
            return self._planned, saved.noise_multiplier
        self.engine._join(self._self.model)  # process 0 opens the ledger
        self.engine._open().inherit(saved.spending)  # another plan is another run, on top of what was spent
        return int(state.max_steps - state.global_step), None

    def _row_losses(self) -> RowLosses:
        trainer = self._self
        given = self.privacy.per_example_loss
        if given is None and trainer.compute_loss_func is not None:
            given = of_function(trainer.compute_loss_func)
        loss = LossByHead(trainer.model, trainer.args.label_smoothing_factor) if given is None else given
        return RowLosses(loss, trainer.model, trainer.label_names)

    def _single_rows(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """A few batches of one row: public ones where there are some."""
        public = self.privacy.public_examples
        items = loader.dataset if public is None else public
        with torch.random.fork_rng(devices=[]):
            for place in range(min(_COMPARED_ROWS, len(items))):  # type: ignore[arg-type]
                yield self._self._prepare_inputs(loader.collate_fn([items[place]]))

    def _losses(self, inputs: Any) -> Losses:
        return self._rows.with_figures(self._trained_model, inputs, self.privacy.figures())

    # ---- a step -------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Work on the next lot in all its pieces, and release its gradient. Returns zero in place of a loss."""
        trainer = self._self
        if self._lots is None or self._step is None:
            raise ConfigurationError("training_step is called by train(): there is no lot to work on outside of it")
        self._trained_model = model
        model.train()
        for batch in self._lots.next_lot():
            # The model's forward has autocast of its own. It is on here too: trials must know how results are rounded.
            with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
                self._step(trainer._prepare_inputs(batch))
        self._trained_model = None
        clipping = None if self._private is None else self._private._step.clipping
        if isinstance(clipping, PaidFigures) and not self.budget_spent:
            for name, mean in clipping.means.items():
                self._paid.setdefault(name, []).append(float(mean))
        return torch.zeros((), device=trainer.args.device)

    @property
    def budget_spent(self) -> bool:
        """Whether the budget did not allow the last lot, which was not released."""
        return self._lots is not None and self._lots.loader.stopped

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In evaluation, as the trainer's; with `per_example_loss`, its mean."""
        above: Any = super()
        loss = self.privacy.per_example_loss
        if loss is None:
            return above.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        rows = RowLosses(loss, unwrapped(model), self._self.label_names)
        outputs = model(**rows.without_labels(inputs))
        mean = loss(outputs, inputs).mean()
        return (mean, outputs) if return_outputs else mean

    def _clip_grad_norm(self, model: Any) -> None:
        """The trainer's clipping is off: each example's gradient was bounded."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """None is logged."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it is proportional to the number of the lot's tokens."""
        return 0

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; refused on the training set."""
        above: Any = super()
        for trained_on in (self._self.train_dataset, self._given_dataset):
            refuse_parts({"train_dataset": trained_on, "eval_dataset": eval_dataset}, True)
        return above.evaluate(eval_dataset, *args, **kwargs)

    # ---- what is written down -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's, without figures over private examples, and with epsilon."""
        above: Any = super()
        training = "learning_rate" in logs or "train_runtime" in logs
        for name in PRIVATE_FIGURES:
            logs.pop(name, None)
        if training:  # released with the gradients
            logs.update({name: sum(means) / len(means) for name, means in self._paid.items()})
            self._paid.clear()
        if training:
            epsilon = self.guarantee.epsilon
            if epsilon is not None:
                logs["epsilon"] = epsilon
        above.log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        above: Any = super()
        above._save(output_dir, *args, **kwargs)
        self._write_card(self._self.args.output_dir if output_dir is None else output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the trainer's, with the guarantee."""
        above: Any = super()
        above.create_model_card(*args, **kwargs)
        self._write_card(self._self.args.output_dir)

    def _write_card(self, folder: str) -> None:
        if self._self.args.should_save and Path(folder).is_dir():
            model_card.write_into(folder, self.guarantee)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        above: Any = super()
        write_into_state(self._self.state, self.guarantee)
        above._save_checkpoint(*args, **kwargs)

    def save_state(self) -> None:
        """As the trainer's, with the guarantee."""
        above: Any = super()
        write_into_state(self._self.state, self.guarantee)
        above.save_state()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        above: Any = super()
        above._save_optimizer_and_scheduler(output_dir)
        if self._private is not None and self._self.args.should_save and not self.budget_spent:
            resuming.save(output_dir, self.engine, self._private.noise_multiplier, self._planned)

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing is saved: whoever knows dropout's random numbers can tell rows of a lot apart by them."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """There is none."""


_PUBLIC_EVALUATION = (
    "the evaluation set, which may have decided what was kept, when training ended and the rate, is public or its "
    "people have agreed, and none of it is in the training set (public_evaluation=True)"
)


def _draw_from_the_system() -> None:
    """New random numbers for dropout and masking: `args.seed` is public, and their place in a lot depends on others."""
    random.seed()
    np.random.seed()
    torch.seed()
