"""Losses with one value for each example: what `optimizer.backward(losses)` and `TrainingStep` take.

| function | logits, targets | an example's loss is the mean over its own |
| --- | --- | --- |
| `classification` | [n, C], [n] | one label |
| `causal_lm` | [n, T, V], [n, T] | tokens but the first, each predicted from the position before it |
| `masked_lm` | [n, T, V], [n, T] | labelled tokens, each at its own position (token classification too) |
| `seq2seq` | [n, T, V], [n, T] | decoder targets, each at its own position |
| `regression` | [n, ...], the same | outputs: squared errors |
| `binary` | [n, ...], the same | labels: binary cross entropies |

Formal property: row i of the result depends on row i of the arguments and on nothing else of the batch. The means that
PyTorch and Hugging Face models compute do not have it: they divide by the labelled tokens, or by the class weights, of
the whole batch, so that one example changes the size of every other example's gradient, and bounding one example's
gradient no longer bounds its influence.

A label of -100 (padding, unmasked tokens) counts for nothing. An example without any label has the loss 0 and the
gradient 0, whatever its logits are, NaN included. All is computed in float32, or in float64 where the logits are. No
call waits for the device or looks at values, so all can be recorded as CUDA graphs; a label that is neither -100 nor a
class is PyTorch's own indexing error. Arguments of a shape that could mix examples are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adadp.errors import ConfigurationError

__all__ = ["IGNORED", "binary", "causal_lm", "classification", "masked_lm", "regression", "seq2seq"]

IGNORED = -100
"""The label that counts for nothing, as in PyTorch and Hugging Face."""


def classification(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """Cross entropy of one label for each example, [n].

    Args:
        logits: [n, C].
        labels: [n], whole numbers in 0..C-1, or -100 for an example that counts for nothing.
        label_smoothing: the part, in [0, 1), of the target that is spread evenly over all classes.
        class_weights: [C], on the logits' device: each example's loss is multiplied by its label's weight, and not
            divided by the weights of the others. Public numbers: weights from counts of the private labels are a
            release of their own.

    """
    _require_tensor("logits", logits)
    if logits.dim() == 3:
        raise ConfigurationError(
            f"classification takes one label an example and logits [n, C], not {_shape(logits)}. For a label on every "
            "token use masked_lm, seq2seq or causal_lm, which take the mean over each example's own tokens"
        )
    _require_shape("classification", "logits", logits, "[n, C]", 2)
    _require_labels("classification", labels, logits, "[n]")
    losses = _cross_entropy(logits, labels, IGNORED, label_smoothing)
    if class_weights is None:
        return losses
    _require_tensor("class_weights", class_weights)
    if class_weights.shape != logits.shape[1:]:
        raise ConfigurationError(
            f"class_weights must have shape [C] = {_shape(logits[0])}, one for each class, not {_shape(class_weights)}"
        )
    # Labels that count for nothing read the first weight, and their loss is 0 already.
    own = class_weights.detach().to(losses.dtype).index_select(0, labels.long().clamp(min=0))
    return losses * own


def causal_lm(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of the next token, a mean over each example's own labelled tokens, [n].

    `logits` is [n, T, V] and `labels` [n, T], both from the same positions: the shift by one is done here, as Hugging
    Face models do it, so labels are the input's tokens with padding (and prompts) set to `ignore_index`.
    `label_smoothing` is the part, in [0, 1), of each target that is spread evenly over all words.
    """
    _require_tokens("causal_lm", logits, labels)
    # The labels are shifted and not the logits: a part of the logits would be a copy of nearly all of them.
    nothing = torch.full_like(labels[:, :1], ignore_index)
    return _token_mean(logits, torch.cat([labels[:, 1:], nothing], dim=1), ignore_index, label_smoothing)


