"""What a private trainer refuses of a trainer's settings, each with its reason and the way out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from adadp.checks.held_out import shares_examples
from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import PrivateOptimizer


@dataclass(frozen=True)
class Refused:
    """A setting of TrainingArguments (or SFTConfig) that is refused where `is_set` says so of its value."""

    name: str
    is_set: Callable[[Any], bool]
    why: str


def _yes(value: Any) -> bool:
    return bool(value)


def _not(default: Any) -> Callable[[Any], bool]:
    """Whether a setting, or the enum's value that it became, differs from its default. None is never set."""
    return lambda value: value is not None and getattr(value, "value", value) != default


def _of_kind(*parts: str) -> Callable[[Any], bool]:
    return lambda value: any(part in str(getattr(value, "value", value)) for part in parts)


_WHOLE_MODELS = "Leave it out, and use torchrun for several devices: each process then keeps the whole model"

SETTINGS: tuple[Refused, ...] = (
    Refused(
        "gradient_accumulation_steps", _not(1),
        "per_device_train_batch_size is the whole lot of a step. Give that the product of the two, and the trainer "
        "max_physical_batch_size= for what fits in memory: pieces are added up inside the step",
    ),
    Refused(
        "dataloader_drop_last", _yes,
        "lots are drawn at random and none is the last: every example is in a lot with the same chance. Leave it out",
    ),
    Refused(
        "train_sampling_strategy", _not("random"),
        "lots must be drawn independently of what is in the examples, their lengths and order included. Leave it at "
        "'random'; pieces of a lot are padded by themselves (max_physical_batch_size=)",
    ),
    Refused(
        "auto_find_batch_size", _yes,
        "it restarts training with another lot when memory runs out, which depends on the examples drawn. Give "
        "max_physical_batch_size= instead: a lot too large for memory comes in pieces",
    ),
    Refused(
        "fp16", _yes,
        "its GradScaler looks for overflows in gradients that are not private, and skips steps because of them. Use "
        "bf16=True",
    ),
    Refused("deepspeed", _yes, "it takes gradients and optimizer over. " + _WHOLE_MODELS),
    Refused("fsdp", _yes, "it splits parameters, and adds gradients up itself. " + _WHOLE_MODELS),
    Refused("parallelism_config", _yes, "it splits one example's gradient over processes. " + _WHOLE_MODELS),
    Refused(
        "use_liger_kernel", _yes,
        "its fused loss is a mean over all tokens of the batch, and its layers have no per-example gradients. Leave "
        "it out",
    ),
    Refused(
        "neftune_noise_alpha", _not(None),
        "the size of its noise follows the longest row of the batch, so one example changes what the others get. Use "
        "the model's dropout",
    ),
    Refused(
        "include_num_input_tokens_seen", _not("no"),
        "a count of the private examples' tokens would be logged without noise. Leave it out",
    ),
    Refused(
        "skip_memory_metrics", lambda value: value is False,
        "peak memory follows the largest lot drawn, and would be logged without noise. Leave it at True",
    ),
    Refused(
        "debug", _yes,
        "it prints activations of private examples, and ends training because of them. Debug on public data",
    ),
    Refused(
        "data_seed", _not(None),
        "lots are drawn with the system's entropy, not with this seed. For tests and papers, the trainer's seed= "
        "makes lots and noise repeatable",
    ),
    Refused(
        "dataloader_in_order", lambda value: value is False,
        "a batch must come with the lot that it was drawn for. Leave it at True",
    ),
    Refused(
        "optim", _of_kind("lomo", "layerwise", "schedule_free"),
        "it updates weights outside of step(), where gradients are not private yet, or expects the loop to switch "
        "weights. Use adamw_torch, sgd, or another whose step() reads .grad",
    ),
    Refused(
        "packing", _yes,
        "documents are packed into rows before lots are drawn: without one document all later rows would be others. "
        "Leave it out: rows are padded within each piece of a lot (max_physical_batch_size=)",
    ),
    Refused(
        "padding_free", _yes,
        "all documents of a batch become one row, so they cannot be bounded one by one. Leave it out",
    ),
    Refused(
        "loss_type", _not("nll"),
        "only the negative log-likelihood is known for each example. Leave it out, or give per_example_loss=",
    ),
    Refused(
        "activation_offloading", _yes,
        "it moves what the per-example gradients are made of. Use gradient_checkpointing=True, or a smaller "
        "max_physical_batch_size=",
    ),
)  # fmt: skip

