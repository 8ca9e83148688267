"""One loss for each example in place of a trainer's mean: chosen by the model's head, compared with its own loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from adadp import losses
from adadp.errors import ConfigurationError
from adadp.integrations.huggingface.privacy import LossOfRows

_CLASSIFIER = re.compile(r"For(Sequence|Image|Audio|Video)Classification")
_OWN_PLACE = re.compile(r"For(MaskedLM|TokenClassification)")
_NEXT = re.compile(r"ForCausalLM|LMHeadModel$")
_GIVE_IT = (
    "Give the trainer per_example_loss=, a function of the model's outputs and the batch that returns one loss for "
    "each row, [n] (adadp.losses has the usual ones)"
)


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT's and torch.compile's wrappers."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class LossByHead:
    """The loss of a transformers model for each row, by its class: the mean over each row's own labels.

    Raises:
        ConfigurationError: the head is none of those that are known.

    """

    def __init__(self, model: Any, smoothing: float = 0.0) -> None:
        self._model, self._smoothing = unwrapped(model), smoothing
        name, self.config = type(self._model).__name__, getattr(self._model, "config", None)
        self.generates, self.shifted = False, False
        if _CLASSIFIER.search(name):
            self._rows = self._classification
        elif _OWN_PLACE.search(name):
            self._rows = self._at_own_place
        elif getattr(self.config, "is_encoder_decoder", False) and "ForConditionalGeneration" in name:
            self._rows, self.generates = self._of_decoder, True
        elif _NEXT.search(name) and not getattr(self.config, "is_encoder_decoder", False):
            self._rows, self.shifted = self._next, True
        else:
            raise ConfigurationError(f"the loss of each example is not known for a {name}. {_GIVE_IT}.")

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """One loss for each row, [n]."""
        if inputs.get("labels") is None:
            raise ConfigurationError("the batch has no 'labels': the data collator must make them")
        return self._rows(logits_of(outputs), inputs["labels"])

    def _classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        count, kind = len(logits), getattr(self.config, "problem_type", None)
        if kind is None:  # as the models decide it
            whole = not labels.is_floating_point() and labels.dtype != torch.bool
            kind = "single_label" if whole and logits.shape[1] > 1 else "multi_label"
            kind = "regression" if logits.shape[1] == 1 else kind
        if kind.startswith("single_label"):
            return losses.classification(logits, labels.reshape(count), label_smoothing=self._smoothing)
        targets = labels.reshape(count, -1).to(torch.promote_types(logits.dtype, torch.float32))
        if kind == "regression":
            return losses.regression(logits.reshape(count, -1), targets)
        return losses.binary(logits.reshape(count, -1), targets)

    def _at_own_place(self, logits: Tensor, labels: Tensor) -> Tensor:
        return losses.masked_lm(logits, labels, label_smoothing=self._smoothing)

    def _of_decoder(self, logits: Tensor, labels: Tensor) -> Tensor:
        return losses.seq2seq(logits, labels, label_smoothing=self._smoothing)

    def _next(self, logits: Tensor, labels: Tensor) -> Tensor:
        own = logits[:, -labels.shape[1] :]  # prompts that are learnt come before the text
        return losses.causal_lm(own, labels, label_smoothing=self._smoothing)


def logits_of(outputs: Any) -> Tensor:
    """The logits among a model's outputs."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(found, Tensor):
        raise ConfigurationError(f"the model returns no logits. {_GIVE_IT}.")
    return found


class RowLosses:
    """Runs a model on a batch without its labels, and returns one loss for each row, [n].

    Args:
        loss: of the model's outputs and the batch.
        model: the transformers model, which makes a decoder's inputs of labels.
        label_names: entries of the batch that are not given to the model: it would compute a mean over all of them.

    """

    def __init__(self, loss: LossOfRows, model: Any, label_names: Iterable[str]) -> None:
        self._loss, self._model, self._labels = loss, unwrapped(model), frozenset(label_names)

    def __call__(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """The losses of `model`, which may be a wrapper of the model that this was made for."""
        return self._loss(model(**self.without_labels(inputs)), inputs)

    def with_figures(
        self, model: Callable[..., Any], inputs: Mapping[str, Any], figures: Mapping[str, LossOfRows]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses, and other figures of the same outputs."""
        outputs = model(**self.without_labels(inputs))
        with torch.no_grad():
            found = {name: function(outputs, inputs) for name, function in figures.items()}
        return self._loss(outputs, inputs), found

    def without_labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is called with."""
        given = {name: value for name, value in inputs.items() if name not in self._labels}
        decoding = isinstance(self._loss, LossByHead) and self._loss.generates
        if decoding and "decoder_input_ids" not in given and "decoder_inputs_embeds" not in given:
            if not hasattr(self._model, "prepare_decoder_input_ids_from_labels"):
                raise ConfigurationError(
                    f"{type(self._model).__name__} makes its decoder's inputs of the labels inside: have the data "
                    "collator add 'decoder_input_ids'"
                )
            given["decoder_input_ids"] = self._model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
        return given

    @torch.no_grad()
    def refuse_another(self, model: Any, batches: Iterable[Any], smoother: Any) -> None:
        """Raise where the model's own loss on one row is another: then training would not be what the user expects.

        Args:
            model: run in evaluation mode.
            batches: each of one row.
            smoother: transformers' LabelSmoother, where the trainer uses it.

        """
        if not isinstance(self._loss, LossByHead):
            return
        training = model.training
        model.eval()
        try:
            for batch in batches:
                outputs = model(**self.without_labels(batch))
                ours = self._loss(outputs, batch)
                if smoother is not None and _smooths(self._loss):
                    own = smoother(outputs, batch["labels"], shift_labels=self._loss.shifted)
                else:
                    own = _own_loss(model(**batch))
                if own is None or not _alike(own, ours, logits_of(outputs).dtype):
                    raise ConfigurationError(
                        f"the loss that {type(self._model).__name__} computes on one example is not the one that is "
                        "known for its head (a term of its own, weights, another normalisation), which would be "
                        f"trained on instead. {_GIVE_IT}."
                    )
        finally:
            model.train(training)


def _smooths(loss: LossByHead) -> bool:
    """Label smoothing is left out by Trainer where labels are several or numbers."""
    return getattr(loss.config, "problem_type", None) not in ("regression", "multi_label_classification")


def _own_loss(outputs: Any) -> Tensor | None:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    return found if isinstance(found, Tensor) else None


def _alike(own: Tensor, ours: Tensor, dtype: torch.dtype) -> bool:
    if not own.isfinite().all():
        return True  # a row without labels: its mean over nothing is not a number, and our loss is 0
    rough = 1e-4 if dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(own.float().mean(), ours.float().mean(), rtol=rough, atol=rough * 1e-2)


def of_function(compute_loss_func: Callable[..., Any]) -> LossOfRows:
    """A trainer's `compute_loss_func(outputs, labels, num_items_in_batch)`, which must return one loss for each row."""

    def rows(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        found = compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=None)
        if not isinstance(found, Tensor) or found.ndim != 1:
            raise ConfigurationError(
                "compute_loss_func returned a scalar: a private trainer needs one loss for each row of the batch, "
                "[n], without a sum or mean over rows. " + _GIVE_IT + "."
            )
        return found

    return rows
