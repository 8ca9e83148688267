"""Settings of a Trainer that private training cannot be combined with, each with the way out.

They are refused before anything is made private. Types are known by their names, so that `lightning` and
`pytorch_lightning`, which have classes of their own, are treated alike, and neither is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from adadp.checks.held_out import shares_examples
from adadp.distributed.wrapped import sharded_parts
from adadp.errors import ConfigurationError

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")

#: Callbacks that are refused, by the name of their class or of one that they derive from.
_CALLBACKS = {
    "GradientAccumulationScheduler": "it puts several batches together. The loader's batch_size is the lot; "
    "Private(max_physical_batch_size=...) works on it in parts",
    "BatchSizeFinder": "each of its trials trains on private data that nobody pays for. Choose the lot as batch_size, "
    "and Private(max_physical_batch_size=...) for memory",
    "LearningRateFinder": "it reads training losses, and trains on private data that nobody pays for. Choose the rate "
    "on public data, or by runs that are charged to the same ledger",
    "StochasticWeightAveraging": "it changes epochs and optimizers on the way. Average the weights of saved "
    "checkpoints instead: that costs nothing",
    "WeightAveraging": "it swaps weights while the engine watches them. Average the weights of saved checkpoints "
    "instead: that costs nothing",
    "BaseFinetuning": "it adds parameters to the optimizer on the way, which would be trained without clipping and "
    "noise. Freeze and unfreeze before fit, and call fit once for each phase",
    "ModelPruning": "it replaces weights on the way. Prune before fit, or the trained model",
    "SpikeDetection": "it skips batches because of their losses, so that one example decides whether others count",
    "ThroughputMonitor": "it logs how many examples each lot holds, which is private",
    "DeviceStatsMonitor": "it logs the memory in use, which follows how many examples each lot holds",
}

#: Hooks that change a batch before `training_step` sees it, by whole lots: what they mix could not be tried.
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

#: Callbacks that act on a metric.
_MONITORING = ("EarlyStopping", "ModelCheckpoint")

_UNPAID = (
    "acts on {monitor!r}: which weights are kept, or when training ends, would depend on examples that nobody paid for "
    "(of training: they are not logged; of validation: people who have no guarantee). If the validation set is public, "
    "declare it: Private(public_validation=True). Otherwise {way_out}"
)


def refuse_trainer(trainer: Any, module: Any, *, public_validation: bool) -> None:
    """Raise ConfigurationError for what the trainer, its callbacks or the module's hooks would do.

    Called before the model is on its device and before optimizers exist (`setup`).
    """
    _raise(
        [*_settings(trainer), *_callbacks(trainer, public_validation), *_module(module), *_batch_hooks(module, trainer)]
    )


def refuse_optimizers(trainer: Any, *, public_validation: bool) -> None:
    """Raise ConfigurationError for optimizers and schedulers that cannot be made private."""
    _raise(_optimizers(trainer, public_validation))


def refuse_trained_on(dataset: Any, loaders: Any) -> None:
    """Raise ConfigurationError where one of `loaders`, in whatever containers, reads examples of the training set."""
    if any(shares_examples(dataset, getattr(loader, "dataset", None)) for loader in tree_leaves(loaders)):
        raise ConfigurationError(
            "these loaders read examples of the training set: their metrics would be logged without noise. Set "
            "examples aside, which then have no guarantee, or use trainer.predict, which logs nothing"
        )


def _raise(found: Iterator[str] | list[str]) -> None:
    problems = list(found)
    if problems:
        raise ConfigurationError("; ".join(problems))


def _settings(trainer: Any) -> Iterator[str]:
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) puts several lots together, which is "
            "not the mechanism that is accounted for. Make the loader's batch_size the lot, and give "
            "Private(max_physical_batch_size=...) what fits in memory"
        )
    if trainer.gradient_clip_val:
        yield (
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips the sum of all examples' gradients, which "
            "bounds nobody's influence. Private(max_grad_norm=...) bounds each example's"
        )
    if trainer.precision not in _PRECISIONS:
        yield (
            f"Trainer(precision={trainer.precision!r}): loss scalers look for overflows in gradients that are not "
            f"private, and other formats were not tried. Use one of {', '.join(_PRECISIONS)}"
        )
    strategy = trainer.strategy
    if not _is(strategy, "SingleDeviceStrategy") and getattr(strategy, "_start_method", None) != "popen":
        yield (
            f"Trainer(strategy={type(strategy).__name__}): it splits the model, or starts its processes from this one. "
            "Use one device, or strategy='ddp'"
        )
    if trainer.overfit_batches:
        yield "Trainer(overfit_batches=...) trains on the same examples again and again. Use limit_train_batches"
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "Trainer(reload_dataloaders_every_n_epochs=...) replaces the private loader by another. Call fit once for "
            "each loader: one Private charges them all"
        )
    if getattr(trainer, "_detect_anomaly", False):
        yield (
            "Trainer(detect_anomaly=True) ends training because of one example's gradient. Examples whose gradients "
            "are not finite count for nothing by themselves"
        )


def _callbacks(trainer: Any, public_validation: bool) -> Iterator[str]:
    for callback in trainer.callbacks:
        name = type(callback).__name__
        for known, why in _CALLBACKS.items():
            if _is(callback, known):
                yield f"the callback {name}: {why}"
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and not public_validation and any(_is(callback, kind) for kind in _MONITORING):
            way_out = (
                "keep every checkpoint, or the last (monitor=None)"
                if _is(callback, "ModelCheckpoint")
                else "train for the planned number of epochs"
            )
            yield f"the callback {name} " + _UNPAID.format(monitor=monitor, way_out=way_out)


def _module(module: Any) -> Iterator[str]:
    kind = type(module)
    if sharded_parts(module):
        yield (
            "the module is sharded by fully_shard (FSDP2), which is covered in a loop of one's own alone "
            "(docs/distributed.md). Leave it out, or use strategy='ddp'"
        )
    if not module.automatic_optimization:
        yield (
            "automatic_optimization=False: the loop is the module's own. Use the engine in it directly "
            "(PrivacyEngine().make_private), outside of Lightning, or let Lightning optimize"
        )
    if _defines(kind, "backward"):
        yield f"{kind.__name__}.backward: the backward pass is the engine's. Leave it out"
    if _defines(kind, "configure_gradient_clipping"):
        yield (
            f"{kind.__name__}.configure_gradient_clipping is called before gradients are released, and finds none. "
            "Private(max_grad_norm=...) clips each example's"
        )
    if "dataloader_iter" in inspect.signature(kind.training_step).parameters:
        yield f"{kind.__name__}.training_step(dataloader_iter) fetches ahead. Let it take one batch: (self, batch)"
    if getattr(module, "_compiler_ctx", None) is not None:
        yield (
            "the LightningModule is compiled as a whole, logging and all. Compile what it computes with: "
            "module.net = torch.compile(module.net)"
        )


def _batch_hooks(module: Any, trainer: Any) -> Iterator[str]:
    for hook, owner in (
        (hook, owner) for hook in _BATCH_HOOKS for owner in (module, getattr(trainer, "datamodule", None))
    ):
        if owner is not None and (hook in vars(owner) or _defines(type(owner), hook)):
            yield (
                f"{type(owner).__name__}.{hook} changes whole lots outside of training_step, where what it does to "
                "one example because of others cannot be tried. Do it in training_step, or in the dataset item by item"
            )


def _optimizers(trainer: Any, public_validation: bool) -> Iterator[str]:
    optimizers = trainer.strategy.optimizers
    if len(optimizers) != 1 or _is(optimizers[0], "_MockOptimizer"):
        count = sum(not _is(optimizer, "_MockOptimizer") for optimizer in optimizers)
        yield f"configure_optimizers returned {count} optimizers: one is needed, over all parameters that are trained"
    for config in trainer.strategy.lr_scheduler_configs:
        if getattr(config, "reduce_on_plateau", False) and not public_validation:
            way_out = "use a schedule that is fixed beforehand (cosine, steps)"
            yield f"{type(config.scheduler).__name__} " + _UNPAID.format(monitor=config.monitor, way_out=way_out)


def _is(thing: object, name: str) -> bool:
    """Whether it is of a class of that name, or of one derived from it."""
    return any(base.__name__ == name for base in type(thing).__mro__)


def _defines(kind: type, method: str) -> bool:
    """Whether a class other than Lightning's own defines this method."""
    owner = next(base for base in kind.__mro__ if method in vars(base))
    return owner.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