_UNPAID = (
    "what evaluation finds would decide what is kept or when training ends. On the training data that would be a "
    "release that nobody paid for. If the evaluation set is public, or its people have agreed, and none of it is in "
    "the training set, say so: public_evaluation=True (the guarantee then states it)"
)
#: Settings by which evaluation decides something; allowed with `public_evaluation`.
EVALUATION: tuple[Refused, ...] = (
    Refused("load_best_model_at_end", _yes, _UNPAID),
    Refused("metric_for_best_model", _not(None), _UNPAID),
    Refused("save_strategy", _of_kind("best"), _UNPAID),
    Refused("lr_scheduler_type", _of_kind("reduce_lr_on_plateau", "greedy"), _UNPAID),
)
_DECIDING_CALLBACKS = ("EarlyStoppingCallback",)

#: Methods that a private trainer replaces or goes past: those of a subclass would not be called, or not as meant.
REPLACED = (
    "compute_loss", "training_step", "get_batch_samples", "get_train_dataloader", "_get_train_sampler",
    "_inner_training_loop", "_run_epoch", "_prepare_for_training", "_maybe_log_save_evaluate", "train",
    "_prepare_inputs", "_prepare_input",  # they are run on a whole lot, outside of what is tried
)  # fmt: skip
_KNOWN = frozenset((
    "transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer.base_trainer", "trl.trainer.sft_trainer",
    "adadp.integrations.huggingface.trainer",
))  # fmt: skip


def refuse_class(trainer: Any) -> None:
    """Raise where a trainer's class replaces what a private trainer replaces."""
    for name in REPLACED:
        method = getattr(trainer, name, None)
        if method is None or getattr(method, "__module__", "") in _KNOWN:
            continue
        raise ConfigurationError(
            f"{trainer.__name__}.{name} is its own, and a private trainer has to replace it: it would be left out "
            "without a word, or see a whole lot at once. Known are transformers' Trainer and Seq2SeqTrainer and TRL's "
            "SFTTrainer, and subclasses that leave these methods alone: "
            + ", ".join(REPLACED)
            + ". A loss of your own goes into "
            "per_example_loss=, and what is done to a batch into it, the data collator or the dataset; for any other "
            "loop use PrivacyEngine.make_private."
        )


def refuse_settings(args: Any, public_evaluation: bool) -> None:
    """Raise where TrainingArguments hold a setting that a private trainer cannot keep."""
    for refused in (*SETTINGS, *(() if public_evaluation else EVALUATION)):
        value = getattr(args, refused.name, None)
        if refused.is_set(value):
            shown = getattr(value, "value", value)
            shown = shown if isinstance(shown, str | int | float | bool) else "..."
            raise ConfigurationError(f"TrainingArguments({refused.name}={shown!r}) is refused: {refused.why}.")
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigurationError(
            f"this process sees {args.n_gpu} GPUs, and would copy the model to all of them for each batch "
            "(DataParallel). Start one process for each, with torchrun --nproc-per-node or accelerate launch, or make "
            "one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )


def refuse_accelerator(accelerator: Any) -> None:
    """Raise where accelerate was set up (`accelerate launch`) to split the model, or to take its training over."""
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind != "NO" and not str(kind).startswith("MULTI_"):
        raise ConfigurationError(
            f"accelerate was set up for {kind}, which splits the model over processes or takes its optimizer over, so "
            "that no process knows an example's whole gradient. Start the script with torchrun --nproc-per-node, or "
            "choose plain multi-GPU in accelerate config: each process then keeps the whole model."
        )
    if getattr(accelerator, "split_batches", False) and accelerator.num_processes > 1:
        raise ConfigurationError(
            "accelerate was set up with split_batches=True, by which a batch size is that of all processes together. "
            "Leave it out: per_device_train_batch_size is that of one process."
        )


def refuse_own_clipping(args: Any, max_grad_norm: float | None) -> None:
    """Raise where the trainer's clipping was set, which a user may have meant for the bound on each example."""
    if getattr(args, "max_grad_norm", 1.0) not in (None, 0, 0.0, 1.0) and max_grad_norm is None:
        raise ConfigurationError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm!r}) clips the whole gradient, and is not used by a "
            "private trainer. For the bound on each example's gradient give the trainer max_grad_norm=; leave the "
            "other out."
        )