def masked_lm(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of each labelled token at its own position, a mean over each example's own ones, [n].

    `logits` is [n, T, V]; `labels` [n, T] is -100 wherever nothing is predicted. Token classification is the same.
    `label_smoothing` is as in `causal_lm`.
    """
    _require_tokens("masked_lm", logits, labels)
    return _token_mean(logits, labels, IGNORED, label_smoothing)


def seq2seq(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of a decoder's targets, a mean over each example's own ones, [n].

    `logits` is [n, T, V]; `labels` [n, T] holds the targets, -100 where padded. Nothing is shifted: the decoder's
    inputs are the labels shifted right already. `label_smoothing` is as in `causal_lm`.
    """
    _require_tokens("seq2seq", logits, labels)
    return _token_mean(logits, labels, IGNORED, label_smoothing)


def regression(predictions: Tensor, targets: Tensor) -> Tensor:
    """Squared error, a mean over each example's own outputs, [n]. Both are [n, ...] and of one shape."""
    _require_alike("regression", "predictions", predictions, targets)
    working = _working(predictions.dtype)
    return (predictions.to(working) - targets.to(working)).square().reshape(len(predictions), -1).mean(1)


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy, a mean over each example's own labels, [n].

    Both are [n, ...] and of one shape. Targets are in [0, 1], or -100 where a label is not known.
    """
    _require_alike("binary", "logits", logits, targets)
    working = _working(logits.dtype)
    known = (targets != IGNORED).reshape(len(logits), -1)
    # Unknown ones are replaced before the loss, not after: 0 times the gradient of an infinite logit is not 0.
    scores = torch.where(known, logits.reshape(len(logits), -1).to(working), 0.0)
    wanted = torch.where(known, targets.reshape(len(logits), -1).to(working), 0.0)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    return _mean(torch.where(known, losses, 0.0), known)


# ---- cross entropy ---------------------------------------------------------------------------------------------------


def _token_mean(logits: Tensor, labels: Tensor, ignored: int, smoothing: float) -> Tensor:
    """Mean cross entropy over each example's own tokens, [n], from [n, T, V] and [n, T] at the same positions."""
    losses = _cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignored, smoothing)
    return _mean(losses.view(labels.shape), labels != ignored)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Row sums over the number of values that count, [n]; 0 for a row without any. Others must be 0 in `values`."""
    return values.sum(1) / counted.sum(1).clamp(min=1)


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int, smoothing: float) -> Tensor:
    """Cross entropy of each row, [rows], from [rows, C] and [rows]; 0 where the label is `ignored`."""
    if not 0 <= smoothing < 1:
        raise ConfigurationError(f"label_smoothing must be in [0, 1), not {smoothing!r}")
    losses: Tensor = _RowCrossEntropy.apply(logits, labels.long(), ignored, float(smoothing))  # type: ignore[no-untyped-call]
    return losses


class _RowCrossEntropy(torch.autograd.Function):
    """Cross entropy in float32 or better that keeps nothing of the logits' size but the logits themselves.

    `torch.nn.functional.cross_entropy` gives bfloat16 losses (three digits) for bfloat16 logits, and `logits.float()`
    makes float32 copies that live until backward: 9.1 GiB for 16 x 1,024 tokens of 50,000 words, whose logits take 1.5.
    Here only some rows at a time are float32, forward and again in backward, and the gradient has the logits' dtype:
    1.7 GiB, nearly all of it that gradient.
    """

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignored: int, smoothing: float) -> Tensor:
        working = _working(logits.dtype)
        losses = logits.new_empty(len(logits), dtype=working)
        for part in _parts(logits):
            rows = torch.log_softmax(logits[part], 1, dtype=working)
            missed = -rows.gather(1, _index(labels[part], ignored)).squeeze(1)
            if smoothing:
                missed = (1 - smoothing) * missed - smoothing * rows.mean(1)
            losses[part] = torch.where(labels[part] != ignored, missed, 0.0)
        return losses

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, labels, ctx.ignored, ctx.smoothing = inputs
        ctx.save_for_backward(logits, labels)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for part in _parts(logits):
            own = _index(labels[part], ctx.ignored)
            rows = torch.softmax(logits[part], 1, dtype=_working(logits.dtype))
            rows.scatter_(1, own, rows.gather(1, own) - (1 - ctx.smoothing))
            if ctx.smoothing:
                rows.sub_(ctx.smoothing / logits.shape[1])
            rows.mul_(outer[part, None])
            # Filled, not multiplied by 0: the logits of padding may be anything.
            gradient[part] = rows.masked_fill_((labels[part] == ctx.ignored)[:, None], 0.0)
        return gradient, None, None, None


_AT_A_TIME = 2**24
"""Logits that are float32 at a time: 64 MiB, a few of them in flight."""


def _parts(logits: Tensor) -> list[slice]:
    size = max(1, _AT_A_TIME // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _index(labels: Tensor, ignored: int) -> Tensor:
    """Labels as an index of columns, [rows, 1]; what is ignored reads the first column."""
    return torch.where(labels == ignored, 0, labels)[:, None]


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _require_tensor(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        return
    out = ": pass outputs.logits" if hasattr(value, "logits") else ""
    raise ConfigurationError(f"{name} must be a tensor, not {type(value).__name__}{out}")


def _require_shape(function: str, name: str, value: Tensor, wanted: str, dimensions: int) -> None:
    if value.dim() != dimensions:
        raise ConfigurationError(f"{function}: {name} must have shape {wanted}, not {_shape(value)}")
    if not value.is_floating_point():
        raise ConfigurationError(f"{function}: {name} must be floating-point numbers, not {value.dtype}")


def _require_labels(function: str, labels: Tensor, logits: Tensor, wanted: str) -> None:
    """Labels are whole numbers, one for each of the logits' rows."""
    _require_tensor("labels", labels)
    if labels.shape != logits.shape[:-1]:
        raise ConfigurationError(
            f"{function}: labels must have shape {wanted} = {list(logits.shape[:-1])} beside logits of "
            f"{_shape(logits)}, not {_shape(labels)}: each example keeps its own labels"
        )
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ConfigurationError(f"{function}: labels must be whole numbers (int64), not {labels.dtype}")


def _require_tokens(function: str, logits: Tensor, labels: Tensor) -> None:
    _require_tensor("logits", logits)
    if logits.dim() == 2:
        raise ConfigurationError(
            f"{function}: logits must have shape [n, T, V], not {_shape(logits)}. Tokens must stay with their example: "
            "flattened to [n * T, V] they no longer say whose they are, and each would count as an example of its own. "
            "Leave out .view(-1, V)"
        )
    _require_shape(function, "logits", logits, "[n, T, V]", 3)
    _require_labels(function, labels, logits, "[n, T]")


def _require_alike(function: str, name: str, values: Tensor, targets: Tensor) -> None:
    """Predictions and targets of one shape: broadcasting [n, 1] against [n] would pair every example with every one."""
    _require_tensor(name, values)
    _require_tensor("targets", targets)
    if values.shape != targets.shape:
        raise ConfigurationError(
            f"{function}: {name} {_shape(values)} and targets {_shape(targets)} must have one shape, the examples "
            f"first: broadcasting would mix examples. For [n, 1] beside [n], give {name}.squeeze(1)"
        )
    if values.dim() == 0 or (len(values) and not values[0].numel()):
        raise ConfigurationError(f"{function}: {name} must have shape [n, ...], not {_shape(values)}")
    if not values.is_floating_point():
        raise ConfigurationError(f"{function}: {name} must be floating-point numbers, not {values.dtype}")