def refuse_parts(parts: Mapping[str, Any], public_evaluation: bool) -> None:
    """Raise where what a trainer was given, by the names of its arguments, cannot be trained with privately."""
    if parts.get("model_init") is not None:
        raise ConfigurationError(
            "model_init= makes new weights for every call of train(). Give model=; for several runs on the same data "
            "make several trainers with one ledger=, which charges them all."
        )
    dataset, evaluated = parts.get("train_dataset"), parts.get("eval_dataset")
    if dataset is not None and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")):
        raise ConfigurationError(
            f"train_dataset is a {type(dataset).__name__}, which is read in its own order: lots are drawn by index. "
            "Give a map-style dataset, with __len__ and __getitem__ (datasets.Dataset is one)."
        )
    others = evaluated.values() if isinstance(evaluated, Mapping) else (evaluated,)
    if any(shares_examples(dataset, one) for one in others):
        raise ConfigurationError(
            "eval_dataset is the training set, or holds examples of it: their metrics would be logged without noise. "
            "Set examples aside, which then have no guarantee, or leave it out."
        )
    optimizer, scheduler = parts.get("optimizers") or (None, None)
    if isinstance(optimizer, PrivateOptimizer):
        raise ConfigurationError("optimizers= has a private optimizer: give the ordinary one")
    if isinstance(scheduler, ReduceLROnPlateau) and not public_evaluation:
        raise ConfigurationError(f"a ReduceLROnPlateau scheduler is refused: {_UNPAID}.")
    if type(parts.get("data_collator")).__name__ == "DataCollatorWithFlattening":
        raise ConfigurationError(
            "DataCollatorWithFlattening makes one row of all documents of a batch, so they cannot be bounded one by "
            "one. Use a collator that pads."
        )
    _refuse_known_draws(parts.get("data_collator"))
    for callback in parts.get("callbacks") or ():
        refuse_callback(callback, public_evaluation)


def _refuse_known_draws(collator: Any) -> None:
    """Raise where a collator draws from a generator of its own: one example would move the draws of the next ones."""
    generators = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    held = getattr(collator, "__dict__", {})
    if held.get("seed") is not None or any(isinstance(value, generators) for value in held.values()):
        raise ConfigurationError(
            f"{type(collator).__name__} draws from a generator of its own, whose seed is known. Which tokens of a row "
            "are masked would then follow from how many come before it in the lot, so one example changes what others "
            "are trained on. Leave its seed out: a private trainer draws from the system's entropy."
        )


def refuse_callback(callback: Any, public_evaluation: bool) -> None:
    """Raise for a callback by which evaluation decides when training ends."""
    kind = callback if isinstance(callback, type) else type(callback)
    deciding = [one.__name__ for one in kind.__mro__ if one.__name__ in _DECIDING_CALLBACKS]
    if deciding and not public_evaluation:
        raise ConfigurationError(f"{deciding[0]} is refused: {_UNPAID}.")
